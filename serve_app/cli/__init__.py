"""The cli room is the command line: `main.py` collects the commands, and each command has a module."""

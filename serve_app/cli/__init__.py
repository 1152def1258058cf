"""The command line: `main.py` collects the commands, one module each."""

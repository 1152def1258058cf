"""Scripts behind the targets of the Makefile. Those that generate files of the repository have a test that compares the result."""

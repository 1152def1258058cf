"""Scripts that make files which are in the repository: `make generated` runs them, tests compare."""

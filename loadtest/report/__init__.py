"""The report draws figures and one HTML page from a run's files."""

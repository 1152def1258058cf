"""The control of a run: Locust with its workers, what is observed and injected beside the load, and what it all leaves on disk."""

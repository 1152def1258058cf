"""Batch inference: the lines of a file become requests to a running service, and their answers one line each.

``rows`` reads the input, ``requests`` makes requests of it, ``journal`` remembers what was answered through any crash, ``runner`` asks the
service. docs/adr/0015-a-journal-makes-batches-resumable.md has the reasons. The package knows the service by HTTP alone.
"""

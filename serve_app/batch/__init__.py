"""Batch inference: the lines of a file, or the elements of a pipeline, become requests to a service, and their answers one result each.

``requests`` makes requests, and ``client`` asks for them; ``blocking`` is that client for threads. For files, ``rows`` reads the input,
``journal`` remembers what was answered through any crash, and ``runner`` brings them together; ``fleet_process`` is a service that lives
for one batch. ``ray_data`` and `serve_app.beam` are for pipelines. The reasons are in docs/adr/0015 and 0018. The package knows the
service by HTTP alone.
"""

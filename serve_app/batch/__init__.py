"""Batch inference: the lines of a file become requests to a running service, and their answers one line each.

``rows`` reads the input, ``requests`` makes requests of it, ``journal`` remembers what was answered through any crash, ``runner`` asks the
service. docs/adr/0015-a-journal-makes-batches-resumable.md has the reasons. `serve-app batch run` is these parts over HTTP.

OpenAI's Files and Batches API is the same parts inside an ingress (docs/adr/0017-batches-run-in-the-ingress.md): ``service`` puts it
together, ``files_api`` and ``batches_api`` are the routes, ``store`` and ``folder`` keep records and bytes, ``worker`` and ``job`` run the
batches, and ``in_process`` asks the ingress's own application. The package knows that application as an ASGI callable, and nothing else of
the ingress.
"""

"""The batch room turns lines of a file, or elements of a pipeline, into requests to a service, and writes one result for each.

``requests`` makes requests, and ``client`` sends them; ``blocking`` is that client for threads. For files, ``rows`` reads the input,
``journal`` remembers what was answered through any crash, and ``runner`` brings them together: `serve-app batch run` over HTTP.
``fleet_process`` starts a service for one batch. ``ray_data`` and ``apache_beam`` are for pipelines. ``shared_fleet`` gives the worker
processes of one machine a common service: ``fleet_keeper`` is the process that starts and ends it, by the decisions of ``fleet_watch``,
and ``shared_client`` asks it. The reasons are in docs/adr/0015, 0018 and 0036.

OpenAI's Files and Batches API is made of the same parts inside an ingress (docs/adr/0017-batches-run-in-the-ingress.md). ``service`` puts
it together, and ``files_api`` and ``batches_api`` are the routes. ``storage`` has records (``store`` over ``sqlite_database`` or
``postgres``), bytes (``folder`` or ``bucket``) and claims on batches (``claims``, ``leases``). ``worker`` and ``job`` run the batches,
and ``in_process`` asks the ingress's own application. The package knows that application as an ASGI callable, and nothing else of the
ingress.
"""

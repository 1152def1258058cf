"""Where our log lines go inside a Ray Serve replica: to the handlers that Serve gave its own logger."""

import logging


def use_serve_handlers() -> None:
    """Send ``serve_app`` lines to the replica's log. Never dictConfig: it would close Serve's handlers (docs/architecture.md)."""
    ours = logging.getLogger("serve_app")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    ours.handlers = list(logging.getLogger("ray.serve").handlers)

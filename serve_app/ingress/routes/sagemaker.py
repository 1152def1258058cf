"""This module has the two routes that Amazon SageMaker calls on a container, for its clients; they are off unless configured. Pure."""

import json

from serve_app.errors import BadRequest

PING = "/ping"
INVOCATIONS = "/invocations"

_ROUTES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}
"""The routes by the field that a body of the route must have."""


def route_of(body: bytes) -> str:
    """Return the route that answers a body of `/invocations`.

    Raises:
        BadRequest: The body is no JSON object, or has none of the fields that identify a route.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict):
        for name, route in _ROUTES.items():
            if name in fields:
                return route
    raise BadRequest(
        "body", f"is no JSON object with one of the fields {', '.join(_ROUTES)}, by which {INVOCATIONS} chooses a route"
    )

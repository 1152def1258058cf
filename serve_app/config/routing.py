"""`RoutingSettings` says how the ingresses choose a replica for a request."""

from typing import Literal

from pydantic import Field

from serve_app.config.base import Real, Section


class RoutingSettings(Section):
    """How the ingresses choose a replica for a request."""

    by: Literal["prefix", "load"] = "prefix"
    """prefix: to a replica that probably has the beginning of the prompt in its prefix cache, within max_load; else by load. load: to
    the replica with the fewest tokens to do. Without a prefix cache in the engine prefix is the same as load."""
    max_load: Real = Field(default=2.0, ge=1.1, le=10)
    """With by: prefix, how many times the mean of all replicas, and the request's own tokens, a replica may have to do and still get it
    for what it has cached. Lower: more even. Higher: more is cached."""

"""`RoutingSettings` says how the ingresses choose a replica for a request."""

from typing import Literal

from pydantic import Field

from serve_app.config.base import Real, Section


class RoutingSettings(Section):
    """How the ingresses choose a replica for a request."""

    by: Literal["prefix", "load"] = "prefix"
    """prefix: a request goes to a replica that probably has the beginning of its prompt in the prefix cache, within max_load, or else by
    load. load: it goes to the replica with the fewest pending tokens. If the engine has no prefix cache, prefix is the same as load."""
    max_load: Real = Field(default=2.0, ge=1.1, le=10)
    """With by: prefix, how many times the pending tokens of the mean other replica one may have and still get a request for its cached
    prefix; the request's own tokens raise this bound. Lower: a more even load. Higher: more cache hits."""
    apart: bool = Field(default=False, strict=True)
    """Whether prefill and decode of a request may be apart: long prompts go where they slow few answers, and answers move with their KV to
    replicas with less to do, where that saves more than it costs. Needs `kv.transfer`."""

"""These words say why a request went to a replica, and why it left one, for `serve-app explain` and the fleet page."""

from collections.abc import Mapping

REASONS: Mapping[str, str] = {
    "prefix": "it has at least half of the prompt cached",
    "session": "the session's requests go there",
    "hash": "the first new part of the prompt belongs there, by a hash that all ingresses share",
    "spread": "the replicas with the prompt's beginning had too much to do, or no room",
    "load": "it had the least to do",
    "prompt": "the prompt is long, and slows the fewest answers there",
    "trial": "a request like this one ended an engine, and is tried alone",
}
CAUSES: Mapping[str, str] = {
    "drain": "the replica drains",
    "prompts": "a long prompt would stop this answer",
    "balance": "another replica had less to do",
    "role": "the replica computes prompts, and others make answers",
    "new_replica": "a replica joined and takes a part of the queue",
}

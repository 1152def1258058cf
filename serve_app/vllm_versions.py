"""This module knows the versions of vLLM that this source runs with: where they differ, and which of them speak with each other.

It imports none of them. vLLM's CPU build may be older than its CUDA build, so an ingress of the CPU image may have an older vLLM than the
engines of the CUDA image (ADR 56).
"""

SERVER_ARGUMENTS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
"""vLLM's module of the arguments of `vllm serve`: from 0.33 on, and before."""

_OLDER_INGRESS = frozenset({("0.32.0", "0.33.0")})
"""Versions of an ingress and of a newer replica that understand each other, which `make check-cuda` tests.

A pair belongs here if the newer version only appended fields to the structs of the link, all with defaults: the replica then reads the
defaults, and the ingress leaves out what it does not know. An ingress is never the newer one: the replica would leave out, without a word,
what a client asked for.
"""


def may_speak(ingress: str, replica: str) -> bool:
    """Return whether an ingress with one version of vLLM may send requests to a replica with the other."""
    return ingress == replica or (ingress, replica) in _OLDER_INGRESS

"""This module knows the versions of vLLM that this source runs with: where they differ, and which of them speak with each other.

It imports none of them. vLLM's CPU build may be older than its CUDA build, so an ingress of the CPU image may have an older vLLM than the
engines of the CUDA image (ADR 56).
"""

SERVER_ARGUMENTS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
"""vLLM's module of the arguments of `vllm serve`: from 0.33 on, and before."""

_OLDER_INGRESS = frozenset({("0.32.0", "0.33.0")})
"""Versions of an ingress and of a newer replica that understand each other (ADR 56 says when); `make check-cuda` tests them."""


def may_speak(ingress: str, replica: str) -> bool:
    """Return whether an ingress with one version of vLLM may send requests to a replica with the other."""
    return ingress == replica or (ingress, replica) in _OLDER_INGRESS

"""This module knows the versions of vLLM that this source runs with: where they differ, and which of them speak with each other.

It imports none of them. vLLM's CPU build may be older than its CUDA build, so an ingress of the CPU image may have an older vLLM than the
engines of the CUDA image (ADR 56).
"""

from collections.abc import Mapping

from serve_app.vllm_media import ALIKE_IN_032_AND_033

SERVER_ARGUMENTS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
"""vLLM's module of the arguments of `vllm serve`: from 0.33 on, and before."""

_OLDER_INGRESS: Mapping[tuple[str, str], frozenset[str]] = {("0.32.0", "0.33.0"): ALIKE_IN_032_AND_033}
"""Versions of an ingress and of a newer replica that understand each other (ADR 56 says when) -> the architectures of models whose media
both process alike. `make check-cuda` tests them."""


def may_speak(ingress: str, replica: str) -> bool:
    """Return whether an ingress with one version of vLLM may send requests to a replica with the other."""
    return ingress == replica or (ingress, replica) in _OLDER_INGRESS


def may_send_media(architecture: str, ingress: str, replica: str) -> bool:
    """Return whether the ingress's tensors of images, sound and video are those that the replica's model reads.

    Args:
        architecture: The model's, by vLLM's name.
    """
    return ingress == replica or architecture in _OLDER_INGRESS.get((ingress, replica), ())


def refusing_media(architecture: str, ingress: str) -> str:
    """Return the newer version of vLLM whose replicas get no media of this architecture from an ingress with this version, "" if none."""
    newer = (replica for of_ingress, replica in _OLDER_INGRESS if of_ingress == ingress)
    return next((replica for replica in newer if not may_send_media(architecture, ingress, replica)), "")

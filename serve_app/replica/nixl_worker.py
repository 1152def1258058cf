"""vLLM imports this module in each worker of a CPU engine that moves KV, so that NIXL waits for events instead of polling.

NIXL 1.5.1 has its progress thread look at its sockets again at once, so that an idle engine keeps a core busy, which the engine's steps
lack. With a longest wait, the thread sleeps until an event comes: an idle agent takes 2 % of a core, and reads take no longer.
"""

from typing import Any

from nixl import _api

LONGEST_WAIT_US = 1000
"""Longest time without a look at the sockets, for events that do not wake the thread."""


class _WaitsForEvents(_api.nixlBind.nixlAgentConfig):
    """The configuration of an agent, for which ``pthrDelay`` cannot be 0 as `nixl_agent` sets it."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, LONGEST_WAIT_US if name == "pthrDelay" else value)


_api.nixlBind.nixlAgentConfig = _WaitsForEvents


class NixlWorker:
    """A base class that vLLM adds to its workers (`worker_extension_cls`). It adds nothing; only the import of its module counts."""

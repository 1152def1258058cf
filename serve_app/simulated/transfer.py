"""This module computes how long a read of KV takes over a simulated link, and when it begins if other reads come first.

Pure: no clock, no sockets. A read takes ``latency + bytes / (bandwidth x reached share)`` seconds, and has its link alone: the reads of an
engine follow each other in the order in which they were asked for. No bytes move, and these times are simulated, not measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.simulated.profiles import built, named

LINK_PATH = "simulated.link"
DEFAULT_LINK = "efa-100g"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects one accelerator to the accelerators of other engines: one direction."""

    name: str = "custom"
    bandwidth_gbit_s: float
    """Peak, in 10^9 bits a second."""
    latency_us: float
    """From the request for a read to its first byte."""
    bandwidth_efficiency: float = 0.8
    """Assumption: the share of the peak that a read of many blocks reaches, as of the memory's bandwidth in `profiles.Accelerator`."""


# All latencies are assumptions of their order of magnitude: a read of 100 MB takes 8 ms even at 100 Gbit/s.
LINKS = {
    link.name: link
    for link in (
        Link(
            name="nvlink-4",
            bandwidth_gbit_s=3600,  # NVIDIA H100 datasheet, SXM5: 900 GB/s, the sum of both directions
            latency_us=10,
        ),
        Link(
            name="pcie-4",
            bandwidth_gbit_s=252,  # PCI Express 4.0, x16: 16 lanes of 16 GT/s, of which the encoding leaves 128 bits of 130
            latency_us=10,
        ),
        Link(
            name="efa-100g",
            bandwidth_gbit_s=100,  # AWS EC2 user guide: network bandwidth of g5.48xlarge, and of each card of p4d.24xlarge
            latency_us=30,
        ),
        Link(
            name="efa-400g",
            bandwidth_gbit_s=400,  # AWS EC2 user guide: p5.48xlarge has 3,200 Gbit/s for 8 GPUs
            latency_us=30,
        ),
    )
}


def link_from(value: str | Mapping[str, Any]) -> Link:
    """Return a named link, or a link built from a mapping of the fields of `Link`.

    Raises:
        ConfigError: An unknown name or field, a missing field, or a value outside its range.
    """
    if isinstance(value, str):
        link: Link = named(LINKS, value, LINK_PATH)
    else:
        link = built(Link, value, LINK_PATH)
    return link


def transfer_s(link: Link, num_bytes: int) -> float:
    """Return the seconds that a read of ``num_bytes`` takes when it has the link alone; 0 if there is nothing to read."""
    if not num_bytes:
        return 0.0
    return link.latency_us * 1e-6 + num_bytes * 8 / (link.bandwidth_gbit_s * 1e9 * link.bandwidth_efficiency)


class LinkQueue:
    """The reads over one direction of one engine's link. A read that waits for the link at its other end keeps later reads waiting."""

    def __init__(self) -> None:
        self._free_at = -math.inf

    def wait_s(self, now: float) -> float:
        """Return the seconds until all reads so far are over."""
        return max(0.0, self._free_at - now)

    def add(self, at: float, busy_s: float) -> float:
        """Add a read of ``busy_s`` seconds that can begin at ``at``; return when it begins."""
        begins_at = max(at, self._free_at)
        self._free_at = begins_at + busy_s
        return begins_at

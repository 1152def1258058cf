"""`KvSettings` says whether a draining replica's requests move to another replica with their KV cache, and over which ports."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from serve_app.config.base import Int, Section


class KvSettings(Section):
    """What happens to the KV cache of running requests when their replica drains."""

    transfer: Literal["none", "nixl"] = "none"
    """`none`: the next replica computes prompt and answer again. `nixl`: it reads their KV cache from the draining replica."""
    port: Int = Field(default=15600, ge=1024, le=65472)
    """First of the 64 TCP ports of side channels on each machine, of which each replica takes the next free one."""

    @property
    def is_on(self) -> bool:
        """Whether KV moves."""
        return self.transfer != "none"

    def side_ports(self) -> range:
        """Return the ports of side channels, on which a replica says where its KV is."""
        return range(self.port, self.port + 64)

    def environment(self) -> Mapping[str, str]:
        """Return what the engine's process needs in its environment."""
        return {}

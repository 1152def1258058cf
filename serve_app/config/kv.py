"""`KvSettings` says whether a draining replica's requests move to another replica with their KV cache, and over which ports."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from serve_app.config.base import Int, Section
from serve_app.config.checks import RESERVED_PORTS, wrong

NUM_SIDE_PORTS, NUM_PORTS = 64, 256
"""Ports of side channels, and all ports of a model on one machine."""
_DEFAULT_PORT, _HIGHEST_PORT = 15600, 65536 - NUM_PORTS


def _ports_from(first: int) -> range:
    return range(first, first + NUM_PORTS)


def _meet(one: range, other: range) -> bool:
    return max(one[0], other[0]) <= min(one[-1], other[-1])


def _checked(port: int) -> int:
    if owner := next((owner for ports, owner in RESERVED_PORTS.items() if _meet(_ports_from(port), ports)), ""):
        problem = f"is {port}, and among its ports up to {_ports_from(port)[-1]} are those of {owner}"
        raise wrong("", problem, f"choose another, for example {_DEFAULT_PORT}")
    return port


def port_problems(firsts: Mapping[str, int], listeners: Mapping[str, int]) -> Iterator[PydanticCustomError]:
    """Yield a problem for each model of which another has some of the ports.

    An engine whose side channel's port is taken hangs at its start.

    Args:
        firsts: `kv.port` of each model that moves KV, by its path.
        listeners: Other ports of the file by their paths; 0 is any port.
    """
    taken = {key: range(port, port + 1) for key, port in listeners.items() if port}
    for key, first in firsts.items():
        ports = _ports_from(first)
        if other := next((other for other, theirs in taken.items() if _meet(ports, theirs)), ""):
            free = next(
                port for port in range(_DEFAULT_PORT, _HIGHEST_PORT, NUM_PORTS) if _is_free(port, [*taken.values(), ports])
            )
            problem = f"is {first}, and its ports up to {ports[-1]} meet {other}, {taken[other][0]}"
            yield wrong(key, problem, f"choose another, for example {free}")
        taken[key] = ports


def _is_free(first: int, taken: Iterable[range]) -> bool:
    return not any(_meet(_ports_from(first), ports) for ports in (*taken, *RESERVED_PORTS))


class KvSettings(Section):
    """What becomes of the KV cache of requests when their replica drains: docs/kv.md."""

    transfer: Literal["none", "nixl"] = "none"
    """`none`: the next replica computes prompt and answer again. `nixl`: it reads their KV from the draining replica (needs
    `serve-app[kv]`)."""
    port: Annotated[Int, AfterValidator(_checked)] = Field(default=_DEFAULT_PORT, ge=1024, le=_HIGHEST_PORT)
    """First of the model's 256 TCP ports on each machine with `nixl`. Avoid 32768 to 60999, which Linux uses for outgoing connections."""

    @property
    def is_on(self) -> bool:
        """Whether KV moves."""
        return self.transfer != "none"

    def ports(self) -> range:
        """Return all of the model's ports."""
        return _ports_from(self.port)

    def side_ports(self) -> range:
        """Return the ports of side channels, on which a replica says where its KV is."""
        return self.ports()[:NUM_SIDE_PORTS]

    def environment(self) -> Mapping[str, str]:
        """Return what the engine's process needs in its environment for UCX to listen on the model's other ports alone."""
        ports = self.ports()[NUM_SIDE_PORTS:]
        return {"UCX_TCP_PORT_RANGE": f"{ports[0]}-{ports[-1]}"} if self.is_on else {}

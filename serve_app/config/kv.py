"""`KvSettings` says whether requests move with their KV cache, over which ports, and how much of it the node's memory keeps."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from serve_app.config.base import Int, Real, Section
from serve_app.config.checks import RESERVED_PORTS, wrong

if TYPE_CHECKING:
    from serve_app.config.model import ModelSettings

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
    """What becomes of the KV cache of requests when their replica drains, and when its memory is full: docs/kv.md."""

    transfer: Literal["none", "nixl"] = "none"
    """`none`: the next replica computes prompt and answer again. `nixl`: it reads their KV from the draining replica (needs
    `serve-app[kv]`)."""
    port: Annotated[Int, AfterValidator(_checked)] = Field(default=_DEFAULT_PORT, ge=1024, le=_HIGHEST_PORT)
    """First of the model's 256 TCP ports on each machine with `nixl`. Avoid 32768 to 60999, which Linux uses for outgoing connections."""

    offload_gib: Real = Field(default=0.0, ge=0, le=65536)
    """Memory of the node, in GiB for each replica, that keeps copies of prompts' KV for when the GPU's cache has dropped it. 0: none."""

    @property
    def is_on(self) -> bool:
        """Whether KV moves."""
        return self.transfer != "none"

    @property
    def is_offloaded(self) -> bool:
        """Whether the node's memory keeps KV."""
        return self.offload_gib > 0

    def offload_bytes(self) -> int:
        """Return how much of the node's memory one replica takes for KV."""
        return int(self.offload_gib * 2**30)

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


def kv_problems(model: "ModelSettings") -> Iterator[PydanticCustomError]:
    """Check where a model's KV cannot move or be kept as the section says."""
    kv = model.kv
    if kv.is_on:
        here = f"is {kv.transfer!r}"
        for name, pools in (("runner", ("pooling",)), ("convert", ("embed", "classify"))):
            if (value := model.engine_args.get(name)) in pools:
                problem = (
                    f"{here} and engine_args.{name} is {value!r}: its requests end with their prompt, and no KV is left to move"
                )
                yield wrong("kv.transfer", problem, "set kv.transfer: none")
    elif model.routing.apart:
        problem = f"is true and kv.transfer is {kv.transfer!r}: answers move only with their KV"
        yield wrong("routing.apart", problem, "set kv.transfer: nixl, or routing.apart: false")
    size, backend = (model.engine_args.get(f"kv_offloading_{part}") for part in ("size", "backend"))
    if size is not None and backend in (None, "native"):
        problem = f"is {size!r}, for which no pod and no estimate has room"
        yield wrong("engine_args.kv_offloading_size", problem, f"remove it, and set kv.offload_gib: {size}")
    elif size is not None and (kv.is_on or kv.is_offloaded):
        problem = f"is {size!r} and kv sets a connector, too: vLLM would use only that of kv_offloading_size"
        yield wrong("engine_args.kv_offloading_size", problem, "remove it, or kv.transfer and kv.offload_gib")
    if kv.is_offloaded:
        yield from _offload_problems(model)


def _offload_problems(model: "ModelSettings") -> Iterator[PydanticCustomError]:
    here = f"is {model.kv.offload_gib:g}"
    if model.device == "cpu" and model.simulated is None:
        problem = f"{here} and device is cpu: the cache is in the node's memory already"
        yield wrong("kv.offload_gib", problem, "remove it, and raise kv_cache_gib")
    if model.engine_args.get("enable_prefix_caching") is False:
        problem = f"{here} and engine_args.enable_prefix_caching is False: no prompt would find its KV"
        yield wrong("kv.offload_gib", problem, "remove one of the two")
    if model.nodes > 1:
        problem = f"{here} and nodes is {model.nodes}: the engine's nodes share no memory"
        yield wrong("kv.offload_gib", problem, "set kv.offload_gib: 0, or nodes: 1")
    if model.sleep is not None:
        problem = f"{here} and sleep is set: a sleep frees the GPU's memory, whose copies may be under way"
        yield wrong("kv.offload_gib", problem, "set kv.offload_gib: 0, or remove sleep")

"""`Comparison` plays one trace on the same simulated engines under several settings: replicas that do everything, and prefill apart.

A seed moves each arrival by up to `JITTER_S`, and draws the tokens and the times of heartbeats, for all settings alike. All times are
virtual, and all figures simulated. The first tenth of the trace fills the fleet and is not counted; the run ends with its last answer.
"""

import random
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from serve_app.checkpoints import make_tiny_llama
from serve_app.core.pool_sizes import PoolSizes
from serve_app.core.prompt_hashes import hash_points
from serve_app.errors import ConfigError
from serve_app.planning.engines import aim, clock_of, costs_of, engine_cores
from serve_app.planning.trace import BLOCK_TOKENS, TraceRequest
from serve_app.planning.virtual_fleet import BLOCK, VirtualFleet
from serve_app.planning.virtual_loads import Asked, Load
from serve_app.simulated.profiles import PROFILES, profile_from

TOGETHER, KEEP_ITL, APART = "together", "keep_itl", "routing.apart"
"""Names of sides; the others are pools."""
JITTER_S = 0.5
WARMUP = 0.1
"""Share of the trace that is not counted."""
MAX_S = 5000.0
"""Longest run in virtual time. The engines' clock leaves room for twice as much."""
_IDS = 10, 210
"""Token ids of prompts, which the vocabulary of the tiny model has."""
_OWN, _SHARED, _CLASS = 0, 1, 2
"""Kinds of random tokens: of one request, of a block id, and of a class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The replicas and what connects them."""

    profile: str
    """A name of `PROFILES`."""
    num_accelerators: int
    """Accelerators of a replica."""
    replicas: int
    link: str
    max_num_batched_tokens: int
    max_num_seqs: int

    def settings(self) -> dict[str, Any]:
        """Return the profile as `profile_from` takes it."""
        named = PROFILES[self.profile]
        return {
            "name": self.profile,
            "accelerator": named.accelerator.name,
            "model": named.model.name,
            "num_accelerators": self.num_accelerators,
        }


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a good answer, in seconds: of its first token, and of 99 % of the gaps between its tokens."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Side:
    """One way to run the replicas."""

    name: str
    configuration: str
    """The keys of the model that set it, as YAML."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The same for the ingress's fleet."""
    itl_s: float | None = None
    """The target of `keep_itl`; None: the engines keep none."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One run, over the requests that count. Times in seconds."""

    requests_per_s: float
    good_per_s: float
    """Goodput: requests per second whose answer kept all limits."""
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float
    """Over the gaps of all answers together."""
    moved_bytes: int
    """KV that was read by another replica, in the whole run."""


def sides_of(replicas: int, limits: Limits) -> list[Side]:
    """Return the sides to compare: two without any move, then those apart."""
    sides = [
        Side(TOGETHER, ""),
        Side(KEEP_ITL, "keep_itl: true", itl_s=limits.itl_s),
        Side(APART, "kv: {transfer: nixl}, routing: {apart: true}", {"apart": True}),
    ]
    for prefill in range(1, replicas):
        decode = replicas - prefill
        sizes = PoolSizes(prefill, prefill, decode, decode)
        pools = f"kv: {{transfer: nixl}}, pools: {{prefill: {{min: {prefill}, max: {prefill}}}, decode: {{min: {decode}, max: {decode}}}}}"
        sides.append(Side(f"pools {prefill}:{decode}", pools, {"pools": sizes, "ttft_s": limits.ttft_s}))
    return sides


class Comparison:
    """The engines, as a context.

    Raises:
        ConfigError: A request does not fit into the KV cache of a replica.
    """

    def __init__(self, hardware: Hardware, trace: Sequence[TraceRequest], limits: Limits) -> None:
        self._hardware, self._trace, self._limits = hardware, trace, limits
        self._most_tokens = max(each.input_tokens + each.output_tokens for each in trace)
        room = profile_from(hardware.settings()).kv_cache_tokens - 2 * BLOCK  # the engine keeps one block, and fills none in part
        if self._most_tokens > room:
            problem = f"has {self._most_tokens:,} tokens, and the KV cache of a replica has room for {room:,}"
            raise ConfigError("the longest request", problem, "give replicas more --gpus, or leave the request out")
        self._costs = costs_of(hardware.settings())
        self._playing: list[VirtualFleet] = []
        self._cores: list[Any] = []

    def __enter__(self) -> Self:
        with tempfile.TemporaryDirectory() as folder:
            self._cores = engine_cores(
                make_tiny_llama(Path(folder) / "tiny-llama"),
                self._hardware.replicas,
                clock_of(self._playing),
                profile=self._hardware.settings(),
                link=self._hardware.link,
                max_model_len=self._most_tokens,
                max_num_seqs=self._hardware.max_num_seqs,
                max_num_batched_tokens=self._hardware.max_num_batched_tokens,
                scheduling_policy="priority",  # as with API keys, tenants or batches
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        for core in self._cores:
            core.shutdown()

    def play(self, side: Side, seed: int) -> Figures:
        """Play the trace once. This takes seconds to minutes.

        Raises:
            ConfigError: The last answer has not ended after `MAX_S`.
        """
        fleet = VirtualFleet(self._cores, seed=seed, costs=self._costs, settings=side.settings)
        self._playing[:] = [fleet]
        for core in self._cores:
            aim(core.scheduler, self._costs, side.itl_s)
        load = Load("trace", account="")

        def send(number: int, request: TraceRequest) -> None:
            ids = prompt_ids(request, number, seed)
            fleet.ask(load, f"trace-{number}", ids, request.output_tokens, hash_points(ids, BLOCK))

        moved = random.Random(seed)
        for number, request in enumerate(self._trace):
            fleet.at(max(0.0, request.due_s + moved.uniform(-JITTER_S, JITTER_S)), send, number, request)
        fleet.at(MAX_S, _end)
        span_s = self._trace[-1].due_s + JITTER_S
        fleet.play((1 - WARMUP) * span_s, warmup_s=WARMUP * span_s, to_the_end=True)
        return self._figures(fleet, (1 - WARMUP) * span_s)

    def _figures(self, fleet: VirtualFleet, seconds: float) -> Figures:
        counted = fleet.counted()
        waits, gaps = fleet.waits_s(""), [gap for asked in counted for gap in asked.gaps]
        return Figures(
            requests_per_s=len(counted) / seconds,
            good_per_s=sum(is_good(asked, self._limits) for asked in counted) / seconds,
            ttft_p50_s=quantile(waits, 0.5),
            ttft_p99_s=quantile(waits, 0.99),
            itl_p99_s=quantile(gaps, 0.99),
            moved_bytes=fleet.kv_read()[1],
        )


def _end() -> None:
    raise ConfigError("--replicas", f"have not answered the trace after {MAX_S:,.0f} simulated seconds", "take more")


def is_good(asked: Asked, limits: Limits) -> bool:
    """Return whether the answer is complete and kept its limits."""
    in_time = asked.begun_at is not None and asked.begun_at - asked.at <= limits.ttft_s
    return asked.is_complete and in_time and quantile(asked.gaps, 0.99) <= limits.itl_s


def quantile(values: Sequence[float], q: float) -> float:
    """Return the smallest of the values that so many are not above; 0 without values."""
    return float(np.quantile(values, q, method="inverted_cdf")) if values else 0.0


def prompt_ids(request: TraceRequest, number: int, seed: int) -> list[int]:
    """Return the token ids of a prompt: those of its class, then the same tokens for the same block id, then tokens of its own."""
    known = _random_ids(request.shared_tokens(), seed, _CLASS, zlib.crc32(request.cls.encode()))
    known += b"".join(_random_ids(BLOCK_TOKENS, seed, _SHARED, block % (1 << 64)) for block in request.blocks)
    ids = list(known[: request.input_tokens])
    return ids + list(_random_ids(request.input_tokens - len(ids), seed, _OWN, number))


def _random_ids(count: int, *entropy: int) -> bytes:
    """Return so many token ids, each a byte."""
    return np.random.default_rng(entropy).integers(*_IDS, size=count, dtype=np.uint8).tobytes()

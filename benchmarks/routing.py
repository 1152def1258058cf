"""This benchmark compares routing policies on 16 simulated replicas with prefix caches: hit rate and TTFT, 1 and 3 ingresses.

    python -m benchmarks.routing [--seeds 1 2 3] [--workloads NAME ...] [--minutes 1]

All policies get the same requests at the same times, except later turns of a conversation, which follow the end of the previous answer
after the same pause. Each request comes to a random ingress, whatever its conversation: no client keeps its connection.
"""

import argparse
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Protocol

from benchmarks.routing_fleet import BLOCK_SIZE, Ask, Points, Policy, RoutedFleet
from serve_app.autoscaling.simulation.simulated_replica import Hardware, steps_of_profile
from serve_app.core.affinity import PrefixAffinity
from serve_app.core.least_loaded import LeastOutstandingTokens
from serve_app.core.prefix_index import Prefix
from serve_app.core.prompt_hashes import hash_points
from serve_app.core.request import RequestState
from serve_app.core.routing import Choice, Reason, ReplicaState
from serve_app.simulated.profiles import profile_from

NUM_REPLICAS = 16
PROFILE = {"name": "a100-40gb-llama-8b", "accelerator": "a100-40gb", "model": "llama-8b"}
WARM_UP_SHARE = 0.2
"""Share of the requests, at the beginning, that is not counted because all caches are cold."""


class RoundRobin(LeastOutstandingTokens):
    """A policy that takes one replica after the other."""

    def __init__(self, ingress: int) -> None:
        super().__init__()
        self._turn = count(ingress)

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        ids = list(replicas)
        return Choice(replicas[ids[next(self._turn) % len(ids)]], Reason.LOAD)


class ConsistentHash(LeastOutstandingTokens):
    """A policy that uses a rendezvous hash of the conversation, like a router that reads a session header. It ignores load."""

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        key = request.request_id.partition("/")[0]
        best = max(replicas, key=lambda replica_id: score(key, replica_id))
        return Choice(replicas[best], Reason.SESSION)


@cache
def score(key: str, replica_id: str) -> float:
    return random.Random(f"{key} {replica_id}").random()


POLICIES: dict[str, Policy] = {
    "round robin": lambda ingress, _: RoundRobin(ingress),
    "least load": lambda *_: LeastOutstandingTokens(),
    "consistent hash": lambda *_: ConsistentHash(),
    "prefix": lambda *_: PrefixAffinity(),
}


def _of_an_only_ingress(*_: object) -> PrefixAffinity:
    return PrefixAffinity(continued=0.0)  # as `routing_of` does


SAME_WITH_SEVERAL = ("round robin", "consistent hash")
"""Policies that use nothing that an ingress learns: the number of ingresses does not change where a conversation goes."""


class Turns(Protocol):
    """The prompts of one client, one after the other."""

    def __call__(self, rng: random.Random) -> Iterator[tuple[list[int], int, float]]:
        """Yield a prompt, the number of tokens of its answer, and the pause before the next prompt; the answer is sent to the generator."""
        ...


@dataclass(frozen=True)
class Workload:
    """A workload of clients that arrive at random times, ``rate`` per second."""

    name: str
    rate: float
    turns: Turns


def text(seed: object, num_tokens: int) -> list[int]:
    """Return invented token ids, the same for the same seed."""
    return random.Random(repr(seed)).choices(range(128_000), k=num_tokens)


@cache
def system_prompt(number: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(text(("system", number), num_tokens))


def _zipf(rng: random.Random, num: int) -> int:
    return rng.choices(range(num), [1 / (n + 1) for n in range(num)])[0]


def _length(rng: random.Random, median: int, largest: int) -> int:
    return max(8, min(largest, int(rng.lognormvariate(0, 0.8) * median)))


def conversation(rng: random.Random) -> Iterator[tuple[list[int], int, float]]:
    """Yield 3 to 8 turns after one of 8 system prompts of 400 tokens, with pauses of 10 s on average."""
    history = list(system_prompt(_zipf(rng, 8), 400))
    for _ in range(rng.randint(3, 8)):
        history = history + text(rng.random(), _length(rng, 120, 2000))
        output = _length(rng, 150, 600)
        yield history, output, rng.expovariate(1 / 10)
        history = history + text(tuple(history[-8:]), output)


def shared_prompt(rng: random.Random) -> Iterator[tuple[list[int], int, float]]:
    """Yield one question of some 150 tokens after one of 64 system prompts of 3,000 tokens."""
    yield [*system_prompt(1000 + _zipf(rng, 64), 3000), *text(rng.random(), _length(rng, 150, 1000))], _length(rng, 100, 400), 0.0


def hot_prefix(rng: random.Random) -> Iterator[tuple[list[int], int, float]]:
    """Yield a question: 80 % about one document of 4,000 tokens, the others about an own document of 1,500."""
    question = text(rng.random(), _length(rng, 60, 300))
    start = list(system_prompt(2000, 4000)) if rng.random() < 0.8 else text(rng.random(), 1500)
    yield start + question, _length(rng, 100, 400), 0.0


def no_sharing(rng: random.Random) -> Iterator[tuple[list[int], int, float]]:
    """Yield a prompt of some 1,500 tokens that shares nothing with others."""
    yield text(rng.random(), _length(rng, 1500, 8000)), _length(rng, 150, 600), 0.0


WORKLOADS = [
    Workload("conversations", 16.0, conversation),
    Workload("shared system prompts", 100.0, shared_prompt),
    Workload("hot prefix", 100.0, hot_prefix),
    Workload("no sharing", 60.0, no_sharing),
]


class Clients:
    """The clients of a workload. Each has its own random generator, so that its prompts do not depend on the routing."""

    def __init__(self, workload: Workload, *, seed: int, duration_s: float, num_ingresses: int, reports: bool = False) -> None:
        self._workload = workload
        self._reports = reports
        self._num_ingresses = num_ingresses
        self._rng = random.Random(f"{workload.name} {seed}")
        self._duration_s = duration_s
        self._seed = seed
        self._open: dict[str, tuple[random.Random, Iterator[tuple[list[int], int, float]], float]] = {}

    def first(self) -> Iterator[Ask]:
        at = 0.0
        for number in count():
            at += self._rng.expovariate(self._workload.rate)
            if at > self._duration_s:
                return
            rng = random.Random(f"{self._workload.name} {self._seed} {number}")
            turns = self._workload.turns(rng)
            name = f"{self._seed}-{number}"
            ask = self._ask(name, 0, rng, turns, at)
            assert ask is not None
            yield ask

    def following(self, ask: Ask, at: float) -> Ask | None:
        name, _, turn = ask.request_id.partition("/")
        rng, turns, pause_s = self._open.pop(name)
        return self._ask(name, int(turn) + 1, rng, turns, at + pause_s)

    def _ask(
        self, name: str, turn: int, rng: random.Random, turns: Iterator[tuple[list[int], int, float]], at: float
    ) -> Ask | None:
        if (said := next(turns, None)) is None:
            return None
        prompt, output, pause_s = said
        self._open[name] = rng, turns, pause_s
        answered = prompt + text(tuple(prompt[-8:]), output)
        blocks = _blocks(prompt)
        prefix = Prefix(Points(hash_points(prompt, BLOCK_SIZE), blocks), BLOCK_SIZE)
        return Ask(
            f"{name}/{turn}",
            at,
            len(prompt),
            output,
            ingress=random.Random(f"{name} {turn}").randrange(self._num_ingresses),
            blocks=blocks,
            blocks_after=_blocks(answered),
            prefix=prefix,
            points_after=hash_points(answered, BLOCK_SIZE) if self._reports else (),
        )


def _blocks(ids: list[int]) -> list[int]:
    """Return a hash for each full block, as an engine computes them."""
    hashed, blocks = 0, []
    for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        hashed = hash((hashed, *ids[start : start + BLOCK_SIZE]))
        blocks.append(hashed)
    return blocks


@dataclass(frozen=True)
class Figures:
    """The figures of one run."""

    hit_rate: float
    """Share of the prompt tokens that were cached."""
    ttft_p50_s: float
    ttft_p99_s: float
    busiest: float
    """Largest number of requests at one replica, over the mean."""


def played(
    workload: Workload,
    policy: Policy,
    *,
    seed: int,
    num_ingresses: int,
    minutes: float,
    cache_share: float = 1.0,
    host_share: float = 0.0,
    reports: bool = False,
) -> tuple[RoutedFleet, list[Ask]]:
    """Run a workload once; return the fleet and the counted requests.

    Prefix caches have ``cache_share`` of the KV cache, and ``host_share`` of it in the host's memory. ``reports``: replicas report them.
    """
    profile = profile_from(PROFILE)
    hardware = Hardware(step_s=steps_of_profile(profile), kv_tokens=profile.kv_cache_tokens, max_num_seqs=256)
    clients = Clients(workload, seed=seed, duration_s=60 * minutes, num_ingresses=num_ingresses, reports=reports)
    cache_tokens, host_tokens = (int(share * hardware.kv_tokens) for share in (cache_share, host_share))
    fleet = RoutedFleet(hardware, NUM_REPLICAS, num_ingresses, policy, cache_tokens, host_tokens, reports)
    asks = fleet.run(clients.first(), clients.following)
    counted = asks[int(WARM_UP_SHARE * len(asks)) :]
    assert all(ask.first_at is not None for ask in counted)
    return fleet, counted


def measure(workload: Workload, policy: Policy, *, seed: int, num_ingresses: int, minutes: float) -> Figures:
    """Run a workload once and return its figures."""
    fleet, counted = played(workload, policy, seed=seed, num_ingresses=num_ingresses, minutes=minutes)
    ttft_s = sorted((ask.first_at or 0.0) - ask.due_at for ask in counted)
    return Figures(
        hit_rate=sum(ask.cached_tokens for ask in counted) / sum(ask.prompt_tokens for ask in counted),
        ttft_p50_s=ttft_s[len(ttft_s) // 2],
        ttft_p99_s=ttft_s[int(0.99 * len(ttft_s))],
        busiest=max(fleet.placed.values()) * NUM_REPLICAS / len(fleet.asks),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workloads", nargs="+", default=[w.name for w in WORKLOADS])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--minutes", type=float, default=1.0)
    args = parser.parse_args()
    print(f"{NUM_REPLICAS} replicas, {PROFILE['name']}, {args.minutes:g} minutes, seeds {args.seeds}: median (least to most)")
    print("| workload | routing | ingresses | hit rate % | TTFT p50 ms | TTFT p99 ms | busiest / mean |")
    print("|---|---|---|---|---|---|---|")
    for workload in (w for w in WORKLOADS if w.name in args.workloads):
        for name in args.policies:
            for num_ingresses in (1,) if name in SAME_WITH_SEVERAL else (1, 3):
                policy = _of_an_only_ingress if (name, num_ingresses) == ("prefix", 1) else POLICIES[name]
                runs = [measure(workload, policy, seed=s, num_ingresses=num_ingresses, minutes=args.minutes) for s in args.seeds]
                cells = [
                    spread([100 * r.hit_rate for r in runs], 1),
                    spread([1000 * r.ttft_p50_s for r in runs], 0),
                    spread([1000 * r.ttft_p99_s for r in runs], 0),
                    spread([r.busiest for r in runs], 2),
                ]
                print(f"| {workload.name} | {name} | {num_ingresses} | {' | '.join(cells)} |", flush=True)


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()

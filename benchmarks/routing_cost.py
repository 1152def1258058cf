"""This benchmark measures the CPU time of routing by prefix: hashes of a prompt, the choice of a replica, the index's update.

    python -m benchmarks.routing_cost

The times are CPU times, not wall-clock times, so that a busy machine changes them less. Each replica holds the prefixes of 4 requests, from
50 conversations with prompts of some 1,000 tokens; loads change between choices.
"""

import random
import time

from serve_app.core.affinity import PrefixAffinity
from serve_app.core.prefix_index import Prefix
from serve_app.core.prompt_hashes import hash_points
from serve_app.core.request import RequestState, Resume
from serve_app.core.routing import ReplicaState

NUM_CHOICES = 4000
PROMPT_TOKENS = 1000


def main() -> None:
    rng = random.Random(1)
    for block_size in (16, 128):
        ids = rng.choices(range(128_000), k=PROMPT_TOKENS)
        times_s = [_timed(hash_points, ids, block_size) for _ in range(2000)]
        print(f"hashes of {PROMPT_TOKENS} tokens, blocks of {block_size}: {_said(times_s)}")
    for num_replicas in (16, 1000):
        picks_s, notes_s = _choices(num_replicas, rng)
        print(f"{num_replicas} replicas: choice {_said(picks_s)}; note {_said(notes_s)}")


def _choices(num_replicas: int, rng: random.Random) -> tuple[list[float], list[float]]:
    routing = PrefixAffinity()
    replicas = {f"r{n}": ReplicaState(f"r{n}", 10_000, 0.0, kv_tokens=400_000) for n in range(num_replicas)}
    for replica_id in replicas:
        routing.changed(replica_id)
    talks = [rng.choices(range(128_000), k=PROMPT_TOKENS) for _ in range(50)]
    picks_s, notes_s = [], []
    for number in range(NUM_CHOICES + 4 * num_replicas):
        ids = talks[rng.randrange(50)] = [*rng.choice(talks)[: rng.randrange(PROMPT_TOKENS)], *rng.choices(range(128_000), k=400)]
        request = RequestState(f"q{number}", len(ids), 100, Resume.CONTINUE, prefix=Prefix(hash_points(ids, 16), 16))
        changed = replicas[f"r{rng.randrange(num_replicas)}"]
        changed.outstanding_tokens = rng.randrange(20_000)
        routing.changed(changed.replica_id)
        started = time.thread_time()
        choice = routing.pick(request, replicas)
        picked = time.thread_time()
        assert choice is not None
        routing.placed(request, choice.replica)
        noted = time.thread_time()
        if number >= 4 * num_replicas:
            picks_s.append(picked - started)
            notes_s.append(noted - picked)
    return picks_s, notes_s


def _timed(call: object, *args: object) -> float:
    started = time.thread_time()
    call(*args)  # type: ignore[operator]
    return time.thread_time() - started


def _said(times_s: list[float]) -> str:
    times_s = sorted(times_s)
    return f"p50 {1e6 * times_s[len(times_s) // 2]:.0f} us, p99 {1e6 * times_s[int(0.99 * len(times_s))]:.0f} us"


if __name__ == "__main__":
    main()

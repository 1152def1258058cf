"""This benchmark compares an ingress's guess of prefix caches with the true contents, in the simulation of `benchmarks.routing`.

    python -m benchmarks.routing_truth [--seeds 1 2 3] [--minutes 1] [--host 0.5] [--shares 0.125] [--ingresses 3] [--workloads NAME]

There are three sides. *guess* is the product's `PrefixIndex`: each ingress remembers its own requests, and does not learn of evictions.
*digests* is the same index with the digests of replicas that have several tiers. *truth* is the same routing with an index that looks into
the simulated caches at the moment of the choice. That is the best that vLLM's KV events could report: requests of all ingresses, each
eviction, no delay. Caches have the size of the KV cache, or an eighth, to evict; ``--host`` adds a second tier of that share.
"""

import argparse
from collections.abc import Mapping, Sequence

from benchmarks.routing import WORKLOADS, played, spread
from benchmarks.routing_fleet import CachingReplica, Points, Policy
from serve_app.core.affinity import PrefixAffinity
from serve_app.core.prefix_index import Prefix, PrefixIndex, count_known

CACHE_SHARES = (1.0, 0.125)


class TrueIndex(PrefixIndex):
    """An index that looks into the caches of ``replicas``."""

    def __init__(self, replicas: Mapping[str, CachingReplica]) -> None:
        super().__init__()
        self._replicas = replicas

    def deepest(self, hashes: Sequence[int]) -> tuple[int, set[str]]:
        counts = {replica_id: self.count(replica_id, hashes) for replica_id in self._replicas}
        most = max(counts.values())
        return most, {replica_id for replica_id, count in counts.items() if count == most > 0}

    def count(self, replica_id: str, hashes: Sequence[int]) -> int:
        assert isinstance(hashes, Points)
        return count_known(hashes.blocks, self._replicas[replica_id])

    def add(self, replica_id: str, prefix: Prefix, capacity_tokens: int) -> None:
        """Do nothing: the replica's cache adds the prompt when its engine computes it."""


def knowing(_: int, replicas: Mapping[str, CachingReplica]) -> PrefixAffinity:
    """Return the product's routing with the true index."""
    routing = PrefixAffinity()
    routing.index = TrueIndex(replicas)
    return routing


SIDES: dict[str, Policy] = {"guess": lambda *_: PrefixAffinity(), "digests": lambda *_: PrefixAffinity(), "truth": knowing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workloads", nargs="+", default=[w.name for w in WORKLOADS if w.name != "no sharing"])
    parser.add_argument("--shares", type=float, nargs="+", default=CACHE_SHARES)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--host", type=float, default=0.0)
    parser.add_argument("--ingresses", type=int, nargs="+", default=[1, 3])
    arguments = parser.parse_args()
    print("| workload | cache | ingresses | index | hit rate % | of the expected tokens not there % | TTFT p50 ms |")
    print("|---|---|---|---|---|---|---|")
    for workload in (w for w in WORKLOADS if w.name in arguments.workloads):
        for share, num_ingresses, (side, policy) in (
            (share, num, side) for share in arguments.shares for num in arguments.ingresses for side in SIDES.items()
        ):
            hits, wrong, ttft_ms = [], [], []
            for seed in arguments.seeds:
                _, asks = played(
                    workload,
                    policy,
                    seed=seed,
                    num_ingresses=num_ingresses,
                    minutes=arguments.minutes,
                    cache_share=share,
                    host_share=arguments.host,
                    reports=side == "digests",
                )
                missing = sum(max(0, ask.expected_tokens - ask.cached_tokens) for ask in asks)
                wrong.append(100 * missing / max(1, sum(ask.expected_tokens for ask in asks)))
                hits.append(100 * sum(ask.cached_tokens for ask in asks) / sum(ask.prompt_tokens for ask in asks))
                ttft_ms.append(1000 * sorted((ask.first_at or 0.0) - ask.due_at for ask in asks)[len(asks) // 2])
            cells = f"{spread(hits, 1)} | {spread(wrong, 1)} | {spread(ttft_ms, 0)}"
            print(f"| {workload.name} | {share:g} | {num_ingresses} | {side} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

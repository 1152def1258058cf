"""This module computes the cost of good requests from the replicas over time and the tokens. Pure.

Replicas are those that were ready, as Ray Serve or Kubernetes told once a second (`observe` in the scenario); nobody told: None.
Ingresses hold no GPU and are not counted: Ray Serve's deployments of engines are called ``replica-MODEL``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from loadtest.quantiles import Floats
from loadtest.records import ServerSample

MAX_HOLE_S = 10.0
"""A count of replicas holds until the next one, but no longer than this: what was not seen is not counted."""


class Cost(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the measured window."""

    tokens_per_good: float | None
    """Output tokens of complete answers per good request; None: no request was good. Tokens of answers that broke off are not counted.

    Tokens and good requests are of the requests that were due in the window; without an SLO, of those whose answers ended in it.

    More than the mean answer has: some complete answers were not good.
    """
    replica_s: float | None = None
    """Seconds of ready replicas."""
    seen_s: float = 0.0
    """Seconds of the window in which somebody told how many there were."""
    gpu_s: float | None = None
    """``replica_s`` times ``observe.gpus_per_replica``; None where that is 0."""
    replica_s_per_good: float | None = None
    """``replica_s`` over the good requests that were due in the ``seen_s`` seconds; None: none was.

    Without an SLO a good request is a complete answer, and counts when it ended, as in goodput.
    """
    gpu_s_per_good: float | None = None
    """The same of ``gpu_s``."""


def cost_of(
    samples: Sequence[ServerSample],
    window: tuple[float, float],
    *,
    good_at_s: Floats,
    output_tokens: float,
    gpus_per_replica: int = 0,
) -> Cost:
    """Return the cost of the window.

    Args:
        good_at_s: When each good request of the window counts, in any order.
        output_tokens: Of complete answers, counted as ``good_at_s`` counts.
    """
    tokens_per_good = output_tokens / good_at_s.size if good_at_s.size else None
    seen = _Seen.of(samples, window)
    if not seen.length_s:
        return Cost(tokens_per_good)
    replica_s = seen.replica_s
    gpu_s = replica_s * gpus_per_replica if gpus_per_replica else None
    num_good = seen.num_within(good_at_s)
    return Cost(
        tokens_per_good=tokens_per_good,
        replica_s=replica_s,
        seen_s=seen.length_s,
        gpu_s=gpu_s,
        replica_s_per_good=replica_s / num_good if num_good else None,
        gpu_s_per_good=gpu_s / num_good if num_good and gpu_s is not None else None,
    )


@dataclass(frozen=True)
class _Seen:
    """The parts of the window in which somebody told how many replicas were ready: from ``begins_s`` to ``ends_s``, in rising order."""

    begins_s: Floats
    ends_s: Floats
    """Before its begin where a part lies outside of the window."""
    counts: Floats

    @classmethod
    def of(cls, samples: Sequence[ServerSample], window: tuple[float, float]) -> "_Seen":
        known = sorted((sample.t_s, count) for sample in samples if (count := _ready(sample)) is not None)
        times, counts = np.array(known, dtype=np.float64).reshape(-1, 2).T
        ends = np.minimum(np.append(times, window[1])[1:], times + MAX_HOLE_S)
        return cls(np.maximum(times, window[0]), np.minimum(ends, window[1]), counts)

    @property
    def _lasted_s(self) -> Floats:
        return np.clip(self.ends_s - self.begins_s, 0.0, None)

    @property
    def length_s(self) -> float:
        return float(self._lasted_s.sum())

    @property
    def replica_s(self) -> float:
        return float((self.counts * self._lasted_s).sum())

    def num_within(self, at_s: Floats) -> int:
        """Return how many of these times lie in one of the parts."""
        part = np.searchsorted(self.begins_s, at_s, side="right") - 1
        return int(((part >= 0) & (at_s <= self.ends_s[part])).sum())


def _ready(sample: ServerSample) -> float | None:
    """Return the ready replicas of a sample: of deployments ``replica-*`` where there are any, else of all. None: it tells none."""
    ready = {name: value for name, value in sample.values.items() if name == "pods_ready" or name.startswith("replicas_ready/")}
    engines = {name: value for name, value in ready.items() if name.startswith("replicas_ready/replica-")} or ready
    return sum(engines.values()) if engines and not sample.error else None

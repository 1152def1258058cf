"""This module computes the cost of good requests from the replicas over time and the tokens. Pure.

The replicas are the ready replicas that Ray Serve or Kubernetes reported once a second (`observe` in the scenario); None without a
report. Ingresses hold no GPU and are not counted: Ray Serve's deployments of engines are called ``replica-MODEL``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from loadtest.quantiles import Floats
from loadtest.records import ServerSample

MAX_HOLE_S = 10.0
"""A sampled number of replicas holds until the next sample, but at most so many seconds; later seconds are not counted."""


class Cost(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cost of the measured window."""

    tokens_per_good: float | None
    """Output tokens of complete answers per good request; None: no request was good. Tokens of incomplete answers are not counted.

    Tokens and good requests are of the requests that were due in the window; without an SLO, of the answers that ended in it.

    If this is more than the tokens of the mean answer, some complete answers were not good.
    """
    replica_s: float | None = None
    """Number of ready replicas times seconds."""
    seen_s: float = 0.0
    """Seconds of the window with a known number of replicas."""
    gpu_s: float | None = None
    """``replica_s`` times ``observe.gpus_per_replica``; None if that is 0."""
    replica_s_per_good: float | None = None
    """``replica_s`` per good request that was due in the ``seen_s`` seconds; None: there was none.

    Without an SLO, a good request is a complete answer and counts at its end, as in goodput.
    """
    gpu_s_per_good: float | None = None
    """``gpu_s`` per good request, likewise."""


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
        good_at_s: The time at which each good request of the window counts, in any order.
        output_tokens: Output tokens of complete answers, counted over the same requests as ``good_at_s``.
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
    """The parts of the window with a known number of ready replicas: from ``begins_s`` to ``ends_s``, in rising order."""

    begins_s: Floats
    ends_s: Floats
    """Ends of the parts; the end is before the begin for a part outside of the window."""
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
        """Return the number of times that lie in a part."""
        part = np.searchsorted(self.begins_s, at_s, side="right") - 1
        return int(((part >= 0) & (at_s <= self.ends_s[part])).sum())


def _ready(sample: ServerSample) -> float | None:
    """Return a sample's ready replicas: those of deployments ``replica-*`` if there are any, else all. None: the sample has none."""
    ready = {name: value for name, value in sample.values.items() if name == "pods_ready" or name.startswith("replicas_ready/")}
    engines = {name: value for name, value in ready.items() if name.startswith("replicas_ready/replica-")} or ready
    return sum(engines.values()) if engines and not sample.error else None

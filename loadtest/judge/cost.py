"""What good requests cost: replicas over time and tokens. Pure.

Replicas are those that were ready, as Ray Serve or Kubernetes told once a second (`observe` in the scenario); nobody told: None.
Ingresses hold no GPU and are not counted: Ray Serve's deployments of engines are called ``replica-MODEL``.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from loadtest.records import ServerSample

MAX_HOLE_S = 10.0
"""A count of replicas holds until the next one, but no longer than this: what was not seen is not charged."""


class Cost(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the measured window."""

    tokens_per_good: float | None
    """Output tokens of complete answers per good request; None: no request was good. Tokens of answers that broke off are not counted.

    More than the mean answer has: some complete answers were not good.
    """
    replica_s: float | None = None
    """Seconds of ready replicas."""
    seen_s: float = 0.0
    """Seconds of the window in which somebody told how many there were."""
    gpu_s: float | None = None
    """``replica_s`` times ``observe.gpus_per_replica``; None where that is 0."""
    replica_s_per_good: float | None = None
    """``replica_s`` over the good requests of the seconds that were seen; None: no request was good."""
    gpu_s_per_good: float | None = None
    """The same of ``gpu_s``."""


def cost_of(
    samples: Sequence[ServerSample],
    window: tuple[float, float],
    *,
    good_per_s: float,
    output_tokens_per_s: float,
    gpus_per_replica: int = 0,
) -> Cost:
    """Return the cost of the window, whose rates are given."""
    tokens_per_good = output_tokens_per_s / good_per_s if good_per_s else None
    replica_s, seen_s = _replica_seconds(samples, window)
    if not seen_s:
        return Cost(tokens_per_good)
    gpu_s = replica_s * gpus_per_replica if gpus_per_replica else None
    num_good = good_per_s * seen_s
    return Cost(
        tokens_per_good=tokens_per_good,
        replica_s=replica_s,
        seen_s=seen_s,
        gpu_s=gpu_s,
        replica_s_per_good=replica_s / num_good if num_good else None,
        gpu_s_per_good=gpu_s / num_good if num_good and gpu_s is not None else None,
    )


def _replica_seconds(samples: Sequence[ServerSample], window: tuple[float, float]) -> tuple[float, float]:
    """Return the integral of ready replicas over the window, and how much of the window it covers."""
    known = [(sample.t_s, count) for sample in samples if (count := _ready(sample)) is not None]
    if not known:
        return 0.0, 0.0
    times, counts = np.array(sorted(known), dtype=np.float64).T
    ends = np.minimum(np.append(times[1:], window[1]), times + MAX_HOLE_S)
    lasted = np.clip(np.minimum(ends, window[1]) - np.maximum(times, window[0]), 0.0, None)
    return float((counts * lasted).sum()), float(lasted.sum())


def _ready(sample: ServerSample) -> float | None:
    """Return the ready replicas of a sample: of deployments ``replica-*`` where there are any, else of all. None: it tells none."""
    ready = {name: value for name, value in sample.values.items() if name == "pods_ready" or name.startswith("replicas_ready/")}
    engines = {name: value for name, value in ready.items() if name.startswith("replicas_ready/replica-")} or ready
    return sum(engines.values()) if engines and not sample.error else None

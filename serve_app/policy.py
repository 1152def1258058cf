"""The application-level Ray Serve autoscaling policy: thin over ``core/autoscaling.py``.

Serve's own request counts are blind here, because requests do not go through Serve handles; ingresses report what waits and runs
through ``record_autoscaling_stats``. Serve builds the class once, in its controller. It must never raise: an exception there
ends the controller's update of all applications for that tick, or its recovery.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.config import parse_settings
from serve_app.core.autoscaling import RecentMaximum, desired_replicas
from serve_app.deployments import INGRESS, ScalingRule, scaling_rules
from serve_app.errors import ConfigError

logger = logging.getLogger("ray.serve")  # this runs in Serve's controller: its log is where people look


class OutstandingTokensPolicy:
    """Replicas by outstanding tokens per model, ingresses by open streams.

    Args:
        settings: The configuration, as ``build`` gets it. Of a wrong one nothing is scaled; ``build`` is what refuses it.
        now: Seconds of a monotonic clock.
    """

    def __init__(self, settings: Mapping[str, Any], now: Callable[[], float] = time.monotonic) -> None:
        self._rules: dict[str, ScalingRule] = {}
        try:
            self._rules = scaling_rules(parse_settings(settings))
        except ConfigError as exc:
            logger.error("autoscaling policy without effect: %s", exc)
        self._now = now
        self._recent: dict[str, RecentMaximum] = {}

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, Any]]:
        try:
            return self._decide(contexts), {}
        except Exception:
            logger.exception("autoscaling policy failed; every deployment keeps its target")
            return {}, {}

    def _decide(self, contexts: Mapping[Any, Any]) -> dict[Any, int]:
        stats = _latest_sums(next(c for d, c in contexts.items() if d.name == INGRESS))
        now, targets = self._now(), {}
        for deployment, context in contexts.items():
            rule = self._rules.get(deployment.name)
            if rule is None or (value := stats.get(rule.stat)) is None:
                continue  # no word yet: a deployment left out keeps its target
            target = context.target_num_replicas
            wanted = desired_replicas(value, target_outstanding_tokens=rule.target, minimum=rule.min, maximum=rule.max)
            recent = self._recent.setdefault(deployment.name, RecentMaximum(now, target))
            targets[deployment] = min(rule.max, recent.add(now, wanted))
            if targets[deployment] != target:
                logger.info("%s: %s = %g -> %d replicas", deployment.name, rule.stat, value, targets[deployment])
        return targets


def _latest_sums(context: Any) -> dict[str, float]:
    """Return each statistic's newest value, summed over the deployment's replicas."""
    sums: dict[str, float] = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        newest = [series[-1].value for series in by_replica.values() if series]
        if newest:
            sums[name] = sum(newest)
    return sums

"""The feedback corrects the computed capacity by a bounded factor, from measured steps and late first tokens. Pure.

At utilization u the stationary batch of `capacity.py` makes a step last step_s / (1 - u). The steps of the last minutes, and the first
tokens that were late although no request waited, show how far a replica is from that law.

ITL here is the mean duration of an engine's step (busy_s / steps). Without speculative decoding, which makes several tokens in a step,
this is about the time between two tokens of an answer inside the engine. The gaps that a client sees are not measured: they also contain
the time of link, ingress and network.
"""

import math
from dataclasses import dataclass

from serve_app.autoscaling.signals import ModelLoad

LEAST, MOST = 0.8, 1.1
"""Bounds of the factor. A larger deviation means that the measure is wrong; guards then add replicas one by one."""
MEMORY_S = 300.0
MEASURED_S = 180.0
"""The factor is 1 until this many seconds were measured."""
FULL = 0.9
"""Above this utilization nothing is compared: a small error of the demand would change the expected step a lot."""
USUAL = 0.1
"""Steps that deviate by less than this share are as expected: the law is about means, and a fit of minutes is not exact."""
MAY_BE_LATE, LATE_PRICE = 0.01, 2.0
"""One first token of a hundred may be late. Each further hundredth takes two hundredths off the capacity."""


@dataclass(slots=True)
class Feedback:
    """Sums over the last `MEMORY_S` seconds in which measurements can be compared with the law."""

    _span_s: float = 0.0
    _steps: float = 0.0
    _expected_s: float = 0.0
    _taken_s: float = 0.0
    _first_tokens: float = 0.0
    _late: float = 0.0

    def observe(self, load: ModelLoad, *, step_s: float, demand: float, running: int) -> None:
        """Compare one interval of an even load. Silent replicas are taken to do an equal part of the work.

        Args:
            load: The measured load of the interval.
            step_s: Fitted seconds of a step without tokens.
            demand: Seconds of work that arrive each second.
            running: Replicas that serve.
        """
        if not running or not load.fits_together or load.queued + load.waiting > running:
            return  # a queue causes late first tokens and full batches, and it has a wish of its own
        if (utilization := demand / running) >= FULL or not load.steps:
            return
        keep = math.exp(-load.interval_s / MEMORY_S)
        self._span_s = keep * self._span_s + load.interval_s
        self._steps = keep * self._steps + load.steps
        self._expected_s = keep * self._expected_s + load.steps * step_s / (1 - utilization)
        self._taken_s = keep * self._taken_s + load.busy_s
        self._first_tokens = keep * self._first_tokens + load.first_tokens
        self._late = keep * self._late + load.late_first_tokens

    @property
    def span_s(self) -> float:
        """Return the seconds of even load that were measured; old ones count less. The factor corrects from `MEASURED_S` on."""
        return self._span_s

    @property
    def itl_s(self) -> float:
        """Return the measured mean duration of an engine's step, 0 while nothing was measured.

        Without speculative decoding it is about the time between two tokens inside the engine.
        """
        return self._taken_s / self._steps if self._steps else 0.0

    @property
    def expected_itl_s(self) -> float:
        """Return the mean duration of a step that the law predicts."""
        return self._expected_s / self._steps if self._steps else 0.0

    @property
    def late_share(self) -> float:
        """Return the share of first tokens that were late although no request waited, 0..1."""
        return self._late / self._first_tokens if self._first_tokens else 0.0

    def factor(self, *, with_ttft: bool = True) -> float:
        """Return the factor on the capacity, `LEAST` to `MOST`; 1 if replicas perform as computed.

        Without ``with_ttft`` late first tokens do not count: if the limit is too short for any replica, they say nothing about one.
        """
        if self._span_s < MEASURED_S or not self._taken_s:
            return 1.0
        itl = self._expected_s / self._taken_s
        itl = 1.0 if abs(itl - 1) < USUAL else itl
        ttft = 1 - LATE_PRICE * max(0.0, self.late_share - MAY_BE_LATE) if with_ttft else 1.0
        return min(MOST, max(LEAST, min(itl, ttft) if ttft < 1 else itl))

"""The capacity model computes from measured step times how much one replica can do within the SLO, for `model_autoscaler.py`. Pure.

A step takes ``step_s`` however small its batch, and ``output_token_s`` more for each token it decodes and ``prompt_token_s`` for
each it prefills. Replicas measure the three at their start, and `StepCosts` fits them to the load that replicas report later. A request
of P prompt and O output tokens is then O x output_token_s + P x prompt_token_s seconds of *work*. A replica can do at most one second of
work per second, and the utilization u is work per second and replica. With Poisson arrivals, the batch is a birth-death process that a
request leaves with rate 1 / (O x step time). Its stationary law is negative binomial with r = step_s / b + 1 and p = u, where b is the
work per output token; its mean is r u / (1 - u), its variance r u / (1 - u)^2. The SLO, the KV cache and max_num_seqs bound the batch.
`Capacity.utilization` gives, in closed form, the utilization at which the batch keeps within the bound with `TAIL` standard deviations to
spare. Where each request goes to the least loaded of n replicas, the deviation of each batch is 1 / sqrt(n) of that of one replica.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from serve_app.core.step_costs import Array, MeasuredCosts, non_negative_least_squares

TAIL = 1.645
"""A batch of this many standard deviations above the mean must still keep the SLO: 95 % of the time for a normal law."""
WINDOW_S, LONGEST_WINDOW_S = 5.0, 120.0
"""The shortest and longest window. Reports are summed over a window before they are fitted, because members report at different moments of
a second. Where prompts take long, windows are longer."""
WINDOW_PROMPTS, LONGEST_HALF_S = 5.0, 300.0
"""A window lasts at least as long as `WINDOW_PROMPTS` of the longest prompts of the last minutes. The tokens of a prompt are counted with
its first token, its steps while they are made: a window that ends between the two has steps without their tokens, and the next one has
tokens without their steps. The longest prompt counts half after `LONGEST_HALF_S` seconds of work, for prompts may have become shorter."""
MEMORY = 0.99
"""Weight of `WINDOW_S` seconds relative to the next: half after 69 times as long, about 6 minutes of windows with load."""
CONTRADICTION, CONTRADICTIONS = 1.3, 6
"""The fit counts as out of date once it was off by this factor, to the same side, in this many windows in a row."""
OUTDATED_MEMORY = 0.3
"""Weight of the windows before such a contradiction."""
MAX_UTILIZATION = 0.95
"""Above this utilization a queue hardly ever empties, whatever the SLO."""
MIN_WINDOWS = 3
FASTEST = 1e4
"""Steps per second: no engine makes more, whatever a fit says."""
NOISE = 0.1
"""Relative deviation of a window of one second from the cost of its counts: members report at different moments."""
PRIOR_OUTPUT, PRIOR_PROMPT = (0.005, 0.02), (0.01, 0.05)
"""For tokens whose cost no replica has measured: the cost as a share of a step, and its deviation. A decode step mostly reads the weights,
whatever its batch."""
OTHER_BATCHES, LEAST_ERROR = 0.2, 0.001
"""The error of a cost that replicas measured at their start is at least a fifth of the cost, and a thousandth of a step: contexts and
prompts of the load differ from those of the timed batches."""
ONE_TOKEN = 1.05
"""With a mean answer of at most this many tokens, all answers count as one token."""
LEAST_BATCH, RETURN_BATCH = 1.0, 2.0
"""A limit that allows fewer than 1 request at once is ignored; it counts again once it allows 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits that hold for almost every request. Seconds."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds, as the module's docstring defines them."""

    step_s: float
    output_token_s: float
    prompt_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The mean request of the present load."""

    prompt_tokens: float = 0.0
    """Prompt tokens that engines compute, without those from the prefix cache."""
    output_tokens: float = 0.0

    def work_s(self, times: StepTimes) -> float:
        """Return the seconds of a replica that one request costs."""
        return self.output_tokens * times.output_token_s + self.prompt_tokens * times.prompt_token_s


@dataclass(slots=True)
class StepCosts:
    """The fit of the step times: least squares, no cost below zero, and forgetting only in directions of which new windows say something.

    One request at a time makes as many steps as tokens, and a constant load always has as many tokens a step: neither can separate the
    cost of a step from that of its tokens. Such windows replace the knowledge along their own direction and leave the others as they were
    (directional forgetting, Cao and Schwartz 2000). Costs that no window could separate are taken from the replicas' measurements at
    their start (`start_from`), or from `_guess` if no replica has measured.
    """

    _gram: list[list[float]] = field(default_factory=lambda: [[0.0] * 3] * 3)
    _moment: list[float] = field(default_factory=lambda: [0.0] * 3)
    _window: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Steps, output tokens, prefilled tokens, busy seconds."""
    _longest_prompt: float = 0.0
    """Computed tokens: the largest mean of an observation, which counts half after each `LONGEST_HALF_S` of work."""
    _elapsed_s: float = 0.0
    _num_windows: int = 0
    _num_off: int = 0
    """Windows in a row that took longer than fitted; negative: that were shorter."""
    _times: StepTimes | None = None
    _measured: MeasuredCosts | None = None

    def start_from(self, measured: MeasuredCosts | None) -> None:
        """Take over the start measurements of the present replicas; None: measurements of earlier replicas stay."""
        self._measured = measured or self._measured

    def weigh(self, weight: float) -> None:
        """Let all windows so far count ``weight`` times as much, 0..1; the replicas' start measurements count as before."""
        self._gram = [[weight * value for value in row] for row in self._gram]
        self._moment = [weight * value for value in self._moment]

    def add(
        self, interval_s: float, *, steps: float, busy_s: float, output_tokens: float, prefilled_tokens: float, prompts: float
    ) -> None:
        """Add the work of the reporting replicas in an interval. ``prompts``: the number of prompts of the ``prefilled_tokens``."""
        new = (steps, output_tokens, prefilled_tokens, busy_s)
        self._window = [a + b for a, b in zip(self._window, new, strict=True)]
        longest = 0.5 ** (min(busy_s, interval_s) / LONGEST_HALF_S) * self._longest_prompt
        # With less than one prompt in an observation, as after a late report, the mean would be arbitrary.
        self._longest_prompt = max(longest, prefilled_tokens / max(1.0, prompts) if prompts else 0.0)
        self._elapsed_s += interval_s
        window_s = self._window_s()
        if self._elapsed_s < window_s:
            return
        x, y = np.array(self._window[:3]), self._window[3]
        self._window = [0.0] * 4
        self._elapsed_s = 0.0
        if x[0] < 1 or y <= 0:
            return  # idle: says nothing about steps
        # Per second of work: a busy minute of many replicas must not outweigh all earlier windows.
        x, weight = x / y, min(y, window_s)
        gram, moment = self._remembered(x, weight, window_s)
        gram, moment = gram + weight * np.outer(x, x), moment + weight * x
        self._gram, self._moment = gram.tolist(), moment.tolist()
        self._num_windows += 1
        if self._measured is not None or self._num_windows >= MIN_WINDOWS:
            prior, prior_moment = self._prior(x[0])
            self._times = StepTimes(*non_negative_least_squares(gram + prior, moment + prior_moment))

    def _window_s(self) -> float:
        """Return the length of a window, from the measured costs: windows that are too short teach costs that are too small."""
        steps, output_tokens, prompt_tokens, busy_s = self._window
        if steps and not (output_tokens or prompt_tokens):
            return LONGEST_WINDOW_S  # a prompt is being computed: its tokens are counted with its first token
        if self._measured is not None:
            prompt_token_s = self._measured.prompt_token_s
        elif self._times is not None:
            prompt_token_s = max(self._times.prompt_token_s, PRIOR_PROMPT[0] * self._times.step_s)
        else:
            prompt_token_s = PRIOR_PROMPT[0] * busy_s / steps if steps else 0.0
        return min(LONGEST_WINDOW_S, max(WINDOW_S, WINDOW_PROMPTS * self._longest_prompt * prompt_token_s))

    def _prior(self, steps_per_s: float) -> tuple[Array, Array]:
        """Return gram matrix and moment of the prior. ``steps_per_s``: steps per busy second of the last window."""
        if (measured := self._measured) is not None:
            return _belief(measured)
        return _guess(min(steps_per_s, FASTEST)), np.zeros(3)

    def _remembered(self, x: Array, weight: float, window_s: float) -> tuple[Array, Array]:
        """Return gram matrix and moment of earlier windows, after forgetting for one of ``window_s`` with counts ``x`` per busy second."""
        gram, moment = np.array(self._gram), np.array(self._moment)
        if self._is_outdated(x):
            memory = OUTDATED_MEMORY ** min(1.0, weight / WINDOW_S)
            return memory * gram, memory * moment
        along = gram @ x
        if (known := float(x @ along)) <= 0:
            return gram, moment
        part = (1 - MEMORY ** (window_s / WINDOW_S)) / known
        return gram - part * np.outer(along, along), moment - part * along * float(x @ moment)

    def _is_outdated(self, x: Array) -> bool:
        """Note whether a window with counts ``x`` per busy second contradicts the fit; return whether `CONTRADICTIONS` in a row did."""
        if self._times is None:
            return False
        fitted_s = float(x @ np.array([self._times.step_s, self._times.output_token_s, self._times.prompt_token_s]))
        side = (fitted_s < 1 / CONTRADICTION) - (fitted_s > CONTRADICTION)
        self._num_off = self._num_off + side if side * self._num_off > 0 else side
        return abs(self._num_off) >= CONTRADICTIONS

    def times(self) -> StepTimes | None:
        """Return the fitted times; before any load the replicas' start measurements; None while there is neither.

        Without such a measurement the fit begins with `MIN_WINDOWS` windows of load.
        """
        if self._times is None and (measured := self._measured) is not None:
            return StepTimes(measured.step_s, measured.output_token_s, measured.prompt_token_s)
        return self._times

    def work_error_s(self, mix: Mix) -> float:
        """Return the standard deviation of the work of a request of ``mix``, in seconds; 0 if no replica has measured itself.

        The deviation shrinks as the load confirms or corrects the replicas' own measurements.
        """
        if self._measured is None:
            return 0.0
        prior, _ = _belief(self._measured)
        tokens = np.array([0.0, mix.output_tokens, mix.prompt_tokens])
        return NOISE * float(tokens @ np.linalg.solve(np.array(self._gram) + prior, tokens)) ** 0.5

    def taught(self) -> tuple[float, float, float] | None:
        """Return, in the order of `StepTimes`, the share of each cost's variance that the load has removed, 0..1; None without measurement.

        Near 0 the cost is still the measured one; near 1 the measurement no longer matters.
        """
        if self._measured is None:
            return None
        prior, _ = _belief(self._measured)
        left = np.diag(np.linalg.inv(np.array(self._gram) + prior)) * np.diag(prior)
        step, output, prompt = (min(1.0, max(0.0, 1 - value)) for value in left.tolist())
        return step, output, prompt


def _belief(measured: MeasuredCosts) -> tuple[Array, Array]:
    """Return a measurement as gram matrix and moment, in units of a window's own noise: each cost with its error."""
    costs = np.array([measured.step_s, measured.output_token_s, measured.prompt_token_s])
    own = np.array([measured.step_error_s, measured.output_token_error_s, measured.prompt_token_error_s])
    errors = np.maximum(np.hypot(own, OTHER_BATCHES * costs), max(LEAST_ERROR * measured.step_s, 1e-9))
    weights = (NOISE / errors) ** 2
    return np.diag(weights), weights * costs


def _guess(pace: float) -> Array:
    """Return the prior of costs that no replica has measured, as a gram matrix of two rows that should be zero.

    A row says (cost of a token - `ratio` x cost of a step) = 0 +- `spread` x seconds of a step, in units of a window's own noise. So the
    first windows with batches that differ outweigh it, and it decides only while all batches are alike. Its right side is zero.

    Args:
        pace: Observed steps per busy second. Steps without tokens would be faster, but only the fit says by how much, and a prior that
            narrows with its own result can outweigh the observations.
    """
    gram = np.zeros((3, 3))
    for token, (ratio, spread) in enumerate((PRIOR_OUTPUT, PRIOR_PROMPT), start=1):
        row = np.zeros(3)
        row[0], row[token] = -ratio, 1.0
        gram += np.outer(row, row) * (NOISE * pace / spread) ** 2
    return gram


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of one replica for requests of one mix."""

    times: StepTimes
    mix: Mix
    max_batch: float
    """Requests that may run at once: max_num_seqs, or what the KV cache holds."""
    slo: Slo
    left_out: frozenset[str] = frozenset()
    """Limits of the SLO, itl or ttft, that do not count although a request alone may keep them."""
    work_error_s: float = 0.0
    """A request is taken to cost this much more than fitted, until the load has confirmed the replicas' measurements."""

    @property
    def work_s(self) -> float:
        """Seconds of a replica for one request; never zero, however little of a step the fit attributes to tokens."""
        least_s = self.times.step_s / (100 * self.max_batch) * max(1.0, self.mix.output_tokens)
        return max(least_s, self.mix.work_s(self.times) + self.work_error_s, 1e-9)

    def slo_batches(self) -> dict[str, float]:
        """Return limit of the SLO -> the largest batch that keeps it; below 1 if even a request alone breaks it.

        Answers of one token, such as those of classifiers, have no gaps between tokens: any batch keeps the ITL limit.
        """
        times, per_token = self.times, self._work_per_output_token()
        prefill_s = self.mix.prompt_tokens * times.prompt_token_s
        has_gaps = self.mix.output_tokens > ONE_TOKEN or not self.mix.prompt_tokens  # 0 prompt tokens: the mix is unknown
        return {
            "itl": (self.slo.itl_s - times.step_s) / per_token if has_gaps else self.max_batch,
            "ttft": (self.slo.ttft_s - times.step_s - prefill_s) / per_token,
        }

    def batch_limit(self) -> tuple[float, str]:
        """Return the largest batch that keeps the SLO, >= 1, and the limit that decides: itl, ttft or batch.

        A limit that even a request alone breaks is left out, too: more replicas would not help.
        """
        limits = [
            (limit, name) for name, limit in self.slo_batches().items() if limit >= LEAST_BATCH and name not in self.left_out
        ]
        return min([*limits, (max(1.0, self.max_batch), "batch")])

    def can_keep_ttft(self) -> bool:
        """Return whether a request alone has its first token in time; otherwise more replicas would not help."""
        return self.times.step_s + self.mix.prompt_tokens * self.times.prompt_token_s < self.slo.ttft_s

    def utilization(self, num_replicas: int) -> float:
        """Return the work per second and replica to aim at when ``num_replicas`` share the load, 0 < u <= `MAX_UTILIZATION`."""
        limit, _ = self.batch_limit()
        r = self._idle_requests()
        # r u / (1 - u) + tail sqrt(r u) / (1 - u) = limit, solved for s = sqrt(u).
        tail = TAIL / num_replicas**0.5
        half = tail * r**0.5 / (2 * (r + limit))
        s = -half + (half * half + limit / (r + limit)) ** 0.5
        return float(min(MAX_UTILIZATION, max(1e-6, s * s)))

    def saturation(self) -> float:
        """Return the most work per second that a replica can do: with its batch full, whatever the SLO."""
        return min(MAX_UTILIZATION, self.max_batch / (self.max_batch + self._idle_requests()))

    def replicas_for(self, demand: float, factor: float = 1.0) -> int:
        """Return the fewest replicas that do ``demand`` seconds of work per second at ``factor`` of their utilization."""
        if demand <= 0:
            return 0
        count = max(1, math.ceil(demand / (MAX_UTILIZATION * factor)))
        while count * self.utilization(count) * factor < demand:
            count += max(1, count // 200)  # of a thousand replicas, one in two hundred more costs nothing
        return count

    def replicas_with_room(self, demand: float, headroom: float) -> int:
        """Return the fewest replicas whose batches are not over-full once the demand has risen by the share ``headroom``.

        With a ``headroom`` of 0, no room is asked for and the result is 0. ``demand``: seconds of work per second. From 200 replicas on
        the number is rounded up, by at most a hundredth: otherwise a large fleet would ask for one more each time that chance moves its
        demand by a thousandth.
        """
        count = math.ceil(demand * (1 + headroom) / self.saturation()) if headroom else 0
        grain = max(1, count // 100)
        return math.ceil(count / grain) * grain

    def _idle_requests(self) -> float:
        """Return r: the number of requests whose work fits into the fixed part of a step, plus one."""
        return self.times.step_s / self._work_per_output_token() + 1.0

    def _work_per_output_token(self) -> float:
        return self.work_s / max(1.0, self.mix.output_tokens)

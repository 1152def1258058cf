"""This module computes how long a step takes on the simulated accelerator, and until when the engine has to wait for it.

Pure: no clock, no sleep. A step is one forward pass over a batch of requests, each with a context already in the KV
cache and some new tokens: a chunk of the prompt (prefill) or one token (decode). The roofline model takes the longer of

    compute = (2 x multiplied parameters x new tokens + 4 x layers x heads x head size x attention pairs) / FLOP/s
    memory  = (weight bytes + KV bytes of all contexts and new tokens) / (bytes/s)

and adds a fixed overhead. Source of the model: S. Williams et al., "Roofline" (CACM 52/4, 2009); two FLOP per parameter
and token: J. Kaplan et al., arXiv 2001.08361, section 2.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from serve_app.simulated.profiles import Profile


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step."""

    num_tokens: int
    """New tokens of all requests."""
    kv_tokens: int
    """Tokens whose keys and values are read or written: contexts and new tokens."""
    attention_pairs: int
    """Pairs of a new token and a token that it attends to, itself included."""


def step_work(context_tokens: Sequence[int], new_tokens: Sequence[int]) -> StepWork:
    """Return the work of a step; the sequences have one entry per request. Costs O(requests)."""
    num_tokens = sum(new_tokens)
    # n new tokens after a context of c attend to c+1, c+2, ... c+n tokens: n*c + n*(n+1)/2 pairs.
    squares = sum(map(mul, new_tokens, new_tokens))
    pairs = sum(map(mul, context_tokens, new_tokens)) + (squares + num_tokens) // 2
    return StepWork(num_tokens, sum(context_tokens) + num_tokens, pairs)


def step_time_s(profile: Profile, work: StepWork) -> float:
    """Return the seconds that the accelerator needs for ``work``; 0 for no work."""
    if work.num_tokens == 0:
        return 0.0
    accelerator, model = profile.accelerator, profile.model
    devices = profile.num_accelerators * (profile.parallel_efficiency if profile.num_accelerators > 1 else 1.0)
    multiplied = model.num_parameters - model.lookup_parameters
    pair_flops = 4 * model.num_layers * model.num_attention_heads * model.head_size
    flops = 2 * multiplied * work.num_tokens + pair_flops * work.attention_pairs
    moved_bytes = model.streamed_bytes + model.kv_bytes_per_token * work.kv_tokens
    compute_s = flops / (accelerator.flops_per_s * accelerator.compute_efficiency * devices)
    memory_s = moved_bytes / (accelerator.bandwidth_bytes_per_s * accelerator.bandwidth_efficiency * devices)
    return profile.step_overhead_s + max(compute_s, memory_s)


class StepClock:
    """Turns step times into deadlines, so that the engine's own work between steps does not make them slow.

    A real accelerator starts a step while the engine still prepares and publishes others. So while there is work, a step starts when the
    step before it ended, not when the engine handed it over; after a pause it starts at once.
    """

    def __init__(self) -> None:
        self._free_at: float | None = None

    def deadline(self, now: float, step_s: float) -> float:
        """Return when a step handed over at ``now`` ends; ``now`` itself if the engine is slower than the steps."""
        started_at = now if self._free_at is None else self._free_at
        # At most one step is made up for: otherwise a suspension of the machine would be followed by a burst of steps without duration.
        self._free_at = max(now, started_at + step_s)
        return self._free_at

    def idle(self) -> None:
        """Note that no work is left: the next step starts when it is handed over."""
        self._free_at = None

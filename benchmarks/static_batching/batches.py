"""This module computes static batching: a batch's members, its run time, and the KV cache that it reserves and uses.

Pure: no clock, no Ray, no PyTorch. A batch is a matrix: prompts are padded on the left to the longest, all places decode until the last
one is done, and no request joins or leaves. There are two forms. In the baseline of the source, Anyscale's "How continuous batching enables
23x throughput" (2023), *every* batch has the largest length of *all* requests (``paper``). A server that stops when its own longest member
is done wastes less (``fair``).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec

from serve_app.simulated.profiles import Profile
from serve_app.simulated.timing import StepWork, step_time_s, step_work

Form = Literal["paper", "fair"]
T = TypeVar("T")


def num_steps(form: Form, output_tokens: Sequence[int], max_output_tokens: int) -> int:
    """Return the number of tokens that each place of a batch decodes, including the first token (from the prefill)."""
    return max_output_tokens if form == "paper" else max(output_tokens)


def largest_batch(kv_tokens: int, max_length: int) -> int:
    """Return the number of requests that fit if each reserves ``max_length`` tokens: which of them will need that is unknown."""
    return kv_tokens // max_length


def step_ends_s(profile: Profile, prompt_tokens: Sequence[int], steps: int) -> list[float]:
    """Return the times of token 1, 2, ... of a batch, in seconds from its start. Padding is computed like any token.

    The host takes no time between the steps, although Transformers does need some: the figures favour static batching.
    """
    size, padded = len(prompt_tokens), max(prompt_tokens)
    end = step_time_s(profile, step_work([0] * size, [padded] * size))
    ends = [end]
    for context in range(padded, padded + steps - 1):
        tokens = size * (context + 1)
        end += step_time_s(profile, StepWork(size, tokens, tokens))
        ends.append(end)
    return ends


def closed_at(arrivals: Sequence[float], free_at: float, *, batch_size: int, wait_s: float) -> float:
    """Return when a batch is complete: at its last member if it is full, else ``wait_s`` after its first; never before ``free_at``.

    The simulated accelerator starts at that time, however late the event loop notices it.
    """
    if len(arrivals) >= batch_size:
        return max(free_at, *arrivals)
    return max(free_at, min(arrivals)) + wait_s


class BatchGate(Generic[T]):
    """A gate that holds requests back while a batch runs, so that the next batch has all of them.

    `serve.batch` closes a batch when its wait is over even if the previous batch still runs. At a low rate, a queue of batches of one
    would build up at a busy accelerator, and the baseline would look worse than static batching has to be.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._waiting: deque[T] = deque()
        self._members: set[T] = set()
        self._running = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def arrived(self, item: T) -> list[T]:
        """Return the items that may join the batch that is being formed."""
        self._waiting.append(item)
        return self._admit()

    def started(self) -> None:
        """Note that the batch runs: no item may join it."""
        self._running = True

    def left(self, item: T) -> list[T]:
        """Note that an item is answered, or its client disconnected. Return the items that may join the next batch, which begins when the
        last item has left."""
        if item in self._members:
            self._members.remove(item)
        else:
            self._waiting.remove(item)
        if not self._members:
            self._running = False
        return self._admit()

    def _admit(self) -> list[T]:
        admitted: list[T] = []
        while self._waiting and not self._running and len(self._members) < self.batch_size:
            admitted.append(self._waiting.popleft())
            self._members.add(admitted[-1])
        return admitted


class Member(msgspec.Struct, frozen=True):
    """One request of a batch."""

    id: str
    prompt_tokens: int
    output_tokens: int


class BatchRecord(msgspec.Struct, frozen=True):
    """The record of a batch. Members are in the order of their places."""

    started_unix_s: float
    step_ends_s: list[float]
    """Times of token 1, 2, ... from the start, in real seconds; the last token ends the batch for all members."""
    members: list[Member]
    max_length: int
    """Tokens reserved per place."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """Use of the KV cache by one batch over its life, in token x seconds; quotients of the fields are shares."""

    reserved: float
    padded: float
    """Tokens in the matrix after each step, including padding and tokens decoded beyond a member's own end."""
    used: float
    """Prompt and output tokens that a member asked for."""


def kv_tokens(batch: BatchRecord, step: int) -> tuple[int, int, int]:
    """Return the tokens reserved, in the matrix, and used, when ``step`` tokens of each place exist, step >= 1."""
    size = len(batch.members)
    padded = max(m.prompt_tokens for m in batch.members)
    used = sum(m.prompt_tokens + min(step, m.output_tokens) for m in batch.members)
    return size * batch.max_length, size * (padded + step), used


def kv_use(batch: BatchRecord) -> KvUse:
    """Return the KV cache that a batch reserved and used, summed over its life; a step counts with the tokens at its end."""
    reserved = padded = used = before = 0.0
    for step, end in enumerate(batch.step_ends_s, 1):
        now = kv_tokens(batch, step)
        length, before = end - before, end
        reserved, padded, used = reserved + now[0] * length, padded + now[1] * length, used + now[2] * length
    return KvUse(reserved, padded, used)

"""`Sequences` keeps the requests that an engine holds as arrays with one slot each, so that a step over 256 of them costs microseconds.

Pure. The engine's scheduler owns the requests. Here is what a model runner keeps of them: the hash of the sequence so far, its length, and
the sampling rules that change which token comes next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serve_app.simulated.tokens import NO_EOS, Ids, States, TokenSource, extended


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRules:
    """The sampling parameters of a request that the simulation obeys. The scheduler decides where an answer stops."""

    eos_token_id: int = NO_EOS
    """Emitted with the configured probability; NO_EOS if the request ignores the end of sequence."""
    salt: int = 0
    """64 bits that give a seeded request its own draws; 0: the likeliest token, as in greedy sampling."""
    min_tokens: int = 0
    """No stop token is drawn before this many output tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    allowed_token_ids: tuple[int, ...] = ()
    """Sorted. Empty: all tokens are allowed."""
    num_logprobs: int | None = None
    """Candidates to report beside the sampled token."""

    @property
    def narrowed(self) -> bool:
        """Whether the draws of this request must be checked one by one."""
        return bool(self.allowed_token_ids or (self.min_tokens and self.stop_token_ids))


class Sequences:
    """Arrays of sequence state. A slot is valid from `add` to `remove`."""

    def __init__(self, num_slots: int = 256) -> None:
        self.slots: dict[str, int] = {}
        self._free = list(range(num_slots))
        self._state: States = np.zeros(num_slots, dtype=np.uint64)
        self._salt: States = np.zeros(num_slots, dtype=np.uint64)
        self._length = np.zeros(num_slots, dtype=np.int64)
        self._eos_from = np.zeros(num_slots, dtype=np.int64)  # length from which on the sequence may end
        self._eos = np.full(num_slots, NO_EOS, dtype=np.int64)
        self._rules: list[SamplingRules] = [SamplingRules()] * num_slots
        self.narrowed: set[int] = set()
        self.with_logprobs: set[int] = set()
        self.scripts: dict[int, list[int]] = {}
        """Slot -> the planned next tokens, the nearest last."""

    def add(
        self,
        request_id: str,
        *,
        state: int,
        length: int,
        num_prompt_tokens: int,
        rules: SamplingRules,
        script: Sequence[int] = (),
    ) -> None:
        """Add a request, or replace it: the id may come again with a longer prompt.

        Args:
            script: The next tokens, in place of drawn ones, as long as nothing else forbids them.
        """
        self.remove(request_id)
        if not self._free:
            self._grow()
        slot = self.slots[request_id] = self._free.pop()
        self._state[slot], self._length[slot], self._salt[slot] = state, length, rules.salt
        self._eos[slot], self._eos_from[slot] = rules.eos_token_id, num_prompt_tokens + rules.min_tokens
        self._rules[slot] = rules
        if rules.narrowed:
            self.narrowed.add(slot)
        if rules.num_logprobs is not None:
            self.with_logprobs.add(slot)
        if script:
            self.scripts[slot] = [*reversed(script)]

    def remove(self, request_id: str) -> None:
        """Forget a request. An unknown id is no error: the request may have been aborted before its first step."""
        slot = self.slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self.narrowed.discard(slot)
            self.with_logprobs.discard(slot)
            self.scripts.pop(slot, None)

    def rules(self, slot: int) -> SamplingRules:
        return self._rules[slot]

    def draw_state(self, slot: int) -> int:
        """Return the state from which a draw of this slot starts, with the request's own seed."""
        return int(self._state[slot] ^ self._salt[slot])

    def completed(self, slots: NDArray[np.intp], num_tokens: Ids) -> NDArray[np.bool_]:
        """Return whether each sequence is complete, and so gets a next token, once ``num_tokens`` of it are computed."""
        return num_tokens >= self._length[slots]

    def sample(self, slots: NDArray[np.intp], source: TokenSource) -> Ids:
        """Return the next token of each slot, without changing it: `append` does, after a grammar may have replaced the token."""
        states = self._state[slots] ^ self._salt[slots]
        tokens = source.draw(states)
        eos = self._eos[slots]
        ends = source.ends(states) & (eos != NO_EOS) & (self._length[slots] >= self._eos_from[slots])
        tokens = np.where(ends, eos, tokens)
        if self.scripts:
            for index, slot in enumerate(slots.tolist()):
                if slot in self.scripts:
                    tokens[index] = self.scripts[slot][-1]
        if self.narrowed:
            for index, slot in enumerate(slots.tolist()):
                if slot in self.narrowed:
                    tokens[index] = self._narrow(slot, int(tokens[index]), source)
        return tokens

    def append(self, slots: NDArray[np.intp], token_ids: Ids) -> None:
        """Append one token to each slot's sequence. Another token than the planned one ends a slot's script."""
        if self.scripts:
            for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
                if (script := self.scripts.get(slot)) is not None and (script.pop() != token_id or not script):
                    del self.scripts[slot]
        self._state[slots] = extended(self._state[slots], token_ids)
        self._length[slots] += 1

    def _narrow(self, slot: int, token: int, source: TokenSource) -> int:
        rules, state = self._rules[slot], self.draw_state(slot)
        early = self._length[slot] < self._eos_from[slot]
        stops = set(rules.stop_token_ids) if early else set()
        if rules.allowed_token_ids:
            allowed = [i for i in rules.allowed_token_ids if i not in stops] or list(rules.allowed_token_ids)
            return token if token in allowed else source.draw_allowed(state, np.array(allowed, dtype=np.int64), set())
        return source.draw_other(state, stops) if token in stops else token

    def _grow(self) -> None:
        size = len(self._rules)
        self._free = list(range(size, 2 * size))
        self._rules += [SamplingRules()] * size
        self._state = np.concatenate((self._state, np.zeros(size, dtype=np.uint64)))
        self._salt = np.concatenate((self._salt, np.zeros(size, dtype=np.uint64)))
        self._length = np.concatenate((self._length, np.zeros(size, dtype=np.int64)))
        self._eos_from = np.concatenate((self._eos_from, np.zeros(size, dtype=np.int64)))
        self._eos = np.concatenate((self._eos, np.full(size, NO_EOS, dtype=np.int64)))


def slots_of(sequences: Sequences, request_ids: Sequence[str]) -> NDArray[np.intp]:
    """Return the slots of requests, in their order."""
    return np.array([sequences.slots[i] for i in request_ids], dtype=np.intp)

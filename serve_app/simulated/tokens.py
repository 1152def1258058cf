"""This module draws the next token of a simulated model from a hash of the sequence so far and a seed.

Pure. The state of a sequence is one 64-bit number, a polynomial hash of prompt and output ids. It does not depend on where the prompt
ends, how it was cut into chunks, or which other requests were in the batch. So a request that starts again elsewhere from prompt + emitted
ids continues with the same tokens. Appending a token is O(1); everything works on arrays, one entry per sequence, because a Python loop
over 256 sequences costs more than the scheduler.
Source of the mixing function: G. Steele et al., "Fast splittable pseudorandom number generators" (OOPSLA 2014), the
finalizer of SplitMix64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

States = NDArray[np.uint64]
Ids = NDArray[np.int64]

_BASE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: odd, so that multiplying by it loses nothing
_MASK = 2**64 - 1
_EOS_SALT = np.uint64(0x632BE59BD9B4E019)
_CLOSE_SALT = np.uint64(0xD1342543DE82EF95)
_CLOSE_SHARE = 0.25
"""Share of the draws that lead a grammar towards its end: a hash alone would keep strings and lists open for hundreds of tokens."""
NO_EOS = -1


def mix(states: States) -> States:
    """Return 64 well-mixed bits per state."""
    x = states ^ (states >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def salt_of(seed: int) -> int:
    """Return the salt of a request's own sampling seed."""
    return int(mix(np.array([(seed + 1) & _MASK], dtype=np.uint64))[0])


def extended(states: States, token_ids: Ids) -> States:
    """Return the states after one more token each."""
    return states * np.uint64(_BASE) + token_ids.astype(np.uint64) + np.uint64(1)


class SequenceHash:
    """Hashes whole sequences. Keeps the powers of its base, 8 bytes per token of the longest sequence seen."""

    def __init__(self, seed: int) -> None:
        self._start = salt_of(seed)
        self._powers = np.ones(1, dtype=np.uint64)

    def state(self, token_ids: Sequence[int]) -> int:
        """Return the state of a sequence. Equal to `extended` applied token by token."""
        size = len(token_ids)
        while self._powers.size <= size:
            step = np.uint64(pow(_BASE, self._powers.size, 2**64))
            self._powers = np.concatenate((self._powers, self._powers * step))
        ids = np.array(token_ids, dtype=np.int64).astype(np.uint64) + np.uint64(1)
        total = int((ids * self._powers[:size][::-1]).sum(dtype=np.uint64)) if size else 0
        return (self._start * int(self._powers[size]) + total) & _MASK

    def states_before(self, token_ids: Sequence[int]) -> list[int]:
        """Return the state from which each token of a sequence is drawn: that of the tokens before it."""
        states = [self._start]
        for token_id in token_ids:
            states.append((states[-1] * _BASE + token_id + 1) & _MASK)
        return states[:-1]


@dataclass(frozen=True)
class Candidates:
    """Possible next tokens of one sequence, likeliest first, with natural logarithms of their probabilities."""

    token_ids: list[int]
    logprobs: list[float]


class TokenSource:
    """Draws tokens from a vocabulary.

    Args:
        vocabulary: Ids that may be drawn: plain text, no special tokens.
        closing: Ids whose text only closes or separates (quotes, brackets, commas); they lead a grammar to its end.
        eos_probability: Probability that a token is the end-of-sequence token, 0 <= p <= 1.
    """

    def __init__(self, vocabulary: Ids, closing: Ids, *, eos_probability: float) -> None:
        if vocabulary.size == 0:
            raise ValueError("the vocabulary is empty")
        self._vocabulary = vocabulary
        self.size = vocabulary.size
        self._plain = np.zeros(int(vocabulary.max()) + 1, dtype=bool)
        self._plain[vocabulary] = True
        self._closing = np.zeros_like(self._plain)
        self._closing[closing[closing < self._plain.size]] = True
        # The largest 53-bit number below which a draw ends the sequence; 53 bits are what a float holds exactly.
        self._eos_below = np.uint64(int(eos_probability * 2**53))
        # Step between candidates: coprime with the size, so that all of them differ.
        stride = max(1, int(vocabulary.size * 0.618))
        while gcd(stride, vocabulary.size) != 1:
            stride += 1
        self._stride = stride

    def draw(self, states: States) -> Ids:
        """Return the next token of each sequence, without regard to the end of sequence."""
        return self._vocabulary[self._index(states)]

    def ends(self, states: States) -> NDArray[np.bool_]:
        """Return whether each sequence ends here, by the end-of-sequence probability only."""
        return (mix(states ^ _EOS_SALT) >> np.uint64(11)) < self._eos_below

    def draw_other(self, state: int, excluded: set[int]) -> int:
        """Return the likeliest token of one sequence that is not excluded; the likeliest if all are."""
        for candidate in self._ranked(state, len(excluded) + 1):
            if candidate not in excluded:
                return candidate
        return self._ranked(state, 1)[0]

    def draw_allowed(self, state: int, allowed: Ids, stops: set[int]) -> int:
        """Return the next token of one sequence out of ``allowed`` (sorted, not empty).

        Plain text is preferred to other tokens, so that no text decodes to replacement characters. ``stops`` are drawn when only they are
        left, or in the share of draws that close a grammar.
        """
        inside = allowed[allowed < self._plain.size]
        plain = inside[self._plain[inside]]
        words = np.array([state], dtype=np.uint64)
        closing = [*inside[self._closing[inside]].tolist(), *sorted(stops.intersection(allowed.tolist()))]
        if closing and _share(mix(words ^ _CLOSE_SALT)) < _CLOSE_SHARE:
            choice = np.array(closing, dtype=np.int64)
        else:
            choice = plain if plain.size else allowed
        return int(choice[_scaled(mix(words), np.uint64(choice.size))[0]])

    def candidates(self, state: int, sampled: int, count: int) -> Candidates:
        """Return up to ``count`` tokens, ``sampled`` first. Probabilities fall geometrically, at a rate from the hash.

        The probabilities x(1-x)^i with 0.3 <= x < 0.8 add up to 1 over an endless vocabulary.
        """
        others = [i for i in self._ranked(state, count) if i != sampled]
        token_ids = [sampled, *others][:count]
        first = 0.3 + 0.5 * _share(mix(np.array([state ^ int(_CLOSE_SALT)], dtype=np.uint64)))
        start, step = float(np.log(first)), float(np.log1p(-first))
        return Candidates(token_ids, [start + step * rank for rank in range(len(token_ids))])

    def _index(self, states: States) -> NDArray[np.uint64]:
        return _scaled(mix(states), np.uint64(self.size))

    def _ranked(self, state: int, count: int) -> list[int]:
        first = int(self._index(np.array([state], dtype=np.uint64))[0])
        ranks = np.arange(min(count, self.size), dtype=np.int64)
        ranked: list[int] = self._vocabulary[(first + ranks * self._stride) % self.size].tolist()
        return ranked


def _scaled(bits: States, size: np.uint64) -> NDArray[np.uint64]:
    """Map 64 bits to 0 <= index < size (below 2^32), evenly and without a division."""
    return ((bits >> np.uint64(32)) * size) >> np.uint64(32)


def _share(bits: States) -> float:
    """Map the bits of one state to 0 <= share < 1."""
    return float(bits[0] >> np.uint64(11)) / 2**53

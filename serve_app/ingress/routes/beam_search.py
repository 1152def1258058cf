"""A beam search tracks its sequences: which continue, which are finished, and which are the best.

Pure: log probabilities in, token ids out; the engine calls are in `generate.py`. Semantics are those of vLLM 0.32's
`entrypoints/generate/beam_search/online.py`, so that the last step's `best` equals vLLM's answer. Differs: `best` may
be called after each step, and `early_stopping` exists (a parameter of vLLM's first server, which vLLM has dropped).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Beam:
    """One sequence: the prompt, then what was generated, without the end-of-sequence token that finished it."""

    token_ids: tuple[int, ...]
    cum_logprob: float


class BeamSearch:
    """The running and the finished beams of one prompt. Call `advance` once per step, `best` at any time."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        width: int,
        eos_token_id: int | None,
        ignore_eos: bool = False,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
    ) -> None:
        """Start with the prompt as the only beam.

        Args:
            prompt_ids: At least one token.
            width: Beams kept per step, and answers at most.
            eos_token_id: The token that finishes a beam; None if the tokenizer has none.
            ignore_eos: Treat that token as any other, except that, as in vLLM, a last one does not count as length.
            length_penalty: Exponent of the length, prompt included, that a beam's log probability is divided by;
                > 0 favours long answers.
            early_stopping: End as soon as `width` beams are finished, and give up the running beams.
        """
        self.running: list[Beam] = [Beam(tuple(prompt_ids), 0.0)]
        self._finished: list[Beam] = []
        self._width = width
        self._eos_token_id = eos_token_id
        self._ignore_eos = ignore_eos
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping

    @property
    def done(self) -> bool:
        return not self.running or self._stopped_early

    @property
    def _stopped_early(self) -> bool:
        return self._early_stopping and len(self._finished) >= self._width

    def advance(self, logprobs: Sequence[Mapping[int, float]]) -> None:
        """Take one step: extend each running beam by each of its candidate tokens and keep the `width` likeliest.

        Args:
            logprobs: For each running beam, in order, its candidate tokens. Of 2 * width candidates, at least width
                remain after the end-of-sequence token has finished its beam.
        """
        candidates: list[tuple[Beam, int, float]] = []
        for beam, by_token in zip(self.running, logprobs, strict=True):
            for token_id, logprob in by_token.items():
                cum_logprob = beam.cum_logprob + logprob
                if token_id == self._eos_token_id and not self._ignore_eos:
                    self._finished.append(Beam(beam.token_ids, cum_logprob))
                else:
                    candidates.append((beam, token_id, cum_logprob))
        chosen = _highest([cum_logprob for _, _, cum_logprob in candidates], self._width)
        self.running = [
            Beam((*beam.token_ids, token_id), cum_logprob)
            for beam, token_id, cum_logprob in (candidates[index] for index in chosen)
        ]
        # Scores of finished beams never change: a beam that is not among the best now never will be.
        self._finished = self._ranked(self._finished)

    def best(self) -> list[Beam]:
        """Return the best beams so far, best first, `width` at most. Running beams compete as if they ended here."""
        return self._ranked(self._finished if self._stopped_early else [*self._finished, *self.running])

    def score(self, beam: Beam) -> float:
        """Return the log probability per length ** length_penalty, which ranks beams; the highest is the best."""
        length = len(beam.token_ids) - (beam.token_ids[-1] == self._eos_token_id)
        return float(beam.cum_logprob / max(length, 1) ** self._length_penalty)

    def _ranked(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self.score, reverse=True)[: self._width]


def _highest(values: Sequence[float], count: int) -> list[int]:
    """Return the indices of the ``count`` highest values, highest first."""
    # Partition, then sort, as vLLM does: `heapq.nlargest` resolves exact ties, common in bfloat16, in another way.
    descending = -np.asarray(values, dtype=np.float64)
    if len(values) <= count:
        return [int(index) for index in np.argsort(descending)]
    top = np.argpartition(descending, count - 1)[:count]
    return [int(index) for index in top[np.argsort(descending[top])]]

"""These engines compute a batch: Hugging Face Transformers, or the simulated accelerator's tokens and times."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.static_batching.batches import closed_at, step_ends_s
from benchmarks.static_batching.settings import StaticSettings
from serve_app.simulated.tokens import SequenceHash, extended
from serve_app.simulated.vocabulary import source_for

CATCH_UP_S = 10.0
"""Real seconds by which a busy host may fall behind the simulated accelerator without slowing it; a longer suspension does slow it."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One member of a batch."""

    prompt_ids: list[int]
    max_tokens: int
    ignore_eos: bool
    arrived_at: float
    """Time of arrival by `time.perf_counter`, like all times of this module unless they say otherwise."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The token ids per member, including padding and surplus, and the end of each step."""

    token_ids: list[list[int]]
    started_at: float
    step_ends_s: list[float]
    """Seconds from ``started_at``."""


class SimulatedEngine:
    """An engine with the tokens of the simulated accelerator behind vLLM, so that answers equal the fleet's, and a static batch's times."""

    def __init__(self, settings: StaticSettings, path: Path) -> None:
        from transformers import AutoConfig, AutoTokenizer

        assert settings.simulated is not None
        self._settings, self._free_at = settings, 0.0
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._hash = SequenceHash(settings.simulated.seed)
        self._source = source_for(self.tokenizer, AutoConfig.from_pretrained(path).vocab_size, eos_probability=0.0)

    def retime(self, settings: StaticSettings) -> None:
        """Apply new lengths, batch sizes and time scales."""
        self._settings, self._free_at = settings, 0.0

    async def run(self, batch: Sequence[BatchRequest], steps: int) -> BatchResult:
        settings = self._settings
        scale, profile = settings.time_scale, settings.profile
        assert profile is not None
        wait_s = settings.batch_wait_s * scale
        started_at = closed_at([r.arrived_at for r in batch], self._free_at, batch_size=settings.batch_size, wait_s=wait_s)
        ends = [end * scale for end in step_ends_s(profile, [len(r.prompt_ids) for r in batch], steps)]
        started_at = max(started_at, time.perf_counter() - CATCH_UP_S)
        self._free_at = started_at + ends[-1]
        token_ids = await asyncio.to_thread(self._tokens, batch)
        await asyncio.sleep(self._free_at - time.perf_counter())
        return BatchResult(token_ids, started_at, ends)

    def _tokens(self, batch: Sequence[BatchRequest]) -> list[list[int]]:
        """Return each member's own tokens; no tokens are invented beyond a member's end."""
        states = np.array([self._hash.state(r.prompt_ids) for r in batch], dtype=np.uint64)
        rows = []
        for _ in range(max(r.max_tokens for r in batch)):
            rows.append(self._source.draw(states))
            states = extended(states, rows[-1])
        columns = np.stack(rows, axis=1).tolist()
        return [ids[: r.max_tokens] for ids, r in zip(columns, batch, strict=True)]


class TransformersEngine:
    """An engine that runs Hugging Face's ``generate`` on the CPU: prompts padded on the left, greedy, all places to the same length."""

    def __init__(self, settings: StaticSettings, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(settings.num_threads)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, settings.dtype)).eval()

    def retime(self, settings: StaticSettings) -> None:
        """Do nothing: this engine does not depend on lengths and batch sizes."""

    async def run(self, batch: Sequence[BatchRequest], steps: int) -> BatchResult:
        return await asyncio.to_thread(self._generate, batch, steps)

    def _generate(self, batch: Sequence[BatchRequest], steps: int) -> BatchResult:
        import torch

        padded = max(len(r.prompt_ids) for r in batch)
        pads = [padded - len(r.prompt_ids) for r in batch]
        ids = torch.tensor([[0] * pad + r.prompt_ids for pad, r in zip(pads, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (padded - pad) for pad in pads])
        ends: list[float] = []
        started_at = time.perf_counter()

        def step_ended(_ids: Any, _scores: Any, **_: Any) -> Any:
            ends.append(time.perf_counter() - started_at)
            return torch.zeros(len(batch), dtype=torch.bool)

        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=steps,
                do_sample=False,
                # No place stops early: answers are cut at their ends afterwards, so that both forms decode as defined.
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[step_ended],
            )
        return BatchResult(output[:, padded:].tolist(), started_at, ends)


def make_engine(settings: StaticSettings, path: Path) -> SimulatedEngine | TransformersEngine:
    """Return the engine of the settings. Loading takes seconds."""
    return TransformersEngine(settings, path) if settings.simulated is None else SimulatedEngine(settings, path)


def own_tokens(token_ids: Sequence[int], request: BatchRequest, eos_token_id: int | None) -> tuple[list[int], str]:
    """Return a member's part of the tokens decoded in its place, and why it ends there. The end token counts as a token."""
    own = list(token_ids[: request.max_tokens])
    if not request.ignore_eos and eos_token_id is not None and eos_token_id in own:
        return own[: own.index(eos_token_id) + 1], "stop"
    return own, "length"

"""These handlers are the batch benchmark's baseline: Beam's ``RunInference``, whose batches are fixed until their longest answer ends.

``TransformersHandler`` computes on the CPU. ``SimulatedHandler`` computes nothing but advances a clock, which Beam's own batching reads, so
that Beam chooses the same batches as on the simulated accelerator. Simulated figures contain no time of the host.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler, RunInference
from apache_beam.testing.util import assert_that, equal_to

from benchmarks.batch_lines import sizes
from benchmarks.static_batching.batches import num_steps, step_ends_s
from benchmarks.static_batching.engines import BatchRequest, TransformersEngine
from benchmarks.static_batching.settings import StaticSettings
from serve_app.checkpoints import resolve_model
from serve_app.config import default_cache_dir
from serve_app.simulated.profiles import PROFILES

MODEL = "embedded:smollm2-135m-instruct"
Line = dict[str, Any]


@dataclass
class Clock:
    """The seconds computed by the handlers of this process; ``batches`` are the sizes of their batches."""

    now_s: float = 0.0
    loaded_cpu_s: float = 0.0
    """CPU seconds of this process until its model was loaded."""
    loaded_at: float = 0.0

    def __post_init__(self) -> None:
        self.batches: list[int] = []


CLOCK = Clock()
"""The clock is a module variable because Beam pickles handlers, and the pipeline's own thread has to see its value."""


def simulated_now() -> float:
    return CLOCK.now_s


class TransformersHandler(ModelHandler[Line, int, TransformersEngine]):
    """A handler that runs ``generate`` on one thread. ``size`` None: Beam's default batching: 10 s and 5 % overhead per batch."""

    def __init__(self, size: int | None) -> None:
        super().__init__(min_batch_size=size, max_batch_size=size)

    def load_model(self) -> TransformersEngine:
        settings = StaticSettings(name="naive", model=MODEL, max_batch_size=1, max_prompt_tokens=1024, max_output_tokens=256)
        engine = TransformersEngine(settings, Path(resolve_model(MODEL, default_cache_dir())))
        CLOCK.loaded_cpu_s, CLOCK.loaded_at = time.process_time(), time.monotonic()
        return engine

    def run_inference(
        self, batch: Sequence[Line], model: TransformersEngine, inference_args: dict[str, Any] | None = None
    ) -> list[int]:
        """Return the number of tokens of each answer."""
        ids = [model.tokenizer(line["prompt"])["input_ids"] for line in batch]
        requests = [BatchRequest(i, sizes(line)[1], True, 0.0) for i, line in zip(ids, batch, strict=True)]
        CLOCK.batches.append(len(batch))
        result = asyncio.run(model.run(requests, max(request.max_tokens for request in requests)))
        return [len(found[: r.max_tokens]) for found, r in zip(result.token_ids, requests, strict=True)]


class SimulatedHandler(ModelHandler[Line, int, None]):
    """A handler that takes the times of the profile's accelerator, with vLLM's kernels instead of Transformers': only batching differs."""

    def __init__(self, profile: str, size: int | None) -> None:
        super().__init__(min_batch_size=size, max_batch_size=size)
        self._profile = profile

    def batch_elements_kwargs(self) -> dict[str, Any]:
        """Return Beam's own arguments, with this clock."""
        return {**super().batch_elements_kwargs(), "clock": simulated_now}

    def load_model(self) -> None:
        """Load nothing."""

    def run_inference(self, batch: Sequence[Line], model: None, inference_args: dict[str, Any] | None = None) -> list[int]:
        """Move the clock; return the number of tokens of each answer."""
        prompts, answers = zip(*map(sizes, batch), strict=True)
        CLOCK.batches.append(len(batch))
        CLOCK.now_s += step_ends_s(PROFILES[self._profile], prompts, num_steps("fair", answers, 0))[-1]
        return list(answers)


def run_naive(lines: Sequence[Line], handler: ModelHandler[Line, int, Any]) -> Clock:
    """Run the pipeline in this process on one thread, and return its clock."""
    CLOCK.now_s, CLOCK.batches = 0.0, []
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        tokens = pipeline | beam.Create(lines, reshuffle=False) | RunInference(handler)
        assert_that(tokens, equal_to([sizes(line)[1] for line in lines]))
    return CLOCK

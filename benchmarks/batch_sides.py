"""This command runs one side of the batch benchmark in a process of its own.

`batch.py` starts two sides: ``naive FILE SIZE PART`` and ``beam FILE URL MODEL``. The third is run by hand: ``engine FILE PART
TIME_SCALE`` is vLLM's engine alone, with all prompts from the start.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import RunInference
from apache_beam.testing.util import assert_that, equal_to

from benchmarks.batch import CONCURRENCY, PROFILE, part
from benchmarks.batch_lines import sizes
from benchmarks.batch_naive import SimulatedHandler, TransformersHandler, run_naive
from benchmarks.targets import source_of
from serve_app.batch.apache_beam import FleetModelHandler, Limits
from serve_app.config import ModelSettings
from serve_app.engine_args import engine_core_args

_BATCH = 2500
"""Examples per batch of `FleetModelHandler`: a batch ends with its slowest answer, so few large batches leave few places empty."""


def naive(file: Path, size: int, name: str) -> None:
    """Run the naive side; print seconds, CPU seconds after the model was loaded, and batches as JSON."""
    simulated = name == "simulated"
    handler = SimulatedHandler(PROFILE, size or None) if simulated else TransformersHandler(size or None)
    clock = run_naive(_lines(file), handler)
    if simulated:
        print(json.dumps({"seconds": clock.now_s, "cpu_s": None, "num_batches": len(clock.batches)}))
        return
    cpu_s = {"Beam and Transformers": time.process_time() - clock.loaded_cpu_s}
    seconds = time.monotonic() - clock.loaded_at
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "num_batches": len(clock.batches)}))


def fleet(file: Path, url: str, model: str) -> None:
    """Run the fleet's side; raise unless each line has an answer of the right length."""
    asked = _lines(file)
    handler = FleetModelHandler(
        url, model, chat=False, min_batch_size=_BATCH, max_batch_size=_BATCH, limits=Limits(concurrency=CONCURRENCY)
    )
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        predictions = pipeline | beam.Create(asked, reshuffle=False) | RunInference(handler)
        tokens = predictions | beam.Map(lambda p: p.inference["usage"]["completion_tokens"])
        assert_that(tokens, equal_to([sizes(line)[1] for line in asked]))


def engine(file: Path, name: str, time_scale: float) -> None:
    """Run the engine's side; print the seconds and CPU seconds from its first step to its last as JSON. Prompts and answers are ids."""
    from vllm import LLM, SamplingParams  # imported here: it takes seconds, and the other sides do not need it

    model = ModelSettings.model_validate(part(name, time_scale).model)
    llm = LLM(**engine_core_args(model, source_of(model)))
    for number, line in enumerate(_lines(file)):
        prompt, answer = sizes(line)
        params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0, detokenize=False)
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": [10] * prompt}, params)
    began_at, cpu_s, num_tokens = time.monotonic(), time.process_time(), 0
    while llm.llm_engine.has_unfinished_requests():
        num_tokens += sum(len(done.outputs[0].token_ids) for done in llm.llm_engine.step() if done.finished)
    spent = {"seconds": time.monotonic() - began_at, "cpu_s": time.process_time() - cpu_s}
    assert num_tokens == sum(sizes(line)[1] for line in _lines(file))
    print(json.dumps(spent))


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    match sys.argv[1:]:
        case "naive", path, number, name:
            naive(Path(path), int(number), name)
        case "beam", path, service, name:
            fleet(Path(path), service, name)
        case "engine", path, name, scale:
            engine(Path(path), name, float(scale))
        case _:
            raise SystemExit(f"error: {' '.join(sys.argv[1:])!r} is none of naive, beam and engine with their arguments")

"""One side of the batch benchmark in a process of its own: ``naive FILE SIZE PART`` or ``beam FILE URL MODEL``. `batch.py` starts it."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import RunInference
from apache_beam.testing.util import assert_that, equal_to

from benchmarks.batch import CONCURRENCY, PROFILE
from benchmarks.batch_lines import sizes
from benchmarks.batch_naive import SimulatedHandler, TransformersHandler, run_naive
from serve_app.beam import FleetModelHandler, Limits

_BATCH = 2500
"""Examples of a batch of `FleetModelHandler`: a batch ends with its slowest answer, so few and large ones leave few places empty."""


def naive(file: Path, size: int, part: str) -> None:
    """Print what it took as JSON: seconds, CPU seconds after the model was loaded, batches."""
    simulated = part == "simulated"
    handler = SimulatedHandler(PROFILE, size or None) if simulated else TransformersHandler(size or None)
    clock = run_naive(_lines(file), handler)
    if simulated:
        print(json.dumps({"seconds": clock.now_s, "cpu_s": None, "num_batches": len(clock.batches)}))
        return
    cpu_s = {"Beam and Transformers": time.process_time() - clock.loaded_cpu_s}
    seconds = time.monotonic() - clock.loaded_at
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "num_batches": len(clock.batches)}))


def fleet(file: Path, url: str, model: str) -> None:
    """Raise unless each line has its answer of the right length."""
    asked = _lines(file)
    handler = FleetModelHandler(
        url, model, chat=False, min_batch_size=_BATCH, max_batch_size=_BATCH, limits=Limits(concurrency=CONCURRENCY)
    )
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        predictions = pipeline | beam.Create(asked, reshuffle=False) | RunInference(handler)
        tokens = predictions | beam.Map(lambda p: p.inference["usage"]["completion_tokens"])
        assert_that(tokens, equal_to([sizes(line)[1] for line in asked]))


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    match sys.argv[1:]:
        case "naive", path, number, name:
            naive(Path(path), int(number), name)
        case "beam", path, service, name:
            fleet(Path(path), service, name)
        case _:
            raise SystemExit(f"error: {' '.join(sys.argv[1:])!r} is neither naive FILE SIZE PART nor beam FILE URL MODEL")

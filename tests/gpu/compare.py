"""This script compares the fleet with bare vLLM, with Python's and the Rust front end, on an NVIDIA GPU; same engine arguments.

    .venv-cuda/bin/python -m tests.gpu.compare --model ID_OR_PATH [--gpus 1] [--streams 32 256] [--rounds 3] [--out FILE]

It ran on one H100 so far, and was ended by a time limit before its table (docs/benchmarks.md). First a few greedy answers, one at a
time: a batch would change them on a GPU. They must be equal. Then the table of `benchmarks.overhead`: CPU per token, throughput, TTFT and
ITL. All engines are up at the same time and share the GPU's memory.
Exit status 0: equal answers and no failed request; 1: not so; 2: there is no GPU.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.overhead import Load, measure, table
from benchmarks.targets import Target, started
from serve_app.config import ModelSettings

EMBEDDED = "embedded:smollm2-135m-instruct"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a lighthouse by the sea,",
    "def fibonacci(n):",
    "1, 2, 3, 4, 5, 6,",
    "Water boils at a temperature of",
    "The three primary colours are",
)
SIDES = ("bare", "rust", "fleet-1")
_ANSWER_S = 120.0


def missing_device() -> str:
    """Return why nothing can be compared here, empty if it can."""
    import torch

    if torch.cuda.is_available():
        return ""
    build = f"torch {torch.__version__}"
    return f"no CUDA device found; this needs an NVIDIA GPU and vLLM's CUDA build (make .venv-cuda/.installed), here is {build}"


def model_on_gpu(
    source: str, gpus: int = 1, num_sides: int = len(SIDES), engine_args: Mapping[str, Any] | None = None
) -> ModelSettings:
    """Return a model of ``gpus`` GPUs per engine. Each has its part of 0.84 of their memory: all sides are on them together."""
    shared = {"gpu_memory_utilization": round(0.84 / num_sides, 2), "max_model_len": 2048, "max_num_seqs": 256}
    return ModelSettings.model_validate(
        {
            "name": "compared",
            "model": source,
            "device": "cuda",
            "gpus_per_replica": gpus,
            "engine_args": {**shared, **(engine_args or {})},
        }
    )


def compare(model: ModelSettings, streams: Sequence[int], rounds: int, sides: Sequence[str] = SIDES) -> dict[str, Any]:
    """Start the servers and return the report of `measure`, with every answer that differs under ``different``."""
    with tempfile.TemporaryDirectory() as name, started(model, sides, Path(name)) as targets:
        bare, fleet = targets[0], targets[-1]
        different = [both for prompt in PROMPTS if (both := _ask_both(bare, fleet, model.name, prompt)) is not None]
        return {**measure(targets, model, list(map(Load, streams)), rounds, Path(name)), "different": different}


def _ask_both(bare: Target, fleet: Target, model: str, prompt: str) -> dict[str, Any] | None:
    """Return prompt and both answers if these are not the same."""
    answers = {target.name: _answer(target, model, prompt) for target in (bare, fleet)}
    return {"prompt": prompt, **answers} if answers[bare.name] != answers[fleet.name] else None


def _answer(target: Target, model: str, prompt: str) -> tuple[str, str]:
    """Return text and finish reason of a greedy answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": 48, "temperature": 0}
    response = httpx.post(f"{target.url}/v1/completions", json=body, timeout=_ANSWER_S).raise_for_status()
    choice = response.json()["choices"][0]
    return choice["text"], choice["finish_reason"]


def problems(report: dict[str, Any]) -> list[str]:
    """Return what is wrong with the report, one line each."""
    lines = [f"another answer to {d['prompt']!r}: bare {d['bare']}, fleet {d['fleet-1']}" for d in report["different"]]
    failed = [run for run in report["runs"] if run["failed"]]
    return lines + [f"{r['failed']} requests failed at {r['target']}, {r['concurrency']} streams" for r in failed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED, help="Hugging Face id, path, or embedded:NAME")
    parser.add_argument("--gpus", type=int, default=1, help="of each engine; more than 1 is tensor parallel")
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--sides", nargs="+", default=SIDES, help="bare first, fleet-1 last; fewer leave each more memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more of vLLM's arguments for each side, as JSON")
    parser.add_argument("--out", type=Path, default=Path("results/gpu.json"))
    arguments = parser.parse_args()
    if why := missing_device():
        print(why, file=sys.stderr)
        sys.exit(2)
    model = model_on_gpu(arguments.model, arguments.gpus, len(arguments.sides), arguments.engine_args)
    report = compare(model, arguments.streams, arguments.rounds, arguments.sides)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))
    print(table(report), *problems(report), sep="\n")
    sys.exit(1 if problems(report) else 0)


if __name__ == "__main__":
    main()

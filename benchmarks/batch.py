"""This benchmark sends prompts of mixed length through fixed batches and serve-app's two batch clients: docs/benchmarks.md.

    python -m benchmarks.batch              both parts, under 15 minutes on 2 cores
    python -m benchmarks.batch real         SmolLM2-135M on the CPU, a quarter of the lengths: CPU-hours
    python -m benchmarks.batch simulated    10,000 prompts on a simulated T4 with gemma-2b: simulated GPU-hours
    python -m benchmarks.batch --draw       the tables again, from results/batch/*.json

Sides: Beam with Transformers' ``generate`` (Beam's default batching, and fixed sizes), Beam with ``FleetModelHandler``, and
``serve-app batch run``.
All sides get the same seeded lines and give the same numbers of tokens.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.batch_figures import tables
from benchmarks.batch_lines import Lengths, lines
from benchmarks.processes import cpu_by_role
from benchmarks.targets import started
from serve_app.config import ModelSettings

MODEL = "embedded:smollm2-135m-instruct"
PROFILE = "t4-gemma-2b"
SIZES = (None, 1, 8, 32, 128)
"""Batch sizes of the naive side; None is Beam's default batching."""
CONCURRENCY = 320
"""Concurrent requests: the engine runs 256 sequences, and some more wait so that no place stays empty."""
PARTS = ("simulated", "real")


@dataclass(frozen=True)
class Part:
    """One model and its amount of work."""

    name: str
    num_lines: int
    lengths: Lengths
    model: dict[str, Any]
    sizes: tuple[int | None, ...]
    time_scale: float = 1.0


@dataclass(frozen=True)
class Result:
    """The result of one side. ``cpu_s`` is by role, and None on simulated accelerators; ``seconds`` is in simulated time there."""

    side: str
    seconds: float
    cpu_s: dict[str, float] | None = None
    num_batches: int | None = None


def part(name: str, time_scale: float) -> Part:
    engine: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    if name == "simulated":
        simulated: dict[str, Any] = {"profile": PROFILE, "time_scale": time_scale, "eos_probability": 0.0}
        model: dict[str, Any] = {
            "name": "gemma-2b",
            "model": MODEL,
            "simulated": simulated,
            "engine_args": {**engine, "max_model_len": 2048},
        }
        return Part(name, 10_000, Lengths(), model, SIZES, time_scale)
    model = {"name": "smollm2-135m", "model": MODEL, "kv_cache_gib": 1.0, "engine_args": {**engine, "max_model_len": 512}}
    return Part(name, 96, Lengths().divided(4), model, (None, 8))


def run_part(chosen: Part, folder: Path, naive: list[Result]) -> list[Result]:
    """Run all sides, one after the other; ``naive`` are the known results of naive sides, which are not run again."""
    file = folder / f"{chosen.name}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines(chosen.num_lines, chosen.lengths)))
    results = naive or [_naive(chosen, size, file) for size in chosen.sizes]
    name = chosen.model["name"]
    with started(ModelSettings.model_validate(chosen.model), ["fleet-1"], folder) as (target,):
        _cli(target.url, name, _first(file, 20), folder / "warm-up.jsonl")  # not counted
        with _measured("Beam, FleetModelHandler", chosen, target.root, results):
            _child(["beam", str(file), target.url, name], folder / "beam.log")
        with _measured("serve-app batch run", chosen, target.root, results):
            _cli(target.url, name, file, folder / f"{chosen.name}-answers.jsonl")
    return results


@contextmanager
def _measured(side: str, chosen: Part, fleet: psutil.Process, results: list[Result]) -> Iterator[None]:
    """Add a result: the time of the block, the fleet's CPU time, and that of children that ended in the block."""
    before, children, began_at = cpu_by_role(fleet), _cpu_of_children(), time.monotonic()
    yield
    seconds = (time.monotonic() - began_at) / chosen.time_scale
    cpu_s = {role: spent - before.get(role, 0.0) for role, spent in cpu_by_role(fleet).items()}
    cpu_s["client"] = _cpu_of_children() - children
    results.append(Result(side, seconds, None if "simulated" in chosen.model else cpu_s))
    print(results[-1], flush=True)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _naive(chosen: Part, size: int | None, file: Path) -> Result:
    """Run the naive side in a process of its own; the loading of its model is not counted."""
    said = _child(["naive", str(file), str(size or 0), chosen.name], file.with_name("naive.log"))
    found = json.loads(said.splitlines()[-1])
    words = "Beam's default batching" if size is None else f"batches of {size}"
    result = Result(f"Beam, Transformers, {words}", found["seconds"], found["cpu_s"], found["num_batches"])
    print(result, flush=True)
    return result


def _child(arguments: Sequence[str], log: Path) -> str:
    """Run one side in a process of its own; return its output.

    Raises:
        CalledProcessError: The process failed; its log has the reason.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.batch_sides", *arguments]
    with log.open("w") as sink:
        return subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE, stderr=sink).stdout


def _cli(url: str, model: str, file: Path, output: Path) -> None:
    for left in output.parent.glob(f"{output.name}*"):
        left.unlink()
    command = [sys.executable, "-m", "serve_app.cli.main", "batch", "run", str(file), "-o", str(output), "--url", url]
    subprocess.run([*command, "--model", model, "--no-chat", "--concurrency", str(CONCURRENCY)], check=True)


def _first(file: Path, num: int) -> Path:
    part = file.with_name("warm-up.in.jsonl")
    part.write_text("".join(file.read_text().splitlines(keepends=True)[:num]))
    return part


def _naive_of(file: Path) -> list[Result]:
    found = [Result(**result) for result in json.loads(file.read_text())["results"]]
    return [result for result in found if result.num_batches is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--time-scale", type=float, default=0.3, help="of the simulated accelerator; larger on a slower machine")
    parser.add_argument("--keep-naive", action="store_true", help="take the naive sides from the last run")
    parser.add_argument("--draw", action="store_true", help="only print the tables of what was measured before")
    parser.add_argument("--out", type=Path, default=Path("results/batch"))
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"{', '.join(unknown)} is none of {', '.join(PARTS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in () if arguments.draw else arguments.parts or PARTS:
        chosen = part(name, arguments.time_scale)
        known = _naive_of(arguments.out / f"{name}.json") if arguments.keep_naive else []
        results = [asdict(result) for result in run_part(chosen, arguments.out, known)]
        measured = {"num_lines": chosen.num_lines, "lengths": asdict(chosen.lengths), "results": results}
        (arguments.out / f"{name}.json").write_text(json.dumps(measured, indent=1))
    print(tables({name: json.loads(file.read_text()) for name in PARTS if (file := arguments.out / f"{name}.json").exists()}))


if __name__ == "__main__":
    main()

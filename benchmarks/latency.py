"""This benchmark measures latency under open-loop load: the fleet beside ``vllm serve``, our load generator beside vLLM's.

``make bench-latency`` measures simulated accelerators. First, both servers get the same schedule of mixed lengths in turn, at QPS 1 and
QPS 4; the results are a table, and the CDFs of both in one figure. A run lasts until about 1,000 requests have been due (1,000 s at QPS 1),
and at least ``--seconds``. Then ``vllm bench serve`` and ``serve-app-loadtest`` load the bare server in turn, with 400 requests of the
same lengths at equal gaps, and then a server with known latencies.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from matplotlib.figure import Figure

from benchmarks.overhead import PROFILE, simulated
from benchmarks.targets import VLLM, Target, environment, source_of, started
from loadtest.control.runner import run
from loadtest.errors import ExitCode
from loadtest.judge.analysis import analyse
from loadtest.judge.compare import compare
from loadtest.judge.metrics import read_records
from loadtest.judge.summary import Distribution
from loadtest.plan.scenario import Scenario, parse_scenario
from loadtest.proof.truth.server import running
from loadtest.proof.truth.settings import Law
from loadtest.report.figures import read_run
from loadtest.report.plots import plot_cdf
from loadtest.wire.target import Target as LoadTarget
from serve_app.config import ModelSettings

QPS = (1, 4)
MIN_REQUESTS = 1000
"""Each run at QPS 1 and 4 lasts until about this many requests were due. With 86 (100 s at QPS 1) no p95 has an upper bound."""
METRICS = ("ttft", "tpot", "e2e")
CHECK_RATE, CHECK_REQUESTS, CHECK_TOKENS = 8.0, 400, 64
"""The cross-check's requests per second, requests, and tokens of prompt and of answer."""
MAX_TRIES = 3
CHECK_S = CHECK_REQUESTS / CHECK_RATE
KNOWN = Law.model_validate({"ttft": {"law": "constant", "s": 0.015}, "gap": {"law": "constant", "s": 0.0066}})
"""The law of a server without vLLM, so that any further latency is added by the measuring side."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    lasts = (
        f"least time of each run at QPS 1 and 4, after a warm-up of 10 s; {MIN_REQUESTS:,} requests / QPS where that is longer"
    )
    parser.add_argument("--seconds", type=float, default=180.0, help=lasts)
    parser.add_argument("--rounds", type=int, default=3, help="of the cross-check")
    parser.add_argument("--out", type=Path, default=Path("results/latency"))
    arguments = parser.parse_args()
    out = arguments.out / time.strftime("%Y%m%d-%H%M%S")
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        model = simulated(Path(name))
        with started(model, ["bare", "fleet-1"], Path(name)) as targets:
            for qps in QPS:
                runs = [_run(mixed(qps, arguments.seconds), target, out) for target in targets]
                valid = [run for run in runs if run is not None]
                print(f"\n{latency_table(qps, valid)}", flush=True)
                if len(valid) == len(runs):
                    print(f"\n{chr(10).join(compare(valid[1], valid[0]).lines())}", flush=True)
                    draw(qps, valid, out)
            print(f"\n{cross_check(targets[0], model.name, model, arguments.rounds, out)}", flush=True)
            with running(KNOWN, log=out / "truth.jsonl") as url:
                truth = Target("truth", url, psutil.Process())
                print(f"\n{cross_check(truth, 'truth', model, arguments.rounds, out)}")


def mixed(qps: float, seconds: float) -> Scenario:
    """Prompts of 1 to 512 tokens, answers of exponential length: the latency test of the static batching study.

    The run lasts ``seconds``, or as long as `MIN_REQUESTS` take, after a warm-up of 10 s.
    """
    lengths = {
        "input_tokens": {"dist": "uniform", "max": 512},
        "output_tokens": {"dist": "exponential", "mean": 128, "max": 500},
    }
    return _scenario(f"qps-{qps:g}", qps, max(seconds, MIN_REQUESTS / qps) + 10, 10.0, lengths)


def _scenario(
    name: str, rate: float, duration_s: float, warmup_s: float, lengths: dict[str, Any], seed: int = 1, law: str = "poisson"
) -> Scenario:
    values = {"name": name, "seed": seed, "arrival": {"law": law, "rate": rate}, "requests": [lengths]}
    return parse_scenario({**values, "duration_s": duration_s, "warmup_s": warmup_s, "keep_text": False})


def _run(scenario: Scenario, target: Target, out: Path) -> Path | None:
    """Run until the generator is healthy, at most three times; return that run's folder, or None if it was never healthy."""
    for attempt in range(1, MAX_TRIES + 1):
        folder = out / f"{scenario.name}-{target.name}-{attempt}"
        if run(scenario, LoadTarget(target.url), folder, command=["make", "bench-latency"]) is not ExitCode.INVALID:
            return folder
    print(f"no figures of {scenario.name} on {target.name}: {MAX_TRIES} invalid runs, whose reports say why")
    return None


def latency_table(qps: float, runs: Sequence[Path]) -> str:
    """Return Markdown: medians and tails with intervals, in ms from the due time; ``?`` if too few requests bound a value."""
    rows = [f"| QPS {qps:g} | n | failed | metric | p50 | p90 | p95 | p99 |", "|---|---|---|---|---|---|---|---|"]
    for folder in runs:
        summary = analyse(folder)
        for metric in METRICS:
            d = summary.distributions[metric]
            cells = " | ".join(_cell(d, q) for q in (0.5, 0.9, 0.95, 0.99))
            rows.append(f"| {folder.name} | {d.n} | {d.num_failed} | {metric} | {cells} |")
    return "\n".join(rows)


def _cell(distribution: Distribution, q: float) -> str:
    found = distribution.at(q)
    assert found is not None
    low, value, high = ("?" if s is None else f"{s * 1000:.1f}" for s in (found.low_s, found.value_s, found.high_s))
    return f"{value} [{low}, {high}]"


def draw(qps: float, runs: Sequence[Path], out: Path) -> None:
    """Draw the CDFs of all runs, one panel per metric, into ``cdf-qps-<qps>.png``."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for ax, metric in zip(figure.subplots(1, len(METRICS)), METRICS, strict=True):
        for color, folder in enumerate(runs):
            name = "bare vLLM" if "-bare-" in folder.name else "serve-app, 1 replica"
            plot_cdf(ax, read_run(folder, analyse(folder)).sample(metric, label=name), color=color)
        ax.set_xlabel(metric.upper())
    figure.suptitle(f"QPS {qps:g}, Poisson arrivals, simulated accelerator {PROFILE}", fontsize=10)
    figure.savefig(out / f"cdf-qps-{qps:g}.png", dpi=110)


def cross_check(target: Target, name: str, model: ModelSettings, rounds: int, out: Path) -> str:
    """Load the server with both generators in turn; return Markdown with medians over the valid rounds, and their ratio."""
    theirs, ours = [], []
    for seed in range(rounds):
        exact = {"input_tokens": {"mean": CHECK_TOKENS}, "output_tokens": {"mean": CHECK_TOKENS}, "prompt": "text"}
        their_figures = _vllm_bench(target, name, model, seed, out)
        own = _run(_scenario(f"cross-check-{seed}", CHECK_RATE, CHECK_S, 0.0, exact, seed, law="constant"), target, out)
        if own is not None:
            theirs.append(their_figures)
            ours.append(_figures(own))
    rows = [f"| {target.name} | vllm bench serve | serve-app-loadtest | ratio | within 5 % |", "|---|---|---|---|---|"]
    for figure in ours[0] if ours else ():
        a, b = (statistics.median(each[figure] for each in side) for side in (theirs, ours))
        rows.append(f"| {figure} | {a:.2f} | {b:.2f} | {b / a:.3f} | {'yes' if abs(b / a - 1) <= 0.05 else 'no'} |")
    return "\n".join(rows)


def _vllm_bench(target: Target, name: str, model: ModelSettings, seed: int, out: Path) -> dict[str, float]:
    result = out / f"vllm-bench-{target.name}-{seed}.json"
    command = [*VLLM, "bench", "serve", "--base-url", target.url, "--model", name, "--tokenizer", source_of(model)]
    command += ["--dataset-name", "random", "--random-input-len", str(CHECK_TOKENS), "--random-output-len", str(CHECK_TOKENS)]
    command += ["--ignore-eos", "--num-prompts", str(CHECK_REQUESTS), "--request-rate", str(CHECK_RATE), "--seed", str(seed)]
    command += ["--burstiness", "1e6"]  # equal gaps: with random gaps the generators would send different loads
    command += ["--num-warmups", "0", "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl,e2el"]
    command += ["--save-result", "--result-filename", str(result)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment(model)})
    found = json.loads(result.read_text())
    requests = found["completed"] / found["duration"]
    return {
        "requests/s": requests,
        "output tokens/s": found["output_throughput"],
        "mean TTFT ms": found["mean_ttft_ms"],
        "median TTFT ms": found["median_ttft_ms"],
        "mean TPOT ms": found["mean_tpot_ms"],
        "mean ITL ms": found["mean_itl_ms"],
        "median E2E ms": found["median_e2el_ms"],
    }


def _figures(run: Path) -> dict[str, float]:
    """Return our figures by vLLM's definitions: latencies from sending, rates over arrivals and the drain after them."""
    found, rows = analyse(run).distributions, read_records(run).rows
    span_s = max(row.end_s or 0.0 for row in rows) - min(row.due_s for row in rows)
    median = {name: next(q.value_s or 0.0 for q in found[name].quantiles if q.q == 0.5) * 1000 for name in found}
    return {
        "requests/s": sum(row.state == "ok" for row in rows) / span_s,
        "output tokens/s": sum(row.output_tokens or 0 for row in rows) / span_s,
        "mean TTFT ms": (found["send_ttft"].mean_answered_s or 0.0) * 1000,
        "median TTFT ms": median["send_ttft"],
        "mean TPOT ms": (found["tpot"].mean_answered_s or 0.0) * 1000,
        "mean ITL ms": (found["itl"].mean_answered_s or 0.0) * 1000,
        "median E2E ms": median["send_e2e"],
    }


if __name__ == "__main__":
    main()

"""`serve-app plan --pd TRACE` says whether prefill and decode apart would pay for a trace: simulated, with a table and a plot."""

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from serve_app.cli.startable import refuse_missing_vllm
from serve_app.engine_args import PROCESS_ENVIRONMENT
from serve_app.errors import ConfigError
from serve_app.planning.comparison import Comparison, Figures, Hardware, Limits, Side, sides_of
from serve_app.planning.engines import ENVIRONMENT
from serve_app.planning.plot import svg
from serve_app.planning.trace import TraceRequest, read_trace
from serve_app.planning.verdict import Verdict, median, shown_s, verdict
from serve_app.simulated.profiles import PROFILES
from serve_app.simulated.transfer import LINKS
from serve_app.sizing.fits import batch_defaults

WIDTH = 160
"""Most characters of a line of the table."""
MAX_LIMIT_S = 3600.0


def plan(
    trace: Path,
    *,
    profile: str,
    gpus: int,
    replicas: int,
    link: str,
    limits: tuple[float, float],
    seconds: float,
    seeds: int,
    step_tokens: int | None,
    plot: Path,
    as_json: bool,
) -> None:
    """Run `serve-app plan --pd`."""
    _refuse_unknown("--profile", profile, PROFILES)
    _refuse_unknown("--link", link, LINKS)
    for option, limit in zip(("--ttft-slo-s", "--itl-slo-s"), limits, strict=True):
        if not 0 < limit <= MAX_LIMIT_S:
            raise ConfigError(option, f"is {limit:g}", f"give seconds above 0, at most {MAX_LIMIT_S:,.0f}")
    default_tokens, max_num_seqs = batch_defaults(PROFILES[profile].accelerator)
    step_tokens = step_tokens or default_tokens
    hardware = Hardware(
        profile=profile,
        num_accelerators=gpus,
        replicas=replicas,
        link=link,
        max_num_batched_tokens=step_tokens,
        max_num_seqs=min(max_num_seqs, step_tokens),
    )
    requests, kept = read_trace(trace, seconds), Limits(*limits)
    comparison = Comparison(hardware, requests, kept)
    refuse_missing_vllm()
    _refuse_unwritable(plot)
    sides = sides_of(replicas, kept)
    found = _played(comparison, sides, range(1, seeds + 1))
    judged = verdict(found)
    what = _what(trace, requests, hardware, found, seeds)
    try:
        plot.write_text(svg(found, judged, kept, what), encoding="utf-8")
    except OSError as exc:
        raise _unwritable(plot, exc) from exc
    if as_json:
        typer.echo(json.dumps(_as_json(found, judged, hardware, kept, sides), indent=2))
        return
    typer.echo(f"Simulated: {what}.")
    _print_table(found, kept)
    typer.echo(judged.sentence)
    if judged.set is not None:
        side = next(side for side in sides if side.name == judged.set)
        typer.echo(f"Set models.NAME: {{{side.configuration}, {simulated_settings(hardware, kept)}}}")
    typer.echo(f"plot: {plot}")


def _played(comparison: Comparison, sides: Sequence[Side], seeds: Sequence[int]) -> dict[str, list[Figures]]:
    """Return the figures of each side, one for each seed. Progress goes to standard error."""
    os.environ.update(PROCESS_ENVIRONMENT | ENVIRONMENT)
    found: dict[str, list[Figures]] = {side.name: [] for side in sides}
    with _vllm_is_quiet(), comparison:
        for seed in seeds:
            for side in sides:
                began = time.monotonic()
                found[side.name].append(comparison.play(side, seed))
                typer.echo(f"simulated {side.name}, seed {seed}, in {time.monotonic() - began:.0f} s", err=True)
    return found


@contextlib.contextmanager
def _vllm_is_quiet() -> Iterator[None]:
    """Keep vLLM's warnings off the terminal: the checkpoint, its context and the device are not the user's."""
    logger = logging.getLogger("vllm")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _what(trace: Path, requests: Sequence[TraceRequest], hardware: Hardware, found: Mapping[str, Any], seeds: int) -> str:
    """Return in one line what was simulated."""
    rate = median(next(iter(found.values())), lambda run: run.requests_per_s)
    shared = "" if any(each.blocks for each in requests) else ", of which no two share tokens"
    gpus = f"{hardware.num_accelerators} x " if hardware.num_accelerators > 1 else ""
    return (
        f"{trace.name}, {len(requests):,} requests in {requests[-1].due_s:.0f} s ({rate:.1f}/s{shared}), on {hardware.replicas} replicas "
        f"of {gpus}{hardware.profile}, link {hardware.link}, steps of {hardware.max_num_batched_tokens:,} tokens, "
        f"{seeds} seed{'s' if seeds > 1 else ''}"
    )


def simulated_settings(hardware: Hardware, limits: Limits) -> str:
    """Return the other keys of the model that the simulated replicas had. The configuration's defaults may differ."""
    count = hardware.replicas
    return (
        f"replicas: {{min: {count}, max: {count}, ttft_slo_s: {limits.ttft_s:g}, itl_slo_s: {limits.itl_s:g}}}, "
        f"gpus_per_replica: {hardware.num_accelerators}, engine_args: {{scheduling_policy: priority, "
        f"max_num_batched_tokens: {hardware.max_num_batched_tokens}, max_num_seqs: {hardware.max_num_seqs}}}"
    )


def _print_table(found: Mapping[str, Sequence[Figures]], limits: Limits) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    good = f"goodput/s (TTFT {shown_s(limits.ttft_s)}, ITL {shown_s(limits.itl_s)})"
    for column in ("side", good, "TTFT p50", "TTFT p99", "ITL p99", "KV moved"):
        table.add_column(column)
    for name, runs in found.items():
        goods = [run.good_per_s for run in runs]
        spread = f" ({min(goods):.1f} to {max(goods):.1f})" if len(runs) > 1 else ""
        table.add_row(
            name,
            f"{median(runs, lambda run: run.good_per_s):.1f}{spread}",
            shown_s(median(runs, lambda run: run.ttft_p50_s)),
            shown_s(median(runs, lambda run: run.ttft_p99_s)),
            shown_s(median(runs, lambda run: run.itl_p99_s)),
            f"{median(runs, lambda run: run.moved_bytes) / 1e9:.1f} GB",
        )
    Console(highlight=False, markup=False, width=WIDTH).print(table)


def _as_json(
    found: Mapping[str, Sequence[Figures]], judged: Verdict, hardware: Hardware, limits: Limits, sides: Sequence[Side]
) -> dict[str, Any]:
    """Return all figures; a list has one entry for each seed."""
    return {
        "simulated": True,
        "hardware": dataclasses.asdict(hardware),
        "limits": dataclasses.asdict(limits),
        "sides": {
            side.name: {"configuration": side.configuration, "runs": [dataclasses.asdict(run) for run in found[side.name]]}
            for side in sides
        },
        "verdict": dataclasses.asdict(judged),
    }


def _refuse_unknown(option: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise ConfigError(option, f"{name!r} is not known", f"known are {', '.join(known)}")


def _refuse_unwritable(plot: Path) -> None:
    """Refuse a plot that cannot be written, before the simulation, which takes minutes. Until it ends no file is changed or stays."""
    is_new = not plot.exists()
    try:
        with plot.open("ab"):
            pass
        if is_new:
            plot.resolve().unlink()  # the user may end the simulation
    except OSError as exc:
        raise _unwritable(plot, exc) from exc


def _unwritable(plot: Path, exc: OSError) -> ConfigError:
    return ConfigError("--plot", f"{plot} cannot be written: {exc.strerror}", "give another file")

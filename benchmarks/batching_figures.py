"""This module makes the tables and figures of the batching benchmark from the records on disk alone."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from benchmarks.batching_records import Run, read_results, read_rounds
from benchmarks.batching_setups import CONTINUOUS, PAPER_BATCH, SYSTEMS, Setup
from benchmarks.batching_theory import LengthLaw, plain_multiple, rows_of
from loadtest.judge import stats
from loadtest.report.plots import GRID, INK, MUTED, SERIES, STYLE, Sample, plot_cdf

Entry = dict[str, Any]
Runs = Sequence[tuple[Entry, Run]]
COLOUR = dict(zip(SYSTEMS, (SERIES[3], SERIES[1], SERIES[4], SERIES[0]), strict=True))
RATIOS = ((CONTINUOUS, "paper static"), (CONTINUOUS, "fair static"), (CONTINUOUS, "naive"), ("fair static", "paper static"))
"""Pairs of systems whose ratio of throughputs is given with an interval."""
PUBLISHED = ((4, "FasterTransformer"), (8, "TGI, Ray Serve"), (23, "vLLM"))
"""Multiples over naive static batching at cap 1,536 in the study."""


def draw(setup: Setup, folder: Path) -> str:
    """Write the figures as PNG and SVG and report.json into the folder; return the tables as Markdown."""
    rounds = read_rounds(folder)
    runs, bursts = rounds[0], [burst_table(setup, each) for each in rounds if _has_bursts(setup, each)]
    tables = {
        "burst": bursts[0] if bursts else [],
        "multiples": multiples_table(setup, bursts) if bursts else [],
        "latency": latency_table(rounds),
        "rate": rate_table(rounds),
    }
    results = read_results(folder)
    head = {name: results.get(name, "not recorded") for name in ("commit", "date")}
    report: dict[str, Any] = {**head, **tables, "alone": alone_words(runs)}
    runs = [(entry, run) for entry, run in runs if not entry["problems"]]
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    style: Any = STYLE  # matplotlib's type lists the keys
    with mpl.rc_context(style):
        if bursts:
            figure, (left, right) = _figure(2, height=3.6)
            plot_multiples(left, setup, report["burst"])
            plot_kv(right, setup, report["burst"])
            _save(figure, folder / "throughput")
        rates = sorted({entry["nominal_qps"] for entry, _ in runs if entry["kind"] == "latency"})
        if rates:
            figure, axes = _figure(len(rates), height=4.0)
            for ax, qps in zip(axes, rates, strict=True):
                plot_latencies(ax, [(e, r) for e, r in runs if e["kind"] == "latency" and e["nominal_qps"] == qps], setup, qps)
            _save(figure, folder / "latency")
        if _valid(report["rate"]):
            figure, axes = _figure(1, height=3.6, width=6)
            plot_rates(axes[0], report["rate"], setup)
            _save(figure, folder / "rates")
        figure, axes = _figure(3, height=4.2, sharex=True)
        if plot_occupancy(axes, setup, runs, cap=512 if 512 in setup.caps else setup.caps[-1]):
            _save(figure, folder / "occupancy")
    return _markdown(setup, report)


def _has_bursts(setup: Setup, runs: Runs) -> bool:
    """Return whether a round has all bursts: a round that was ended early counts in no ratio."""
    return {(e["cap"], e["system"]) for e, _ in runs if e["kind"] == "burst"} >= set(product(setup.caps, SYSTEMS))


def _figure(columns: int, *, height: float, width: float = 11, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False, **options)[0]


def _save(figure: Figure, path: Path) -> None:
    for kind, options in (("png", {"dpi": 110}), ("svg", {"metadata": {"Date": None}})):
        figure.savefig(path.with_suffix(f".{kind}"), **options)


def burst_table(setup: Setup, runs: Runs) -> list[Entry]:
    """Return one row per cap and system: throughput, its multiple over paper static, and the value from first principles."""
    rows = []
    bursts = {(e["cap"], e["system"]): (e, run) for e, run in runs if e["kind"] == "burst"}
    for cap in setup.caps:
        law = LengthLaw(setup.mean_tokens, setup.cap(cap))
        paper, paper_run = bursts[cap, "paper static"]
        for system in SYSTEMS:
            entry, run = bursts[cap, system]
            rows.append({"cap": setup.cap(cap), "study_cap": cap, "system": system, **_of_entry(entry)})
            if entry["problems"]:
                continue
            row, batch = rows[-1], entry.get("batch_size") or run.num_running()
            row |= {"batch": batch, "failed": len(run.rows) - len(run.answered)}
            row |= {"output_tokens_per_s": run.per_s("output_tokens"), "total_tokens_per_s": run.per_s("total_tokens")}
            row["multiple"] = None if paper["problems"] else run.per_s("total_tokens") / paper_run.per_s("total_tokens")
            row |= {"kv": run.kv(setup.kv_tokens, simulated=bool(setup.profile)), "equal_steps": 1.0, "waste": 1.0}
            if system != CONTINUOUS:
                row["waste"] = law.waste(int(batch), setup.num_burst if system == "paper static" else None)
            if system != "paper static":
                bounds = (PAPER_BATCH[cap], setup.num_burst)
                row["equal_steps"] = plain_multiple(law, batch, *bounds, own_max=system != CONTINUOUS)
            row["seconds"], row["planned_s"] = run.length_s, entry.get("planned_s") or None
    return rows


def multiples_table(setup: Setup, bursts: Sequence[Sequence[Entry]]) -> list[Entry]:
    """Return one row per cap: each ratio of `RATIOS` of prompt and output tokens/s, in every round with two valid runs."""
    rows = []
    for cap in setup.caps:
        rates = [{row["system"]: row["total_tokens_per_s"] for row in _valid(each) if row["study_cap"] == cap} for each in bursts]
        ratios = {f"{a} / {b}": [each[a] / each[b] for each in rates if a in each and b in each] for a, b in RATIOS}
        rows.append({"cap": setup.cap(cap), **ratios})
    return rows


def _of_entry(entry: Entry) -> Entry:
    return {name: entry[name] for name in ("num", "time_scale", "problems", "tries")}


def _valid(table: Sequence[Entry]) -> list[Entry]:
    """Return the rows that have figures."""
    return [row for row in table if not row["problems"]]


def alone_words(runs: Runs) -> list[str]:
    """Return a line on the engine's share of the multiple, without batching: both servers with one request at a time."""
    valid = [(entry, run) for entry, run in runs if not entry["problems"]]
    found = [run for entry, run in valid if entry["kind"] == "alone"]
    naive = [run for entry, run in valid if (entry["kind"], entry["system"], entry["cap"]) == ("burst", "naive", 1536)]
    if not found or not naive:
        return []
    engine, transformers = found[0].per_s("output_tokens"), naive[0].per_s("output_tokens")
    rates = f"vLLM {engine:.1f} output tok/s, Transformers {transformers:.1f}"
    return [f"The same requests one at a time: {rates}, so {engine / transformers:.2f}x is the engine's own, without batching."]


def latency_table(rounds: Sequence[Runs]) -> list[Entry]:
    """Return one row per rate and system: the median of each valid round with its own interval, in seconds."""
    rows = []
    for entries in _by(rounds, "latency", "nominal_qps"):
        row, valid = _row(entries), [run for entry, run in entries if not entry["problems"]]
        if valid:
            row |= {name: [run.median_s(name.removesuffix("_s")) for run in valid] for name in ("e2e_s", "ttft_s")}
            row |= {"num": sum(len(run.rows) for run in valid), "failed": sum(len(r.rows) - len(r.answered) for r in valid)}
        rows.append(row)
    return sorted(rows, key=lambda r: (r["nominal_qps"], SYSTEMS.index(r["system"])))


def rate_table(rounds: Sequence[Runs]) -> list[Entry]:
    """Return one row per system and offered rate: tokens per second in each valid round."""
    rows = []
    for entries in _by(rounds, "rate", "share"):
        row = _row(entries)
        if valid := [run.window_tokens_per_s(entry["window_s"]) for entry, run in entries if not entry["problems"]]:
            row["output_tokens_per_s"], row["total_tokens_per_s"] = map(list, zip(*valid, strict=True))
        rows.append(row)
    return sorted(rows, key=lambda r: (SYSTEMS.index(r["system"]), r["qps"]))


def _by(rounds: Sequence[Runs], kind: str, what: str) -> Iterable[Runs]:
    """Return the runs of one kind, grouped over all rounds by system and the value of ``what``."""
    found = defaultdict[Any, list[tuple[Entry, Run]]](list)
    for entry, run in chain.from_iterable(rounds):
        if entry["kind"] == kind:
            found[entry["system"], entry.get(what, entry["nominal_qps"])].append((entry, run))
    return found.values()


def _row(entries: Runs) -> Entry:
    """Return one entry for all rounds of an experiment. It has problems if no round is valid."""
    first = next((entry for entry, _ in entries if not entry["problems"]), entries[0][0])
    rates = {name: float(np.mean([entry[name] for entry, _ in entries])) for name in ("qps", "nominal_qps")}
    return {"system": first["system"], **rates, **_of_entry(first)}


_ABOVE: dict[str, Any] = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "frameon": False,
    "fontsize": 7,
    "borderaxespad": 0,
    "columnspacing": 1.0,
}


def plot_multiples(ax: Axes, setup: Setup, table: Sequence[Entry]) -> None:
    """Draw the throughput over paper static on a log scale; diamonds are first principles, lines are the study's values."""
    for index, system in enumerate(SYSTEMS):
        rows = [row for row in _valid(table) if row["system"] == system and row["multiple"]]
        at = np.array([setup.caps.index(row["study_cap"]) for row in rows]) + (index - 1.5) * 0.2
        bars = ax.bar(at, [r["multiple"] for r in rows], 0.19, color=COLOUR[system], label=system, bottom=0)
        ax.bar_label(bars, [f"{r['multiple']:.1f}" if r["multiple"] < 10 else f"{r['multiple']:.0f}" for r in rows], fontsize=7)
        if system in ("fair static", CONTINUOUS):
            label = "equal steps (theory)" if system == CONTINUOUS else None
            ax.plot(at, [r["equal_steps"] for r in rows], "D", color=INK, markersize=4, fillstyle="none", label=label)
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 7}
    for multiple, who in PUBLISHED if setup.profile else ():
        ax.axhline(multiple, color=MUTED, linestyle=":", linewidth=1)
        ax.annotate(f"{who} at cap 1,536: {multiple}x (published)", (0.01, multiple), (0, 1), **place)
    caps = setup.caps
    ax.set(yscale="log", ylabel="tokens/s over paper static", xlabel="cap of the output length [tokens]")
    ax.set_xticks(range(len(caps)), [str(setup.cap(c)) for c in caps])
    ax.set_ylim(0.25, 70)
    ax.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    ax.minorticks_off()
    ax.axhline(1, color=MUTED, linewidth=1)
    ax.legend(ncols=5, **_ABOVE)
    ax.set_title(f"{setup.name}: burst of {setup.num_burst}, prompt and output tokens", pad=20)


def plot_kv(ax: Axes, setup: Setup, table: Sequence[Entry]) -> None:
    """Draw the KV memory while requests wait: used, reserved but unused, free."""
    for index, system in enumerate(SYSTEMS):
        rows = [row for row in _valid(table) if row["system"] == system]
        at = np.array([setup.caps.index(row["study_cap"]) for row in rows]) + (index - 1.5) * 0.2
        reserved = np.array([r["kv"]["reserved"] for r in rows]) * 100
        used = np.array([r["kv"]["used"] for r in rows]) * 100
        ax.bar(at, reserved, 0.19, color=COLOUR[system], alpha=0.3)
        ax.bar(at, used, 0.19, color=COLOUR[system], label=system)
        for x, top, share in zip(at, reserved, 1 - used / reserved, strict=True):
            ax.annotate(f"{share:.0%}", (x, top), (0, 2), textcoords="offset points", fontsize=7, ha="center")
    ax.set_xticks(range(len(setup.caps)), [str(setup.cap(c)) for c in setup.caps])
    ax.set(xlabel="cap of the output length [tokens]", ylabel="share of the KV memory [%]", ylim=(0, 118))
    ax.legend(ncols=4, **_ABOVE)
    ax.annotate("published waste: 60-80 % static, < 4 % vLLM", (0.01, 0.95), xycoords="axes fraction", fontsize=7)
    ax.set_title("KV memory: used, and wasted (light, with its share)", pad=20)


def plot_latencies(ax: Axes, runs: Runs, setup: Setup, qps: float) -> None:
    """Draw the end-to-end latency from the due time, one curve per system."""
    for entry, run in sorted(runs, key=lambda pair: SYSTEMS.index(pair[0]["system"])):
        values = run.latencies_s("e2e")
        known = np.sort(values[np.isfinite(values)])
        label = f"{entry['system']}, median {_seconds(run.median_s('e2e')[0])} s"
        sample = Sample(label, known, values.size - known.size, stats.effective_size(values, 0.5))
        plot_cdf(ax, sample, color=SERIES.index(COLOUR[entry["system"]]))
    offered = f"{qps:g} requests/s" if setup.profile else f"{runs[0][0]['qps']:.2f} requests/s ({qps:g}/8 of capacity)"
    ax.set(xlabel=f"latency at {offered}, from due time to end")


def plot_rates(ax: Axes, table: Sequence[Entry], setup: Setup) -> None:
    """Draw throughput against the offered rate, both on log scales."""
    table = _valid(table)
    for system in SYSTEMS:
        rows = [row for row in table if row["system"] == system]
        means = [np.mean(r["total_tokens_per_s"]) for r in rows]
        ax.plot([r["qps"] for r in rows], means, "o-", color=COLOUR[system], label=system)
    per_request = setup.input_tokens / 2 + LengthLaw(setup.mean_tokens, setup.cap(1536)).expected_max(1)
    line = np.array([min(row["qps"] for row in table), max(row["qps"] for row in table)])
    ax.plot(line, line * per_request, "--", color=MUTED, linewidth=1, label="all that is offered")
    ax.set(xscale="log", yscale="log", xlabel="offered [requests/s]", ylabel="prompt and output tokens/s")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    ax.legend(loc="upper left")
    ax.set_title(f"{setup.name}: throughput against offered load")


def plot_occupancy(axes: Sequence[Axes], setup: Setup, runs: Runs, *, cap: int) -> bool:
    """Draw which request runs in which place of the batch when, by timestamps of servers (static) and client (continuous).

    If not all three were measured, draw nothing and return False.
    """
    found = {e["system"]: run for e, run in runs if e["kind"] == "burst" and e["cap"] == cap}
    if not {"paper static", "fair static", CONTINUOUS} <= found.keys():
        return False
    panels = {s: _static_bars(found[s]) for s in ("paper static", "fair static")} | {
        CONTINUOUS: _continuous_bars(found[CONTINUOUS])
    }
    length = 2.2 * min(end - start for _, start, _, end in panels["paper static"])
    for ax, (system, bars) in zip(axes, panels.items(), strict=True):
        # From a quarter of the run on: all requests have arrived, and a free place always finds a request.
        begin = min(start for _, start, *_ in bars if start >= max(end for *_, end in bars) / 4)
        inside = [(row, *(min(max(t - begin, 0.0), length) for t in times)) for row, *times in bars]
        inside = [bar for bar in inside if bar[1] < bar[3]]
        for number, (row, start, own, end) in enumerate(inside):
            ax.barh(row, end - start, left=start, height=0.85, color=GRID)
            ax.barh(row, own - start, left=start, height=0.85, color=SERIES[number % len(SERIES)])
        useful = sum(own - start for _, start, own, _ in inside)
        places = max(row for row, *_ in inside) + 1
        done = sum(0 < own < length for _, _, own, _ in inside)
        ax.set(xlim=(0, length), xlabel="seconds", ylim=(places - 0.4, -0.6))
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(visible=False)
        ax.set_title(f"{system}: {places} places, {useful / places / length:.0%} in use, {done} answers")
    axes[0].set_ylabel(f"place in the batch, {setup.name}, cap {setup.cap(cap)}")
    return True


Bar = tuple[int, float, float, float]
"""A bar: place, start, own end, end of the batch, in the setup's seconds from the first due time."""


def _static_bars(run: Run) -> list[Bar]:
    """Return the bars by the server's timestamps."""
    epoch, scale, bars = run.records.manifest.epoch_unix_s, run.time_scale, list[Bar]()
    for batch in run.batches:
        start, ends = (batch.started_unix_s - epoch) / scale, batch.step_ends_s
        for place, member in enumerate(batch.members):
            bars.append((place, start, start + ends[member.output_tokens - 1] / scale, start + ends[-1] / scale))
    return bars


def _continuous_bars(run: Run) -> list[Bar]:
    """Return the bars by the client's timestamps. The client does not see the prefill: a bar begins with the first token."""
    lives = sorted(run.lives(), key=lambda life: life.first_s)
    rows = rows_of([(life.first_s, life.end_s) for life in lives])
    return [(row, x.first_s, x.end_s, x.end_s) for row, x in zip(rows, lives, strict=True)]


def _markdown(setup: Setup, report: dict[str, Any]) -> str:
    lines = [f"### {setup.name}", "", f"Measured {report['date']}, commit {report['commit']}.", ""]
    heads = ["cap", "system", "batch", "requests", "output tok/s", "total tok/s", "x paper static", "equal steps", "waste"]
    lines += _head([*heads, "KV reserved", "KV used of it", "time_scale"])
    for r in report["burst"]:
        cells = _invalid(r, 8) or [
            f"{r['batch']:.0f}", str(r["num"]), f"{r['output_tokens_per_s']:.1f}", f"{r['total_tokens_per_s']:.0f}",
            f"{r['multiple']:.2f}" if r["multiple"] else "", f"{r['equal_steps']:.1f}", f"{r['waste']:.2f}",
            f"{r['kv']['reserved']:.0%}", f"{r['kv']['used'] / r['kv']['reserved']:.1%}",
        ]  # fmt: skip
        lines.append(_line([str(r["cap"]), r["system"], *cells, f"{r['time_scale']:g}"]))
    lines += ["", *(_head(list(report["multiples"][0])) if report["multiples"] else [])]
    lines += [_line([str(row["cap"]), *(_ratio(row[f"{a} / {b}"]) for a, b in RATIOS)]) for row in report["multiples"]]
    latency = ["requests/s", "system", "requests", "median latency s (95 %)", "median TTFT s (95 %)", "time_scale"]
    lines += ["", *report["alone"], "", *(_head(latency) if report["latency"] else [])]
    for r in report["latency"]:
        cells = _invalid(r, 2) or [str(r["num"]), *(_medians(r[name]) for name in ("e2e_s", "ttft_s"))]
        lines.append(_line([f"{r['qps']:.3g}", r["system"], *cells, f"{r['time_scale']:g}"]))
    lines += ["", *(_head(["system", "offered requests/s", "output tok/s", "total tok/s"]) if report["rate"] else [])]
    for r in report["rate"]:
        cells = _invalid(r, 1) or [_mean(r[name]) for name in ("output_tokens_per_s", "total_tokens_per_s")]
        lines.append(_line([r["system"], f"{r['qps']:.2f}", *cells]))
    return "\n".join([*lines, ""])


def _invalid(row: Entry, num_empty: int) -> list[str]:
    """Return the cells of a row without figures, all empty but the first; an empty list for a row with figures."""
    return [f"invalid {row['tries']} of {row['tries']}", *[""] * num_empty] if row["problems"] else []


def _medians(medians: Sequence[tuple[float | None, float | None, float | None]]) -> str:
    """Return the geometric mean of the rounds' medians as `_ratio` does; for a single round, its own interval.

    There is no mean if a round has no median because half of its requests failed.
    """
    if len(medians) == 1:
        return "{} ({}-{})".format(*map(_seconds, medians[0]))
    known = [value for value, _, _ in medians if value is not None]
    return _ratio(known) if len(known) == len(medians) else f"?, known in {len(known)} of {len(medians)} rounds"


def _mean(values: Sequence[float]) -> str:
    """Return the mean over the rounds, its 95 % interval by Student's law, and the number of rounds."""
    if len(values) < 2:
        return f"{values[0]:.0f}, one round"
    mean, low, high = stats.mean_interval(np.array(values))
    return f"{mean:.0f} ({max(0.0, low):.0f}-{high:.0f}), {len(values)} rounds"


def _ratio(values: Sequence[float]) -> str:
    """Return the geometric mean over the rounds, its 95 % interval by Student's law, and the number of rounds."""
    if len(values) < 2:
        return f"{values[0]:.2f}, one round" if values else ""
    mean, low, high = np.exp(stats.mean_interval(np.log(values)))
    return f"{mean:.2f} ({low:.2f}-{high:.2f}), {len(values)} rounds"


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _head(names: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]

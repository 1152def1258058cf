"""The report of a run is one self-contained HTML page, its figures as files, and summary.json.

The page is a function of the records alone: the same files give the same bytes. The template escapes text of the target and of the
scenario; the page of an invalid run has gates and diagnostics, and no number that could be quoted.
"""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from loadtest.audit.audit import AuditResult, audit
from loadtest.audit.findings import KINDS as FINDINGS
from loadtest.errors import InvalidRun
from loadtest.judge.autoscale import Autoscaling, StepResult
from loadtest.judge.compare import QUANTILES, RateRatio, compare_records
from loadtest.judge.summary import Distribution, Gate, Group, Summary, interval, rate_interval
from loadtest.plan.request_class import Length, RequestClass
from loadtest.recorder import write_json
from loadtest.records import Manifest
from loadtest.report import __name__ as package
from loadtest.report.figure_kinds import CDF_WORDS, KINDS, comparison_kinds
from loadtest.report.figures import Drawn, RunData, draw_all, read_run
from loadtest.report.glossary import TERMS, gloss
from loadtest.report.report_search import search_context
from loadtest.report.tiles import tiles
from loadtest.wording import VERDICTS, percentile, ratio, seconds, share

TONES = {"ok": "pass", "pass": "pass", "fail": "fail", "FAILED": "fail", "undecided": "undecided", "invalid": "invalid"}
GROUPS = {
    "since due: what a user waits, the generator's own lag included": ("ttft", "e2e"),
    "within an answer": ("tpot", "itl", "max_itl"),
    "since sending: for comparison with other tools": ("send_ttft", "send_e2e", "lag"),
}
WORDS = {
    "ttft": "TTFT",
    "e2e": "E2E",
    "tpot": "TPOT, per token after the first",
    "itl": "ITL, each gap between two tokens (0 inside a chunk)",
    "max_itl": "largest ITL of a request",
    "send_ttft": "TTFT since sending",
    "send_e2e": "E2E since sending",
    "lag": "lag: due to sending",
}


def write_report(run: Path, *, other: Path | None = None) -> Path:
    """Write report.html, summary.json and figures/ into the run's folder; return the page's path.

    Args:
        run: Folder of a run, interrupted or not, or of a search for the capacity.
        other: A second run to compare with, usually of the same schedule.
    Raises:
        UsageError: The folder holds no run, or a record cannot be read.
    """
    context = search_context(run) if (run / "saturate.json").exists() else _run_context(run, other)
    page = run / "report.html"
    page.write_text(_render(context | {"folder": run}), encoding="utf-8")
    return page


def _run_context(run: Path, other: Path | None) -> dict[str, Any]:
    data = read_run(run)
    summary = data.summary
    write_json(run / "summary.json", summary)
    scaled = data.autoscaling()
    if scaled is not None:
        write_json(run / "autoscale.json", scaled)
    drawn = draw_all(KINDS, data, run / "figures", events=data.events, headline=summary.verdict != "invalid")
    context = _context(data, {figure.name: figure for figure in drawn}, audit(run, rows=data.records.rows), scaled)
    return context | ({"comparison": _comparison(run, data, other)} if other is not None else {})


def _comparison(run: Path, data: RunData, other: Path) -> dict[str, Any]:
    beside, names = read_run(other), (run.resolve().name, other.resolve().name)  # of ".", too
    try:
        found = compare_records(names, (data.records, beside.records), (data.summary, beside.summary))
    except InvalidRun as exc:
        return {"other": names[1], "lines": [f"There is nothing to compare: {exc}."]}
    kinds = comparison_kinds(beside, found)
    paired = f"paired: {found.num_common} requests of one schedule" if found.paired else "not paired"
    claims = {"a faster": "this run is faster", "b faster": "the other run is faster"}
    lines = [f"Over all ratios together: {claims.get(found.verdict, found.verdict)} ({paired})."]
    rows = [
        (
            f"{r.metric.upper()} {percentile(r.q)}",
            ratio(r.ratio),
            f"[{ratio(r.low)}, {ratio(r.high)}]",
            claims.get(r.claim, r.claim),
        )
        for r in found.ratios
    ]
    rows += [
        (rate.name, ratio(rate.ratio), f"[{ratio(rate.low)}, {ratio(rate.high)}]", _rate_claim(rate)) for rate in found.rates
    ]
    figures = draw_all(kinds, data, run / "figures")
    return {"other": names[1], "lines": [*lines, *found.threats], "rows": rows, "figures": figures}


def _rate_claim(rate: RateRatio) -> str:
    if rate.low is None or rate.high is None:
        return "not estimable"
    return "this run does more" if rate.low > 1 else "the other run does more" if rate.high < 1 else "no difference shown"


def _render(context: Mapping[str, Any]) -> str:
    loader = jinja2.PackageLoader(package, ".")
    # Not StrictUndefined: it would refuse sections that a page lacks. A test renders every section.
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["gloss"] = gloss
    return (
        environment.get_template("report.html.jinja").render(tone=lambda cell: f" {TONES.get(cell, '')}".rstrip(), **context)
        + "\n"
    )


def _context(data: RunData, drawn: dict[str, Drawn], audited: AuditResult, scaled: Autoscaling | None) -> dict[str, Any]:
    summary, manifest = data.summary, data.records.manifest
    valid = summary.verdict != "invalid"
    health = [drawn.pop(name) for name in ("health",) if name in drawn]
    return {
        "title": f"Load test: {summary.scenario}",
        "subtitle": f"{_models(data)} at {manifest.target}",
        "verdict": _verdict(summary, manifest, audited),
        "slo": [(r.limit, r.verdict, share(r.attained), f"{share(r.low)} – {share(r.high)}") for r in summary.slo]
        if valid
        else [],
        "tiles": tiles(summary, manifest),
        "distributions": [drawn.pop(name) for name in (*(f"cdf-{metric}" for metric in CDF_WORDS), "tail") if name in drawn],
        "workload": list(_workload(data)),
        "gates": [_gate(gate) for gate in summary.gates],
        "health_figures": health,
        "states": [(name.replace("_", " "), count) for name, count in summary.states.items() if count],
        "audit": audited,
        "findings": [(f"{kind}: {FINDINGS[kind]}", count) for kind, count in audited.counts.items()],
        "throughput": _throughput(summary) if valid else [],
        "percentiles": list(map(percentile, QUANTILES)),
        "numbers": list(_numbers(summary)) if valid else [],
        "number_notes": list(_number_notes(summary)) if valid else [],
        "turns": [(str(turn.number), *_group(turn)) for turn in summary.turns],
        "classes": [(cls.name, cls.model, *_group(cls)) for cls in summary.classes],
        "figures": list(drawn.values()),
        "autoscaling": [_step(step) for step in scaled.steps] if valid and scaled else [],
        "threats": summary.threats,
        "command": shlex.join(manifest.command),
        "glossary": TERMS.items(),
    }


def _models(data: RunData) -> str:
    return ", ".join(data.records.scenario.models(data.records.manifest.model))


def _verdict(summary: Summary, manifest: Manifest, audited: AuditResult) -> dict[str, Any]:
    tone, words = VERDICTS[summary.verdict].tone, VERDICTS[summary.verdict].sentence
    if summary.verdict == "pass" and not summary.slo:
        words = "Valid run; the scenario has no SLO to judge it by"
    lines = [f"{gate.name}: {gate.text}" for gate in summary.gates if not gate.ok] if summary.verdict == "invalid" else []
    lines += manifest.problems
    if not audited.ok:
        lines.append(f"Audit: {sum(audited.counts.values())} findings, listed below.")
    if manifest.state != "finished":
        lines.append("The run did not finish; its records until then are below.")
    if summary.loop == "closed":
        lines.append(
            "Closed loop: a client waits for its answer before it sends again, so that a stall of the target hides most of itself."
        )
    return {"tone": tone, "words": words, "lines": lines}


def _workload(data: RunData) -> Iterator[tuple[str, str]]:
    scenario, manifest = data.records.scenario, data.records.manifest
    arrival = scenario.arrival.model_dump(mode="json")
    loop = "closed loop" if data.summary.loop == "closed" else "open loop"
    yield "scenario", f"{scenario.name}, seed {scenario.seed}"
    numbers = (
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in arrival.items() if name != "law"
    )
    yield "arrivals", f"{scenario.arrival.law}, {loop}: {', '.join(numbers)}"
    for cls in scenario.requests:
        yield f"requests: {cls.name}", _class_words(cls)
    yield "scheduled", f"{manifest.num_scheduled} requests over {scenario.duration_s:g} s, SHA-256 {manifest.schedule_sha256}"
    if rows_sha256 := manifest.sealed.get("rows.jsonl"):
        yield "records", f"rows.jsonl as it was recorded: SHA-256 {rows_sha256}"
    start, end = data.summary.window_s
    yield "measured window", f"{start:.4g} s to {end:.4g} s (warm-up cut at {data.summary.warmup_cut_s:.4g} s)"
    yield "timeout", f"{scenario.timeout_s:g} s after due, drain {scenario.drain_s:g} s"
    yield "SLO", str(scenario.slo)
    yield "target", f"{manifest.target}, model {_models(data)}"
    yield "accelerator", _accelerator(manifest)
    for name, words in (("target says", manifest.target_info), ("versions", manifest.versions), ("machine", manifest.machine)):
        if listed := [f"{key.removesuffix('_bytes')} {text}" for key, value in words.items() if (text := _said(key, value))]:
            yield name, ", ".join(listed)
    yield "generator", f"{manifest.workers} worker process{'es' if manifest.workers > 1 else ''}"


def _said(name: str, value: Any) -> str:
    """Return a value of the manifest in readable form; empty if there is nothing to show."""
    if name.endswith("_bytes") and isinstance(value, int | float):
        return f"{value / 2**30:.1f} GiB"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _accelerator(manifest: Manifest) -> str:
    simulated = manifest.target_info.get("simulated")
    if simulated is None:
        return "not stated by the target"
    return (
        f"simulated ({simulated}): its times are a model's, not a machine's"
        if simulated
        else "none is simulated, the target says"
    )


def _class_words(cls: RequestClass) -> str:
    stream = "stream" if cls.stream else "no stream"
    eos = "EOS ignored" if cls.ignore_eos else "until EOS"
    is_all = cls.input_tokens.dist == "constant" and cls.shared_prefix_tokens >= cls.input_tokens.mean
    shared = "all" if is_all else f"the first {cls.shared_prefix_tokens}"
    prefix = f", {shared} of them shared" if cls.shared_prefix_tokens else ""
    prompt = f"prompt of {_length(cls.input_tokens)} tokens{prefix}"
    if (talk := cls.conversation) is not None:
        pause = f"{talk.think_s.mean:g} s ({talk.think_s.dist}) after the answer before"
        prompt = f"conversations of {_length(talk.turns)} turns, each {pause} and of {_length(cls.input_tokens)} tokens, "
        prompt += f"system prompt of {cls.shared_prefix_tokens} tokens"
    words = f"{cls.endpoint}, {stream}, {prompt}{_api_words(cls)}, output of {_length(cls.output_tokens)} tokens"
    model = f", model {cls.model}" if cls.model else ""
    return f"{words}, {eos}, temperature {cls.temperature:g}, weight {cls.weight:g}{model}{_times(cls)}"


def _times(cls: RequestClass) -> str:
    """Return the times at which the class is drawn, after a comma; empty if always."""
    begins = f" from {cls.from_s:g} s" if cls.from_s else ""
    ends = f" until {cls.until_s:g} s" if cls.until_s is not None else ""
    return f", drawn{begins}{ends}" if begins or ends else ""


def _api_words(cls: RequestClass) -> str:
    """Return the class's uses of the API beyond a plain answer, each after a comma."""
    tools = (
        f", tools ({len(cls.tools)}, tool_choice {'auto' if cls.tool_choice is None else cls.tool_choice})" if cls.tools else ""
    )
    return tools + (f", response_format {cls.response_format.get('type')}" if cls.response_format is not None else "")


def _length(length: Length) -> str:
    if length.dist == "constant":
        return f"{length.mean:g}"
    mean = "" if length.dist == "uniform" else f" mean {length.mean:g},"
    return f"{length.dist}{mean} {length.min} to {length.max}"


def _gate(gate: Gate) -> tuple[str, str, str, str, str]:
    seen = "–" if gate.value is None else _of_gate(gate.name, gate.value)
    return gate.name, "ok" if gate.ok else "FAILED", seen, _of_gate(gate.name, gate.limit), gate.text


def _of_gate(name: str, value: float) -> str:
    """Return the value in the unit of the gate."""
    if name.startswith(("lag ", "read lag ", "loop stalls", "garbage collection", "health samples")):
        return seconds([value])[0] if value else "0 s"
    return f"{value:.0%}" if name.startswith("CPU p") else f"{value:.3g}"


def _throughput(summary: Summary) -> list[tuple[str, str]]:
    if summary.throughput is None:
        return []
    words = {
        "offered": "requests offered",
        "completed": "requests completed",
        "goodput": "goodput: requests inside all limits",
        "output_tokens": "output tokens",
        "total_tokens": "tokens, prompts included",
    }
    known = {name: text for name, text in words.items() if getattr(summary.throughput, name) is not None}
    return [(text, rate_interval(summary.throughput, name)) for name, text in known.items()]


def _numbers(summary: Summary) -> Iterator[tuple[str, list[list[str]]]]:
    for group, metrics in GROUPS.items():
        rows = [_number_row(summary.distributions[metric]) for metric in metrics if metric in summary.distributions]
        if rows:
            yield group, rows


def _number_row(distribution: Distribution) -> list[str]:
    cells = [interval(at) if (at := distribution.at(q)) else "" for q in QUANTILES]
    return [WORDS[distribution.metric], *cells, str(distribution.n), f"{distribution.n_eff:.0f}", str(distribution.num_failed)]


def _number_notes(summary: Summary) -> Iterator[str]:
    methods = sorted({distribution.method for distribution in summary.distributions.values() if distribution.method})
    yield "Intervals: " + "; ".join(methods) + "."
    steady = {True: "steady", False: "NOT steady", None: "too short to say whether steady"}[summary.steady]
    yield f"The window is {steady}. Stalls: {summary.num_stalls}. Reads that held several events: {share(summary.coalesced_share)}."
    if summary.tokens:
        yield "Output tokens: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in summary.tokens.items()) + "."


def _group(group: Group) -> list[str]:
    prompt = "–" if group.prompt_tokens is None else f"{group.prompt_tokens:,.0f}"
    none = "∞ (failed)" if group.num_failed else "–"
    waits = (none if value is None else seconds([value])[0] for value in (group.ttft_p50_s, group.ttft_p95_s))
    good = "–" if group.num_good is None or not group.n else f"{group.num_good / group.n:.1%}"
    return [prompt, *waits, good, str(group.n), str(group.num_failed)]


def _step(result: StepResult) -> tuple[str, ...]:
    step = result.step
    times = (result.settled_s, result.outside_from_s, result.recovery_s)
    placed = f", of which {result.placed_s:g} s until its pod ran" if step.rises and result.placed_s is not None else ""
    lasts = f" over {step.lasts_s:g} s" if step.lasts_s else ""
    words = f"{step.at_s:g} s: {step.from_rate:g} to {step.to_rate:g}/s{lasts}"
    if step.classes:
        words = f"{step.at_s:g} s: requests: {step.classes}"
    elif step.from_rate == step.to_rate:
        words = f"at first: {step.from_rate:g}/s"
    rate = f", at {result.detection_rate:.3g}/s" if result.detection_rate and not step.classes else ""
    replica_s = (result.replica_s, result.over_provisioned_replica_s)
    counts = (result.num_requests, result.num_violating, result.num_lost, result.num_oscillations)
    return (
        words,
        "–" if result.detection_s is None else f"{result.detection_s:g} s" + rate,
        "–" if result.provisioning_s is None else f"{result.provisioning_s:g} s{placed}",
        *("–" if t is None else f"{t:g} s" for t in times),
        *map(str, counts),
        *("–" if r is None else f"{r:g}" for r in replica_s),
    )

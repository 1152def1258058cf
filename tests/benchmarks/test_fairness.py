"""These tests check the figures of the fairness benchmark: what counts as a first token, a share, a right Retry-After, an invalid phase."""

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fairness_figures as of
from benchmarks.fairness import PARTS, TENANTS
from benchmarks.fairness_report import overload_table, several
from benchmarks.tenant_fleet import FAIR, FCFS, Served, config_of, served
from benchmarks.tenant_loads import Phase, Sent
from loadtest.records import HealthSample, Row, State
from serve_app.books.ledger_lines import LedgerLine
from serve_app.config import parse_settings
from serve_app.config.tenants_file import parse_tenants


def sent(due_s: float, first_s: float | None = None, *, tenant: str = "a", state: State = "ok", **fields: Any) -> Sent:
    fields = {"status": 200, "sent_s": due_s, "end_s": first_s} | fields
    return Sent(tenant, 0, Row(0, 0, due_s, state, first_s=first_s, **fields))


def refused(due_s: float, *, text: str, end_s: float | None = None, tenant: str = "a", retry_after_s: float = 1.0) -> Sent:
    ended_s = due_s if end_s is None else end_s
    return sent(due_s, tenant=tenant, state="http_error", status=503, reason=text, end_s=ended_s, retry_after_s=retry_after_s)


def phase(*requests: Sent, **changes: Any) -> Phase:
    plain: dict[str, Any] = {
        "part": "noisy",
        "name": "beside",
        "side": FAIR,
        "ingresses": 1,
        "seed": 1,
        "warmup_s": 5.0,
        "until_s": 15.0,
    }
    healthy: dict[str, Any] = {
        "health": [HealthSample(1.0, 0, 0.1, 0.0, 0.0, 0, 0, 0)],
        "machine": [0.4],
        "cores": {},
        "memory_mib": {},
    }
    return Phase(**plain | healthy | {"epoch_unix_s": 0.0, "sent": list(requests)} | changes)


def line(**changes: Any) -> LedgerLine:
    plain: dict[str, Any] = {
        "seq": 0, "number": 0, "time": 100.0, "id": "", "key": "a", "tenant": "a", "model": FAIR, "path": "/v1/completions",
        "stream": True, "outcome": "complete", "status": 200, "reason": "length", "engine_requests": 1, "attempts": 1,
        "replicas": ["r"], "ends": [], "prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 5, "queued_s": 0.0,
        "first_token_s": 1.0, "total_s": 3.0, "gpu_s": 2.0, "gaps_s": [],
    }  # fmt: skip
    return LedgerLine(**plain | changes)


def test_a_refused_request_has_no_first_token_and_a_cut_one_has_waited_at_least_so_long() -> None:
    times = of.ttft([sent(1.0, 1.5), refused(2.0, text="503"), sent(3.0, state="timeout", status=0, end_s=9.0)])
    assert (list(times.values_s), times.cut, times.refused, times.failed) == ([0.5, 6.0, math.inf], 1, 1, 0)


def test_only_requests_that_were_due_within_the_window_count() -> None:
    due = [each.row.due_s for each in of.window(phase(*(sent(at, at) for at in (4.9, 5.0, 14.9, 15.0))))]
    assert due == [5.0, 14.9]


def test_tokens_count_when_they_come() -> None:
    answer = sent(4.0, 4.5, chunks=[(500.0, 1), (1000.0, 2), (10_999.0, 3), (11_000.0, 4)])
    assert of.tokens_per_s(phase(answer)) == 0.5


def test_a_request_that_was_answered_half_within_the_window_has_half_of_its_gpu_seconds() -> None:
    lines = [line(), line(model=FCFS), line(outcome="aborted", first_token_s=None), line(tenant="b", time=90.0)]
    assert served(lines, FAIR, 102.0, 110.0) == {"a": Served(1.0, replicas={"r": 1.0}), "b": Served(0.0, replicas={"r": 0.0})}
    assert served(lines, FAIR, 100.0, 102.0) == {
        "a": Served(1.0, prompt=10, cached=4, requests=1, replicas={"r": 1.0}),
        "b": Served(0.0, replicas={"r": 0.0}),
    }


def test_shares_and_indices() -> None:
    found = phase(served={"weight-1": Served(1.0), "weight-2": Served(2.2), "weight-4": Served(3.8)})
    assert of.shares(found)["weight-1"] == pytest.approx(1 / 7)
    assert of.worst_share_error(found, of.WEIGHTS) == pytest.approx(0.1)
    assert [of.jain([1.0, 1.0]), of.jain([1.0, 0.0])] == [1.0, 0.5]


def test_retry_after_is_compared_with_the_start_of_the_last_that_waited() -> None:
    others = [sent(5.0, 10.0), sent(5.5, 8.0, tenant="b"), sent(7.0, 12.0)]  # the last comes after the refusal
    found = phase(*others, refused(6.0, text="503: 2 others wait: retry in 3.0 s", tenant="b", retry_after_s=4.0))
    assert list(of.retry_errors(found)) == [-0.25]
    assert list(of.retry_errors(found, header=True)) == [0.0]
    assert list(of.retry_errors(found, own=True)) == [0.5]
    assert [of.retry_right(of.retry_errors(found)), of.retry_right(of.retry_errors(found, own=True))] == [1.0, 0.0]


def test_a_request_that_waited_until_its_deadline_is_no_refusal_at_once() -> None:
    at_once = refused(6.0, end_s=6.02, text="503: the request has waited 0.0 s, 3 others wait; retry in 1.0 s")
    late = refused(6.0, end_s=8.0, text="503: the request has waited 2.0 s, 3 others wait; retry in 1.0 s")
    assert list(of.refusal_s(phase(at_once, late))) == [pytest.approx(0.02)]
    assert [of.ended_at_deadline(phase(at_once, late)), of.admitted(phase(at_once, late, sent(7.0, 7.5)))] == [1, 2]
    silent = sent(
        6.0, state="stream_error", end_s=16.0, reason="503: the request has waited 10.0 s, 3 others wait; retry in 9.0 s"
    )
    assert (of.ended_at_deadline(phase(silent)), of.answered_ttft([silent]).failed) == (1, 0), "the last event of a silent stream"


def cells(*phases: Phase) -> dict[str, dict[str, str]]:
    """Return the table of overload: by phase the cell of each column."""
    groups = {(each.part, each.name, each.side, each.ingresses): [each] for each in phases}
    table = overload_table(groups)
    return {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}


LATE = refused(6.0, end_s=8.0, text="503: the request has waited 2.0 s, 3 others wait; retry in 1.0 s")


def load(part: str, name: str, num: int, first_s: float, *more: Sent) -> Phase:
    """Return a phase with so many requests, each of which had its first token after this time, and with others."""
    return phase(*(sent(6.0, 6.0 + first_s) for _ in range(num)), *more, part=part, name=name)


def test_the_peak_is_the_highest_rate_of_all_loads_of_the_same_requests() -> None:
    loads = [load("reference", "0.9", 80, 0.5), load("reference", "1.0", 90, 0.5), load("overload", "3x", 95, 1.0)]
    patient, other = load("patient", "3x", 100, 5.0), load("equal", "all", 500, 0.1)
    found = cells(*loads, patient, other)
    assert {name: row["of the peak"] for name, row in found.items()} == {
        "reference 0.9": "0.800",
        "reference 1.0": "0.900",
        "overload 3x": "0.950",
        "patient 3x": "1.000",
    }
    assert cells(*loads, load("storm", "three retries", 190, 9.0))["overload 3x"]["of the peak"] == "0.500", "late answers count"
    assert cells(loads[2])["overload 3x"]["of the peak"] == "-", "a single load"


def test_the_p99_of_the_admitted_stands_beside_those_that_their_deadline_ended_and_its_bound() -> None:
    found = cells(load("reference", "1.0", 9, 1.25), load("overload", "3x", 3, 1.5, LATE, LATE), load("patient", "3x", 9, 5.0))
    said = {name: [row[column] for column in list(row)[6:10]] for name, row in found.items()}
    assert said == {
        "reference 1.0": ["0 of 9 (0.0%)", "1.25", "1.00", "1.60"],
        "overload 3x": ["2 of 5 (40.0%)", "1.50", "1.20", "1.60"],
        "patient 3x": ["0 of 9 (0.0%)", "5.00", "-", "-"],
    }
    calm = load("patient", "1.0", 9, 2.5)
    assert list(cells(calm, load("patient", "3x", 9, 5.0))["patient 3x"].values())[8:10] == ["2.00", "4.00"], "its own limit"


def test_memory_grows_from_the_first_third_of_the_window_to_its_last() -> None:
    assert of.growth_mib(phase(memory_mib={"ingress 1": [0.0, 10.0, 10.0, 10.0, 10.0, 13.0], "engine core 2": [5.0] * 6})) == 3.0


def test_a_phase_of_a_busy_machine_or_a_late_generator_is_invalid() -> None:
    assert of.problems(phase(sent(6.0, 6.1))) == []
    assert of.problems(phase(sent(6.0, 6.1, sent_s=6.06), machine=[0.8, 1.0])) == [
        "the machine was 90% busy, limit 85%",
        "the p99 of the generator's lag was 60 ms, limit 50",
    ]


def test_figures_of_several_seeds_have_their_range() -> None:
    assert [several([]), several([1.0]), several([1.0, 3.0, 2.0]), several([math.inf])] == [
        "-",
        "1.00",
        "2.00 (1.00 to 3.00)",
        "none",
    ]


def test_the_sides_differ_in_the_policy_alone(tmp_path: Path) -> None:
    settings = parse_settings(config_of(tmp_path, 8096, ingresses=2, tenants=TENANTS))
    fcfs, fair = (settings.models[side] for side in (FCFS, FAIR))
    assert (fcfs.engine_args.pop("scheduling_policy"), fair.engine_args.pop("scheduling_policy")) == ("fcfs", "priority")
    assert fcfs.model_dump(exclude={"name"}) == fair.model_dump(exclude={"name"})
    assert set(parse_tenants((tmp_path / "tenants.yaml").read_text()).tenants) == set(TENANTS)
    assert {"noisy", "overload"} <= set(PARTS)

"""These tests check the verdicts of runs written by hand, the part of a run that counts, and the threats that are reported."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest.judge.analysis import analyse
from loadtest.records import HealthSample, Row, ScheduledRequest, ServerSample
from tests.loadtest.judge.written_runs import Change, answered, ended, lasting, quantile, slow_at_first, write_run


def test_a_missing_row_makes_the_run_invalid_and_leaves_no_figures(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", 500, lambda row: None if row.id == 250 else row, slo="ttft_p99=5s"))
    assert (summary.verdict, summary.distributions, summary.throughput, summary.slo) == ("invalid", {}, None, [])
    assert summary.states == {"ok": 499, "unaccounted": 1}


def test_invalid_comes_before_a_missed_slo(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 500, slo="ttft_p99=1ms", manifest={"problems": ["worker 1 was lost"]})
    assert analyse(run).verdict == "invalid"


@pytest.mark.parametrize(
    ("num_slow", "slo", "verdict"),
    [(0, "ttft_p99=2s", "pass"), (60, "ttft_p99=2s", "slo-missed"), (10, "ttft_p99=2s", "undecided"), (60, "ttft_p90=2s", "pass"),
     (60, "ttft_p90=2s,e2e_p99=2s", "slo-missed")],
)  # fmt: skip
def test_verdict(tmp_path: Path, num_slow: int, slo: str, verdict: str) -> None:
    slow = set(np.random.Generator(np.random.Philox(1)).permutation(1000)[:num_slow].tolist())

    def change(row: Row) -> Row:
        return answered(ScheduledRequest(row.id, row.due_s, "default", 10, 4), row.due_s, 3.0) if row.id in slow else row

    run = write_run(tmp_path / "run", 1000, change, slo=slo)
    summary = analyse(run)
    assert summary.verdict == verdict
    assert summary.slo[0].attained == pytest.approx(1 - num_slow / 1000)
    n_eff, over = summary.slo[0].counts
    assert 300 < n_eff <= 1000
    assert over / n_eff == pytest.approx(num_slow / 1000)


def test_the_warm_up_of_the_scenario_is_left_out_and_a_longer_one_is_found(tmp_path: Path) -> None:
    noise = np.random.Generator(np.random.Philox(2)).lognormal(0, 0.3, 1200).tolist()

    def slow_at_first(row: Row) -> Row:
        took_s = noise[row.id] * (4 if row.due_s < 20 else 1)
        return answered(ScheduledRequest(row.id, row.due_s, "default", 10, 4), row.due_s, took_s)

    summary = analyse(write_run(tmp_path / "run", 1200, slow_at_first, warmup_s=5))
    assert summary.warmup_cut_s == pytest.approx(20, abs=5)
    assert summary.window_s == (summary.warmup_cut_s, 120)
    assert any("warm-up took 20 s, not the 5 s" in threat for threat in summary.threats)
    assert analyse(write_run(tmp_path / "even", 1200, warmup_s=5)).window_s == (5, 120)


def test_an_outage_after_the_warm_up_is_no_warm_up(tmp_path: Path) -> None:
    """150 of 1,200 requests are refused, from the fifth to the twentieth second. Before the warm-up's end failures do not count."""

    def change(row: Row) -> Row:
        return ended(row, "connect_error", row.due_s) if 5 <= row.due_s < 20 else row

    summary = analyse(write_run(tmp_path / "run", 1200, change, warmup_s=2, slo="ttft_p90=2s"))
    assert (summary.warmup_cut_s, summary.states["connect_error"]) == (2, 150)
    assert summary.slo[0].attained == pytest.approx(1 - 150 / 1180)
    assert summary.verdict == "undecided", "one outage is one sample"
    assert analyse(write_run(tmp_path / "warm", 1200, change, warmup_s=20, slo="ttft_p90=2s")).verdict == "pass"


@pytest.mark.parametrize(
    ("slo", "cut"),
    [("ttft_p95=2s", False), ("ttft_p95=2s,e2e_p50=60s", False), ("e2e_p95=2s", False), ("tpot_p99=100ms", False),
     ("itl_p90=299ms", False), ("ttft_p95=5s", True), ("tpot_p99=200ms,itl_p90=301ms,e2e_p50=5s", True)],
)  # fmt: skip
def test_a_part_that_missed_the_slo_is_no_warm_up(tmp_path: Path, slo: str, cut: bool) -> None:
    """The first 20 of 120 s are slow. Left out they would make a pass of a run in which one request in six missed the limit."""

    def slow_at_first(row: Row) -> Row:
        took_s = 4.0 if row.due_s < 20 else 1.0
        return answered(ScheduledRequest(row.id, row.due_s, "default", 10, 4), row.due_s, took_s)

    summary = analyse(write_run(tmp_path / "run", 1200, slow_at_first, warmup_s=5, slo=slo))
    assert summary.warmup_cut_s == (20 if cut else 5)
    assert (summary.verdict == "pass") is cut


def test_a_warm_up_with_as_many_slow_requests_as_the_limit_allows_is_left_out(tmp_path: Path) -> None:
    """All requests of the first 20 s take 1.5 s, and one in fifty 3 s: 98 % of that part are inside the limit of 2 s."""

    def change(row: Row) -> Row:
        took_s = 3.0 if row.id % 50 == 0 else 1.5 if row.due_s < 20 else 1.0
        return answered(ScheduledRequest(row.id, row.due_s, "default", 10, 4), row.due_s, took_s)

    cuts = [
        analyse(write_run(tmp_path / slo, 1200, change, warmup_s=5, slo=slo)).warmup_cut_s
        for slo in ("ttft_p95=2s", "ttft_p99=2s")
    ]
    assert cuts == [pytest.approx(20, abs=1), 5]


def test_what_a_fault_does_is_no_warm_up(tmp_path: Path) -> None:
    def change(row: Row) -> Row:
        return answered(ScheduledRequest(row.id, row.due_s, "default", 10, 4), row.due_s, 4.0 if 5 <= row.due_s < 20 else 1.0)

    faults = [{"at_s": 5, "action": "kill", "process": "x"}]
    assert analyse(write_run(tmp_path / "run", 1200, change, warmup_s=2, faults=faults)).warmup_cut_s == 2
    assert analyse(write_run(tmp_path / "without", 1200, change, warmup_s=2)).warmup_cut_s > 15


@pytest.mark.parametrize(("at_s", "even"), [(20, False), (5, True), (120, True)])
def test_what_another_class_does_is_no_warm_up(tmp_path: Path, at_s: float, even: bool) -> None:
    """A class ends at ``at_s``; the warm-up lasts until 5 s, the arrivals until 120 s. In all runs the first 20 s are slow."""

    classes = [{"name": "default"}, {"name": "early", "until_s": at_s}]
    summary = analyse(write_run(tmp_path / "run", 1200, slow_at_first, warmup_s=5, requests=classes))
    assert (summary.warmup_cut_s > 15) is even
    assert (summary.steady is not None) is even
    assert any("offered load changes over the run by design" in threat for threat in summary.threats) is not even


def test_a_growing_backlog_is_not_steady(tmp_path: Path) -> None:
    def slower_and_slower(row: Row) -> Row:
        return answered(ScheduledRequest(row.id, row.due_s, "default", 10, 4), row.due_s, 1 + row.due_s / 20)

    summary = analyse(write_run(tmp_path / "run", 1000, slower_and_slower))
    assert summary.steady is False
    assert quantile(summary, "ttft", 0.5).high_s is None
    assert any("not steady" in threat for threat in summary.threats)
    assert analyse(write_run(tmp_path / "even", 1000)).steady is True
    assert analyse(write_run(tmp_path / "few", 50)).steady is None


def test_an_interrupted_run_is_analysed_up_to_the_interruption(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", 1000, lambda row: row if row.due_s < 60 else None, manifest={"state": "interrupted", "ended_s": 60.0}
    )
    summary = analyse(run)
    assert summary.window_s == (0, 60)
    assert summary.states == {"ok": 600}
    assert any("interrupted at 60 s of 100 s" in threat for threat in summary.threats)


def test_what_else_could_be_wrong_is_said(tmp_path: Path) -> None:
    def change(row: Row) -> Row:
        row.num_coalesced, row.output_tokens = row.id % 2, 5 if row.id == 7 else 4
        return ended(row, "cancelled", row.due_s + 0.5) if row.id == 8 else row

    run = write_run(tmp_path / "run", 1000, change, manifest={"clock_drift_s": 2.0, "target_info": {"simulated": True}})
    summary = analyse(run)
    assert summary.coalesced_share == pytest.approx(500 / 2997)  # three reads an answer, none of the cancelled one
    words = " ".join(summary.threats)
    for part in (
        "17% of the reads",
        "stepped by 2.0 s",
        "simulated",
        "1 requests were cancelled by the load generator",
        "1 answers have different",
    ):
        assert part in words, part
    assert summary.distributions["e2e"].n == 999
    assert summary.distributions["ttft"].n == 1000  # at least 0.5 s


def test_what_a_replay_left_out_of_its_trace_is_said(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", 100, manifest={"num_left_out": 3, "num_after_end": 1200}))
    assert [threat for threat in summary.threats if "of the trace" in threat] == [
        "3 requests of the trace were left out: they have no tokens.",
        "1,200 requests of the trace were left out: they come after 10 s.",
    ]


def test_a_source_that_only_failed_is_a_threat(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 100)
    samples = [ServerSample(t, "metrics", error="404 Not Found") for t in (0.0, 1.0)]
    samples += [ServerSample(0.0, "serve", error="refused"), ServerSample(1.0, "serve", {"replicas_ready/a": 1.0})]
    (run / "server.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(samples))
    said = [threat for threat in analyse(run).threats if threat.startswith("Nothing is known")]
    assert said == ["Nothing is known of the target's own figures (metrics): 404 Not Found."]


@pytest.mark.parametrize("asked", [False, True], ids=["stands in", "was asked for"])
def test_where_fleet_stands_in_for_rays_dashboard_the_report_says_so(tmp_path: Path, asked: bool) -> None:
    run = write_run(tmp_path / "run", 100, observe={"serve_status": True, "fleet": asked})
    samples = [ServerSample(0.0, "serve", error="refused"), ServerSample(0.0, "fleet", {"replicas_ready/replica-a": 1.0})]
    (run / "server.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(samples))
    told = {
        False: "Ray's dashboard at http://127.0.0.1:8265 reported no replicas (refused): this report has those of the target's /fleet, "
        "which does not count ingresses.",
        True: "Nothing is known of the target's own figures (serve): refused.",
    }
    assert [threat for threat in analyse(run).threats if "refused" in threat] == [told[asked]]


@pytest.mark.parametrize(("late_ms", "said"), [(35.0, True), (25.0, False)])
def test_late_reads_that_are_much_beside_the_gaps_are_a_threat(tmp_path: Path, late_ms: float, said: bool) -> None:
    """The p99 of the gaps is 300 ms. The run stays valid: the TTFT is 1 s."""
    run = write_run(tmp_path / "run", 1000)
    health = [
        HealthSample(float(t), 0, 0.1, late_ms / 1e3, 0.0, 0, 0, 0, read_late_ms=[0.1] * 90 + [late_ms] * 10) for t in range(300)
    ]
    (run / "health.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(health))
    summary = analyse(run)
    assert summary.verdict == "pass"
    found = [threat for threat in summary.threats if "late at the p99" in threat]
    assert found == ([f"Answers were read up to {late_ms} ms late at the p99: so much of the p99 of the ITL, 300.0 ms, may be the "
                      "generator's own."] if said else [])  # fmt: skip


def test_a_run_whose_schedule_was_changed_afterwards_is_invalid(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", 1000, manifest={"schedule_sha256": "ab" * 32}))
    assert (summary.verdict, summary.distributions) == ("invalid", {})
    assert any("schedule.jsonl has the hash" in gate.text for gate in summary.gates if not gate.ok)


def test_a_run_without_a_good_answer_passes_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1000, lambda row: ended(row, "http_error", row.due_s + 0.1))
    assert analyse(run).verdict == "undecided"


@pytest.mark.parametrize("took_s", [[3.0], [1.0, 3.0]])
def test_one_slow_request_of_one_or_two_misses_no_p95(tmp_path: Path, took_s: list[float]) -> None:
    """A target that keeps the limit for 95 % of its requests has one such request in 5 or 10 % of such runs."""
    arrival = {"law": "burst", "max_requests": len(took_s)}
    run = write_run(tmp_path / "run", len(took_s), lasting(took_s), slo="ttft_p95=2s", arrival=arrival)
    summary = analyse(run)
    assert (summary.verdict, summary.slo[0].verdict) == ("undecided", "undecided")
    assert summary.slo[0].high >= 0.95


def until(stop_s: float, took_s: float) -> Change:
    """Answers come after ``took_s``, and the run is stopped at ``stop_s``: then this side leaves the requests that are under way."""

    def change(row: Row) -> Row | None:
        if row.due_s >= stop_s:
            return None
        whole = answered(ScheduledRequest(row.id, row.due_s, "default", 10, 4), row.due_s, took_s)
        if whole.first_s is None or whole.end_s is None or whole.first_s > stop_s:
            return ended(row, "cancelled", stop_s)
        return whole if whole.end_s <= stop_s else msgspec.structs.replace(whole, state="cancelled", end_s=stop_s)

    return change


INTERRUPTED = {"state": "interrupted", "ended_s": 10.0}


@pytest.mark.parametrize("took_s", [4.0, 12.0])
def test_what_an_interrupted_run_cut_off_before_the_limit_misses_no_slo(tmp_path: Path, took_s: float) -> None:
    """Answers take ``took_s``, and the limit is 13 s. The run ends at 10 s, when a part or all of the 100 requests wait."""
    run = write_run(tmp_path / "run", 300, until(10, took_s), slo="ttft_p95=13s", manifest=INTERRUPTED)
    summary = analyse(run)
    (limit,) = summary.slo
    num_left = {4.0: 39, 12.0: 100}[took_s]
    assert (summary.verdict, limit.verdict, limit.high) == ("undecided", "undecided", 1.0)
    assert (limit.attained, limit.unknown) == (1.0 if num_left < 100 else 0.0, num_left / 100)
    ttft = summary.distributions["ttft"]
    assert (ttft.n, ttft.num_failed, ttft.num_left, ttft.mean_s) == (100, 0, num_left, None)
    assert (
        f"{num_left}.00 % of the requests were cancelled by the load generator before they reached ttft_p95=13000ms"
        in " ".join(summary.threats)
    )


def test_an_interrupted_run_that_missed_the_slo_says_so(tmp_path: Path) -> None:
    """All answers take 4 s, and the limit is 3 s. The run ends at 60 s."""
    stopped = {"state": "interrupted", "ended_s": 60.0}
    summary = analyse(write_run(tmp_path / "run", 900, until(60, 4.0), slo="ttft_p50=3s", manifest=stopped))
    (limit,) = summary.slo
    assert (summary.verdict, limit.verdict) == ("slo-missed", "fail")
    assert limit.attained == 0.0
    assert limit.unknown == pytest.approx(0.05)  # due in the last three of the 60 seconds


def test_what_this_side_left_before_the_limit_passes_nothing_either(tmp_path: Path) -> None:
    """With ``cancel_after_s`` a run that comes to its end has such requests too. Counted as over the limit they are one in two."""

    def change(row: Row) -> Row:
        return ended(row, "cancelled", row.due_s + 0.5) if row.id % 2 else row

    (limit,) = analyse(write_run(tmp_path / "run", 1000, change, slo="ttft_p90=2s")).slo
    assert (limit.verdict, limit.attained, limit.unknown) == ("undecided", 1.0, 0.5)
    assert limit.counts[1] / limit.counts[0] == 0.5
    (over,) = analyse(write_run(tmp_path / "over", 1000, change, slo="ttft_p90=400ms")).slo
    assert (over.verdict, over.attained, over.unknown) == ("fail", 0.0, 0.0)


def test_a_timeout_below_the_limit_is_over_it(tmp_path: Path) -> None:
    def change(row: Row) -> Row:
        return ended(row, "timeout", row.due_s + 1.5) if row.id % 2 else row

    (limit,) = analyse(write_run(tmp_path / "run", 1000, change, slo="ttft_p90=2s", timeout_s=1.5)).slo
    assert (limit.verdict, limit.attained, limit.unknown) == ("fail", 0.5, 0.0)

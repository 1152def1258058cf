"""Figures of runs whose rows are written by hand: expected values are counted, not computed by the code under test."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadtest.errors import UsageError
from loadtest.judge.analysis import analyse
from loadtest.judge.metrics import bounds_s, gaps_s
from loadtest.judge.summary import Quantile, Summary, interval
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import Schedule
from loadtest.records import Chunks, HealthSample, Manifest, Row, ScheduledRequest, ServerSample, read_rows

Change = Callable[[Row], Row | None]


def answered(request: ScheduledRequest, due_s: float, took_s: float = 1.0) -> Row:
    """First token after ``took_s``, three more tokens in two chunks, 100 and 300 ms later each."""
    sent = due_s + 0.001
    first_ms = took_s * 1000 - 1  # from sending
    return Row(
        id=request.id, worker=0, due_s=due_s, state="ok", sent_s=sent, first_s=due_s + took_s, last_s=due_s + took_s + 0.4,
        end_s=due_s + took_s + 0.5, status=200, chunks=[(first_ms, 1), (first_ms + 100, 1), (first_ms + 400, 2)],
        prompt_tokens=10, output_tokens=4,
    )  # fmt: skip


def ended(row: Row, state: Any, end_s: float) -> Row:
    """The same request without an answer."""
    return Row(id=row.id, worker=0, due_s=row.due_s, state=state, reason="as asked", sent_s=row.sent_s, end_s=end_s)


def write_run(
    folder: Path,
    num: int,
    change: Change = lambda row: row,
    *,
    manifest: dict[str, Any] | None = None,
    session: str = "",
    **scenario: Any,
) -> Path:
    """Write a run of ten requests a second; ``change`` makes each row what it shall be, or None for no row."""
    values = {"name": "by-hand", "arrival": {"law": "constant", "rate": 10}, "duration_s": num / 10, "warmup_s": 0, **scenario}
    closed = values["arrival"]["law"] == "closed"
    due = [k / 10 for k in range(num)]
    schedule = [ScheduledRequest(k, None if closed else at, "default", 10, 4, session) for k, at in enumerate(due)]
    rows = [row for request, at in zip(schedule, due, strict=True) if (row := change(answered(request, at))) is not None]
    health = [HealthSample(float(t), 0, 0.1, 0.001, 0.0, 0, 0, 0) for t in range(int(num / 10) + 200)]
    fields: dict[str, Any] = {"state": "finished", "model": "", "ended_s": num / 10 + 1} | (manifest or {})
    fields = {"schedule_sha256": Schedule(schedule).sha256} | fields
    ran = Manifest(
        scenario=parse_scenario(values).model_dump(mode="json"), num_scheduled=num, target="",
        epoch_unix_s=0.0, command=[], **fields,
    )  # fmt: skip
    folder.mkdir()
    (folder / "manifest.json").write_bytes(msgspec.json.encode(ran))
    for name, lines in (("schedule", schedule), ("rows", rows), ("health", health)):
        (folder / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return folder


def quantile(summary: Summary, metric: str, q: float) -> Quantile:
    return next(found for found in summary.distributions[metric].quantiles if found.q == q)


def test_every_latency_of_a_run_of_equal_answers(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", 1000))
    seen = {metric: quantile(summary, metric, 0.5).value_s for metric in summary.distributions}
    # TPOT: 0.4 s over the three tokens after the first. Gaps: 0.1, 0.3 and 0 for the second token of the last chunk.
    expected = {
        "ttft": 1.0,
        "tpot": 0.4 / 3,
        "max_itl": 0.3,
        "e2e": 1.5,
        "send_ttft": 0.999,
        "send_e2e": 1.499,
        "lag": 0.001,
        "itl": 0.1,
    }
    assert seen == pytest.approx(expected)
    assert summary.distributions["itl"].n == 3000
    assert (summary.verdict, summary.loop, summary.window_s) == ("pass", "open", (0.0, 100.0))
    assert summary.states == {"ok": 1000}
    assert summary.tokens == {"usage": 4000, "chunks": 4000, "tokenizer": 0, "disagree": 0}


def test_throughput_counts_what_ended_in_the_window(tmp_path: Path) -> None:
    throughput = analyse(write_run(tmp_path / "run", 1000, slo="ttft_p99=500ms")).throughput
    assert throughput is not None
    assert throughput.offered == 10
    # Answers take 1.5 s: those due in the last 1.5 s (98.6 .. 99.9) end after the window.
    assert throughput.completed == pytest.approx(9.86)
    assert throughput.output_tokens == pytest.approx(4 * 9.86)
    assert throughput.total_tokens == pytest.approx(14 * 9.86)
    assert throughput.goodput == 0


def test_the_intervals_of_the_rates_hold_what_the_load_is(tmp_path: Path) -> None:
    throughput = analyse(write_run(tmp_path / "run", 1000, slo="ttft_p99=2s")).throughput
    assert throughput is not None
    low, high = throughput.intervals["goodput"]
    assert low <= throughput.goodput == 10 <= high
    low, high = throughput.intervals["completed"]
    assert low <= 10 <= high  # the first 1.5 s are short of answers, which the interval allows for
    assert set(throughput.intervals) == {"offered", "completed", "goodput", "output_tokens", "total_tokens"}


def test_a_mean_that_leaves_failures_out_says_so(tmp_path: Path) -> None:
    whole = analyse(write_run(tmp_path / "whole", 100)).distributions["ttft"]
    assert [whole.mean_s, whole.mean_answered_s] == pytest.approx([1.0, 1.0])
    run = write_run(tmp_path / "run", 100, lambda row: ended(row, "http_error", row.due_s) if row.id % 10 == 0 else row)
    some = analyse(run).distributions["ttft"]
    assert some.mean_s is None
    assert some.mean_answered_s == pytest.approx(1.0)


def test_timeouts_and_failures_stay_in_every_distribution(tmp_path: Path) -> None:
    """T11: 3 % of the requests time out."""

    def change(row: Row) -> Row:
        return ended(row, "timeout", row.due_s + 120) if row.id % 100 < 3 else row

    summary = analyse(write_run(tmp_path / "run", 2000, change))
    ttft = summary.distributions["ttft"]
    assert (ttft.n, ttft.num_failed) == (2000, 60)
    p95, p99 = quantile(summary, "ttft", 0.95), quantile(summary, "ttft", 0.99)
    assert p95.value_s == pytest.approx(1.0)
    assert p95.censored_s is None
    assert p99.value_s is None
    assert p99.censored_s == pytest.approx(120.0)
    assert p99.high_s is None
    assert summary.states == {"ok": 1940, "timeout": 60}


def test_a_failed_request_is_infinitely_slow(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1000, lambda row: ended(row, "http_error", row.due_s) if row.id % 10 == 0 else row)
    summary = analyse(run)
    for metric in ("ttft", "tpot", "max_itl", "e2e"):
        assert summary.distributions[metric].num_failed == 100
        assert quantile(summary, metric, 0.9).value_s is not None
        assert quantile(summary, metric, 0.95).failed
    itl = summary.distributions["itl"]
    assert (itl.n, itl.num_failed) == (1000 * 3, 300)  # a failed one has the three gaps of its four tokens
    assert quantile(summary, "itl", 0.9).value_s == pytest.approx(0.3)  # rank 2700 of 2700 that came
    assert quantile(summary, "itl", 0.95).failed


def test_a_target_that_refuses_half_of_the_requests_misses_every_limit_of_itl(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", 1000, lambda row: ended(row, "http_error", row.due_s) if row.id % 2 else row, slo="itl_p99=400ms"
    )
    summary = analyse(run)
    (limit,) = summary.slo
    assert (limit.verdict, limit.attained, summary.verdict) == ("fail", 0.5, "slo-missed")
    assert limit.counts[1] / limit.counts[0] == 0.5  # what a search for the capacity is given


def test_a_failed_request_whose_length_the_model_decides_owes_what_the_others_brought(tmp_path: Path) -> None:
    classes = [{"ignore_eos": False, "output_tokens": {"mean": 4}}]
    run = write_run(
        tmp_path / "run",
        1000,
        lambda row: (
            ended(row, "http_error", row.due_s)
            if row.id % 10 == 0
            else msgspec.structs.replace(row, chunks=row.chunks[:2], output_tokens=2)
        ),
        requests=classes,
    )
    itl = analyse(run).distributions["itl"]
    assert (itl.n, itl.num_failed) == (900 + 100, 100)


@pytest.mark.parametrize(("state", "words"), [("http_error", "∞ (failed)"), ("timeout", "≥ 120 s")])
def test_a_summary_says_the_same_once_it_was_written(tmp_path: Path, state: str, words: str) -> None:
    summary = analyse(
        write_run(tmp_path / "run", 1000, lambda row: ended(row, state, row.due_s + 120) if row.id % 10 == 0 else row)
    )
    again = msgspec.json.decode(msgspec.json.encode(summary), type=Summary)
    assert again == summary
    assert interval(quantile(again, "ttft", 0.95)) == interval(quantile(summary, "ttft", 0.95)) == words


def test_a_limit_of_itl_is_over_all_gaps_and_goodput_over_those_of_each_request(tmp_path: Path) -> None:
    """A third of the gaps is 0.3 s: 66 % of them are within 0.2 s, and of each request its median, but not its p90."""
    run = write_run(tmp_path / "run", 1000, slo="itl_p60=200ms,max_itl_p50=1s")
    summary = analyse(run)
    assert [(r.limit, r.verdict, r.attained) for r in summary.slo] == [
        ("itl_p60=200ms", "pass", pytest.approx(2 / 3)), ("max_itl_p50=1000ms", "pass", 1.0),
    ]  # fmt: skip
    goodput = [
        found.goodput if (found := analyse(write_run(tmp_path / slo, 1000, slo=slo)).throughput) else None
        for slo in ("itl_p60=200ms", "itl_p90=200ms", "itl_p90=300ms", "max_itl_p90=200ms", "tpot_p90=134ms")
    ]
    assert goodput == [10, 0, 10, 0, 10]


def test_percentiles_of_the_slo_are_computed_too(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", 1000, slo="ttft_p97=2s,ttft_p99.9=2s"))
    assert [at.q for at in summary.distributions["ttft"].quantiles] == [0.5, 0.9, 0.95, 0.97, 0.99, 0.999]
    assert quantile(summary, "ttft", 0.97).value_s == pytest.approx(1.0)
    assert [at.q for at in summary.distributions["e2e"].quantiles] == [0.5, 0.9, 0.95, 0.99, 0.999]


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


def test_a_closed_loop_counts_from_sending_and_says_so(tmp_path: Path) -> None:
    arrival = {"law": "closed", "concurrency": 4, "max_requests": 1000}
    summary = analyse(write_run(tmp_path / "run", 1000, arrival=arrival))
    assert summary.loop == "closed"
    assert quantile(summary, "ttft", 0.5).value_s == pytest.approx(0.999)
    assert any("closed loop" in threat for threat in summary.threats)


def test_what_else_could_be_wrong_is_said(tmp_path: Path) -> None:
    def change(row: Row) -> Row:
        row.num_coalesced, row.output_tokens = row.id % 2, 5 if row.id == 7 else 4
        return ended(row, "cancelled", row.due_s + 0.5) if row.id == 8 else row

    run = write_run(tmp_path / "run", 1000, change, manifest={"clock_drift_s": 2.0, "target_info": {"simulated": True}})
    summary = analyse(run)
    assert summary.coalesced_share == pytest.approx(500 / 2997)  # three reads an answer, none of the cancelled one
    words = " ".join(summary.threats)
    for part in ("17% of the reads", "stepped by 2.0 s", "simulated", "1 requests were left", "1 answers have different"):
        assert part in words, part
    assert summary.distributions["e2e"].n == 999
    assert summary.distributions["ttft"].n == 1000  # at least 0.5 s


def test_what_a_replay_left_out_of_its_trace_is_said(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", 100, manifest={"num_left_out": 3, "num_after_end": 1200}))
    assert [threat for threat in summary.threats if "of the trace" in threat] == [
        "3 requests of the trace were left out: they have no tokens.",
        "1,200 requests of the trace were left out: they come after 10 s.",
    ]


def test_stalls_are_gaps_above_the_limit_of_the_scenario(tmp_path: Path) -> None:
    assert analyse(write_run(tmp_path / "run", 100, stall_s=0.2)).num_stalls == 100
    assert analyse(write_run(tmp_path / "none", 100, stall_s=0.4)).num_stalls == 0


def test_an_analysis_can_be_repeated(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 300)
    before = sorted(path.name for path in run.iterdir())
    assert msgspec.json.encode(analyse(run)) == msgspec.json.encode(analyse(run))
    assert sorted(path.name for path in run.iterdir() if path.name != "rows.parquet") == before


def test_metrics_of_single_answers() -> None:
    request = ScheduledRequest(0, 0.0, "default", 10, 4)
    row = answered(request, 0.0)
    one = ScheduledRequest(0, 0.0, "default", 10, 1)
    assert bounds_s(one, row, "tpot", closed=False, stream=True) is None
    assert bounds_s(request, row, "max_itl", closed=False, stream=False) is None
    assert bounds_s(request, None, "e2e", closed=False, stream=True) == (math.inf, math.inf)
    all_at_once = msgspec.structs.replace(row, chunks=[(999.0, 4)])
    assert bounds_s(request, all_at_once, "tpot", closed=False, stream=True) == pytest.approx((0.4 / 3, 0.4 / 3))
    one_came = msgspec.structs.replace(row, chunks=[(999.0, 1)], output_tokens=1)
    assert bounds_s(request, one_came, "tpot", closed=False, stream=True) is None
    assert [bounds_s(request, row, "itl", closed=False, stream=True, q=q) for q in (0.5, 0.99)] == [(0.1, 0.1), (0.3, 0.3)]
    assert gaps_s(all_at_once).tolist() == [0, 0, 0]
    nothing_between = msgspec.structs.replace(
        row, chunks=[(10.0, 1), (20.0, 0), (35.0, 1), (40.0, 0), (41.0, 0), (47.0, 2), (50.0, 0)]
    )
    assert gaps_s(nothing_between).tolist() == pytest.approx([0.025, 0.012, 0])
    whole = msgspec.structs.replace(row, chunks=[], first_s=None, last_s=None)
    assert bounds_s(request, whole, "ttft", closed=False, stream=False) == (1.5, 1.5)  # a user sees nothing before the end


def test_rows_read_in_bulk_say_the_same_and_are_small(tmp_path: Path) -> None:
    def talk(row: Row) -> Row:
        row.text = "word " * 100
        return row

    run = write_run(tmp_path / "run", 10, talk)
    for row, at in zip(read_rows(run), range(10), strict=True):
        plain = answered(ScheduledRequest(at, at / 10, "default", 10, 4), at / 10)
        assert (list(row.chunks), row.chunks[-1], row.chunks[:1]) == (plain.chunks, plain.chunks[-1], plain.chunks[:1])
        assert isinstance(row.chunks, Chunks)
        assert gaps_s(row).tolist() == gaps_s(plain).tolist()
        assert len(row.text) == 60


def test_only_a_last_line_without_its_end_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 10)
    whole = (run / "rows.jsonl").read_bytes()
    (run / "rows.jsonl").write_bytes(whole + b'{"id": 1')
    assert len(read_rows(run)) == 10
    (run / "rows.jsonl").write_bytes(whole + b'{"id": 1\n')
    with pytest.raises(UsageError, match=r"rows\.jsonl:11"):
        read_rows(run)


def test_a_source_that_only_failed_is_a_threat(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 100)
    samples = [ServerSample(t, "metrics", error="404 Not Found") for t in (0.0, 1.0)]
    samples += [ServerSample(0.0, "serve", error="refused"), ServerSample(1.0, "serve", {"replicas_ready/a": 1.0})]
    (run / "server.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(samples))
    said = [threat for threat in analyse(run).threats if threat.startswith("Nothing is known")]
    assert said == ["Nothing is known of the target's own figures (metrics): 404 Not Found."]


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


def test_one_request_makes_no_infinite_rate(tmp_path: Path) -> None:
    closed = {"law": "closed", "concurrency": 1, "max_requests": 1}
    found = analyse(write_run(tmp_path / "run", 1, arrival=closed, duration_s=60)).throughput
    assert found is None or found.offered < 10

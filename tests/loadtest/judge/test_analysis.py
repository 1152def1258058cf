"""These tests compute figures of runs with rows written by hand: expected values are counted by hand, not by the tested code."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest.errors import UsageError
from loadtest.judge.analysis import analyse
from loadtest.judge.metrics import bounds_s, gaps_s
from loadtest.judge.summary import Summary, interval, rate_interval
from loadtest.records import Chunks, Row, RunEvent, ScheduledRequest, read_rows
from loadtest.report.report import write_report
from tests.loadtest.judge.written_runs import answered, ended, every_fourth, quantile, write_run
from tests.loadtest.synthetic import write_lines


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


@pytest.mark.parametrize("every", [1, 30])
def test_prompts_whose_tokens_nobody_told_are_not_counted_as_empty(tmp_path: Path, every: int) -> None:
    def untold(row: Row) -> Row:
        return msgspec.structs.replace(row, prompt_tokens=None) if row.id % every == 0 else row

    run = write_run(tmp_path / "run", 100, untold)
    summary = analyse(run)
    assert summary.throughput is not None
    assert (summary.throughput.total_tokens, "total_tokens" in summary.throughput.intervals) == (None, False)
    said = "Some complete answers do not say how many tokens their prompts had: there is no rate of tokens, prompts included."
    assert said in summary.threats
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary
    page = write_report(run).read_text()
    assert ("output tokens" in page, "<td>tokens, prompts included" in page, "with prompts" in page) == (True, False, False)


def test_the_intervals_of_the_rates_hold_what_the_load_is(tmp_path: Path) -> None:
    throughput = analyse(write_run(tmp_path / "run", 1000, slo="ttft_p99=2s")).throughput
    assert throughput is not None
    low, high = throughput.intervals["goodput"]
    assert low <= throughput.goodput == 10 <= high
    low, high = throughput.intervals["completed"]
    assert low <= 10 <= high  # the first 1.5 s are short of answers, which the interval allows for
    assert set(throughput.intervals) == {"offered", "completed", "goodput", "output_tokens", "total_tokens"}


def test_a_rate_of_fewer_than_20_requests_has_no_interval(tmp_path: Path) -> None:
    few, enough = (analyse(write_run(tmp_path / str(num), 100, every_fourth(num))).throughput for num in (19, 20))
    assert few is not None
    assert enough is not None
    assert (few.completed, enough.completed) == (1.9, 2.0)
    assert set(few.intervals) == {"offered"}
    assert set(enough.intervals) == {"offered", "completed", "goodput", "output_tokens", "total_tokens"}
    assert (rate_interval(few, "completed"), rate_interval(few, "output_tokens")) == ("1.9", "7.6")


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


@pytest.mark.parametrize(("num_failed", "words"), [(0, "1000 ms [1000, 1000]"), (50, "1000 ms [1000, ∞]")])
def test_a_percentile_whose_upper_bound_is_a_failed_request_says_so(tmp_path: Path, num_failed: int, words: str) -> None:
    """At most 0.83 % of 6,000 requests failed, so that the p99 is known, but not how far above it the failed ones begin."""
    failed = set(np.random.Generator(np.random.Philox(1)).permutation(6000)[:num_failed].tolist())
    run = write_run(tmp_path / "run", 6000, lambda row: ended(row, "http_error", row.due_s) if row.id in failed else row)
    summary = analyse(run)
    p99 = quantile(summary, "ttft", 0.99)
    assert p99.high_failed is (num_failed > 0)
    assert interval(p99) == words
    said = [threat for threat in summary.threats if "no upper bound" in threat]
    assert said == (
        ["The p99 of ttft and e2e has no upper bound: its interval reaches the requests that failed, timed out or were left, "
         "which have none. A longer run does not change that."] if num_failed else []
    )  # fmt: skip


def test_a_percentile_of_too_few_samples_is_not_said_to_have_failed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 100, lambda row: ended(row, "http_error", row.due_s) if row.id == 50 else row)
    summary = analyse(run)
    assert not quantile(summary, "ttft", 0.99).high_failed
    said = [threat for threat in summary.threats if "no upper bound" in threat]
    assert said == ["The p99 of ttft and e2e has no upper bound: too few independent samples; run longer or replicate."]


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


def test_a_closed_loop_counts_from_sending_and_says_so(tmp_path: Path) -> None:
    arrival = {"law": "closed", "concurrency": 4, "max_requests": 1000}
    summary = analyse(write_run(tmp_path / "run", 1000, arrival=arrival))
    assert summary.loop == "closed"
    assert quantile(summary, "ttft", 0.5).value_s == pytest.approx(0.999)
    assert any("closed loop" in threat for threat in summary.threats)


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


def test_faults_that_did_not_happen_are_not_counted_as_injected(tmp_path: Path) -> None:
    faults = [{"at_s": at_s, "action": "command", "command": ["true"]} for at_s in (1, 1.5, 60)]
    run = write_run(tmp_path / "run", 20, faults=faults)
    events = [RunEvent(1.0, "fault", "command: true"), RunEvent(1.1, "fault-end", "command: exit status 0")]
    write_lines(run / "events.jsonl", [*events, RunEvent(1.5, "fault", "command: true"), RunEvent(1.6, "note", "it went wrong")])
    assert "2 faults were injected on purpose." in analyse(run).threats


def test_one_request_makes_no_infinite_rate(tmp_path: Path) -> None:
    closed = {"law": "closed", "concurrency": 1, "max_requests": 1}
    found = analyse(write_run(tmp_path / "run", 1, arrival=closed, duration_s=60)).throughput
    assert found is None or found.offered < 10

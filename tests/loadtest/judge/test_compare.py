import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.errors import InvalidRun
from loadtest.judge.analysis import rate_counts
from loadtest.judge.compare import Comparison, Ratio, compare
from loadtest.judge.metrics import metric_bounds, read_records
from loadtest.judge.pairs import Pairs
from loadtest.judge.series import InMemory, log_ratio
from loadtest.judge.stats import rate_ratio_interval
from loadtest.judge.window import Window
from loadtest.records import Row, ScheduledRequest
from loadtest.report.report import write_report
from tests.loadtest import synthetic
from tests.loadtest.judge.written_runs import (
    answered,
    ended,
    every_fourth,
    lasting,
    slow_at_first,
    write_conversations,
    write_run,
)


def run_of(folder: Path, factor: float = 1.0, *, noise: int = 1, seed: int = 1, num: int = 2000, **kwargs: Any) -> Path:
    """TTFTs of one law, by request and seed the same, times ``factor`` and 2 % noise of the run."""
    common = np.random.Generator(np.random.Philox([seed, 1])).lognormal(0, 0.5, num)
    own = np.random.Generator(np.random.Philox([noise, 2])).normal(1, 0.02, num)
    return write_run(folder, num, lasting((factor * common * own).tolist()), **kwargs)


def ttft(found: Comparison, q: float) -> Ratio:
    return next(ratio for ratio in found.ratios if (ratio.metric, ratio.q) == ("ttft", q))


def test_a_run_that_is_ten_percent_faster_is_claimed(tmp_path: Path) -> None:
    found = compare(run_of(tmp_path / "a", 0.9), run_of(tmp_path / "b", noise=2))
    assert (found.paired, found.num_common, found.verdict) == (True, 2000, "a faster")
    assert ttft(found, 0.5).ratio == pytest.approx(0.9, rel=0.02)
    assert ttft(found, 0.5).claim == "a faster"
    assert compare(tmp_path / "b", tmp_path / "a").verdict == "b faster"
    assert found.lines()[0] == "a / b: a faster (2000 requests, each with itself)"


def test_a_run_that_is_named_by_a_dot_has_the_name_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "seed-1", 200)
    write_run(tmp_path / "seed-2", 200)
    monkeypatch.chdir(tmp_path / "seed-1")
    found = compare(Path(), Path("../seed-2/."))
    assert (found.a, found.b) == ("seed-1", "seed-2")
    assert "seed-1" in write_report(Path("../seed-2"), other=Path()).read_text()


def test_equal_runs_show_no_difference(tmp_path: Path) -> None:
    found = compare(run_of(tmp_path / "a"), run_of(tmp_path / "b", noise=2))
    assert found.verdict == "no difference shown"
    rates = {rate.name: rate for rate in found.rates}
    assert list(rates) == ["requests/s completed", "requests/s good", "output tokens/s"]
    tokens = rates["output tokens/s"]
    assert tokens.ratio == pytest.approx(1.0, abs=0.01)
    assert tokens.low is not None
    assert tokens.high is not None
    assert tokens.low <= 1 <= tokens.high
    assert str(tokens).startswith("output tokens/s x1.0")


def test_a_run_that_serves_a_tenth_less_is_seen_in_its_rates(tmp_path: Path) -> None:
    def every_tenth_fails(row: Row) -> Row:
        return ended(row, "http_error", row.due_s) if row.id % 10 == 0 else row

    few = write_run(tmp_path / "few", 2000, every_tenth_fails)
    rates = {rate.name: rate for rate in compare(few, run_of(tmp_path / "all")).rates}
    good = rates["requests/s good"]
    assert good.ratio == pytest.approx(0.9, abs=0.005)
    assert good.high is not None
    assert good.high < 0.95
    nothing = write_run(tmp_path / "nothing", 2000, lambda row: ended(row, "http_error", row.due_s))
    assert next(str(rate) for rate in compare(nothing, few).rates) == "requests/s completed x0.000 (no interval)"


def test_the_ratio_of_rates_has_no_interval_if_one_run_counts_fewer_than_20_requests(tmp_path: Path) -> None:
    few, enough = (write_run(tmp_path / str(num), 100, every_fourth(num)) for num in (19, 20))
    assert [str(rate) for rate in compare(few, enough).rates] == [
        "requests/s completed x0.950 (no interval)",
        "requests/s good x0.950 (no interval)",
        "output tokens/s x0.950 (no interval)",
    ]
    assert str(compare(enough, enough).rates[0]).endswith("x1.000 (1.000 .. 1.000)")


def test_the_tail_of_a_short_run_is_not_compared(tmp_path: Path) -> None:
    found = compare(run_of(tmp_path / "a", 0.9, num=200), run_of(tmp_path / "b", noise=2, num=200))
    assert ttft(found, 0.99) == Ratio("ttft", 0.99, None, None, None, "not estimable")


def test_a_run_that_failed_is_said_to_have_failed(tmp_path: Path) -> None:
    refused = write_run(tmp_path / "refused", 200, lambda row: ended(row, "http_error", row.due_s))
    said = compare(refused, write_run(tmp_path / "served", 200)).lines()
    assert any(line.startswith("Requests failed: 200 of 200 in refused, 0 of 200 in served.") for line in said)


def failing(folder: Path, share: float, state: str = "http_error", factor: float = 0.5, **values: Any) -> Path:
    """Like `run_of`, twice as fast, but the ``share`` of the requests that chance picks ended in ``state``."""
    took_s = factor * np.random.Generator(np.random.Philox([1, 1])).lognormal(0, 0.5, 2000)
    fails = np.random.Generator(np.random.Philox([3, 3])).random(2000) < share

    def change(row: Row) -> Row:
        whole = answered(ScheduledRequest(row.id, row.due_s, "default", 10, 4), row.due_s, float(took_s[row.id]))
        return ended(row, state, row.due_s + (120 if state == "timeout" else 0.1)) if fails[row.id] else whole

    return write_run(folder, 2000, change, **values)


@pytest.mark.parametrize(("state", "low"), [("http_error", math.inf), ("timeout", 20.0)])
def test_a_run_whose_percentile_failed_is_slower_than_one_whose_did_not(tmp_path: Path, state: str, low: float) -> None:
    """One that answers twice as fast, but not 38 % of its requests, is not the faster one."""
    a, b = failing(tmp_path / "a", 0.38, state), run_of(tmp_path / "b", noise=2)
    found, turned = compare(a, b), compare(b, a)
    assert ttft(found, 0.5).claim == "a faster"
    at, back = ttft(found, 0.95), ttft(turned, 0.95)
    assert (at.ratio, at.high, at.claim) == (math.inf, math.inf, "b faster")
    assert at.low is not None
    assert back.high is not None
    assert at.low >= low
    assert (back.ratio, back.low, back.claim) == (0.0, 0.0, "a faster")
    assert back.high == pytest.approx(1 / at.low)
    assert (found.verdict, turned.verdict) == ("mixed", "mixed")
    assert any(str(line).startswith("ttft p95 x∞ (") for line in found.lines())
    assert "the other run is faster" in write_report(a, other=b).read_text()


def test_a_run_in_which_all_failed_is_the_slower_one(tmp_path: Path) -> None:
    found = compare(failing(tmp_path / "a", 1.0), run_of(tmp_path / "b"))
    assert {ratio.claim for ratio in found.ratios if ratio.q < 0.99} == {"b faster"}
    assert found.verdict == "b faster"
    both = compare(tmp_path / "a", failing(tmp_path / "c", 1.0))
    assert (both.verdict, {ratio.claim for ratio in both.ratios}) == ("not estimable", {"not estimable"})


def test_one_outage_claims_no_percentile(tmp_path: Path) -> None:
    """60 of 2,000 requests, in a row, failed: one outage, and no run of this length can show how often outages come."""

    def outage(row: Row) -> Row:
        return ended(row, "http_error", row.due_s) if 1000 <= row.id < 1060 else row

    found = compare(write_run(tmp_path / "a", 2000, outage), write_run(tmp_path / "b", 2000))
    assert {ratio.claim for ratio in found.ratios if ratio.q == 0.99} == {"not estimable"}
    assert found.verdict == "no difference shown"


def test_what_an_interrupted_run_left_is_no_failure_of_its_target(tmp_path: Path) -> None:
    """Both runs answer alike; of the first, interrupted at 20 s, the requests of the last 3 s have no first token."""

    def cut_off(row: Row) -> Row | None:
        return None if row.due_s >= 20 else ended(row, "cancelled", 20.0) if row.due_s >= 17 else row

    a = write_run(tmp_path / "a", 2000, cut_off, manifest={"state": "interrupted", "ended_s": 20.0})
    found = compare(a, write_run(tmp_path / "b", 2000))
    assert {ratio.claim for ratio in found.ratios} <= {"not estimable", "no difference shown"}


def test_requests_that_were_cancelled_here_and_there_are_no_failures_either(tmp_path: Path) -> None:
    """As with `cancel_after_s`: of the first run every fifth request has no first token."""
    a = write_run(tmp_path / "a", 2000, lambda row: ended(row, "cancelled", row.due_s + 3) if row.id % 5 == 0 else row)
    found = compare(a, write_run(tmp_path / "b", 2000))
    claims = {ratio.claim for ratio in found.ratios if ratio.metric in ("ttft", "e2e")}
    assert "not estimable" in claims
    assert claims <= {"not estimable", "no difference shown"}


def test_different_schedules_are_strangers(tmp_path: Path) -> None:
    other = run_of(tmp_path / "b", noise=2, seed=2, session="another")
    found = compare(run_of(tmp_path / "a"), other)
    assert (found.paired, found.num_common) == (False, 0)
    assert found.verdict == "no difference shown"
    assert any("different schedules" in threat for threat in found.threats)


def test_an_invalid_run_is_not_compared(tmp_path: Path) -> None:
    run_of(tmp_path / "a")
    with pytest.raises(InvalidRun, match="worker 1 was lost"):
        compare(tmp_path / "a", run_of(tmp_path / "b", manifest={"problems": ["worker 1 was lost"]}))


def test_an_invalid_run_is_compared_anyway_if_asked_and_the_output_says_so(tmp_path: Path) -> None:
    run_of(tmp_path / "a")
    bad = run_of(tmp_path / "b", manifest={"problems": ["worker 1 was lost"]})
    with pytest.raises(InvalidRun, match="compare --anyway shows the ratios with this mark"):
        compare(tmp_path / "a", bad)
    first, *rest = compare(tmp_path / "a", bad, anyway=True).lines()
    assert first.startswith("a / b (INVALID): no difference shown")
    assert "Invalid: b: worker 1 was lost" in rest
    assert sum(line.startswith("ttft p") for line in rest) > 0
    assert compare(tmp_path / "a", tmp_path / "a", anyway=True).threats == compare(tmp_path / "a", tmp_path / "a").threats


def conversations(folder: Path, slower: float = 1.0, *, num: int = 400, **kwargs: Any) -> Path:
    """Each turn takes another time than all others, and in a run that is ``slower`` so many times as long.

    The median is 0.3 s, and one turn in six takes more than three times as long, so that a slower run has its later turns in another order.
    """
    took_s = np.random.Generator(np.random.Philox(5)).lognormal(np.log(0.3), 1.2, 3 * num).tolist()
    return write_conversations(folder, took_s, slower=slower, **kwargs)


def due_ids(run: Path) -> list[int]:
    """Requests that are due in the window of 40 s, in the order of their due times."""
    return [row.id for row in sorted(read_records(run).rows, key=lambda row: row.due_s) if row.due_s < 40]


@pytest.mark.parametrize(("metric", "q"), [("ttft", 0.5), ("ttft", 0.9), ("e2e", 0.5), ("e2e", 0.9)])
def test_later_turns_that_come_at_other_times_are_compared_with_themselves(tmp_path: Path, metric: str, q: float) -> None:
    """Only of a request and itself is the ratio the same everywhere, so that its interval is a point."""
    a, b = conversations(tmp_path / "a", 1.25), conversations(tmp_path / "b")
    found = compare(a, b)
    ids = [due_ids(run) for run in (a, b)]
    common = set(ids[0]) & set(ids[1])
    assert [key for key in ids[0] if key in common] != [key for key in ids[1] if key in common]
    assert (found.paired, found.num_common) == (True, len(common))
    at = next(ratio for ratio in found.ratios if (ratio.metric, ratio.q) == (metric, q))
    assert (at.ratio, at.low, at.high) == pytest.approx((1.25, 1.25, 1.25), rel=1e-6)


def test_which_run_is_called_a_only_turns_the_ratios_around(tmp_path: Path) -> None:
    """Also where their later turns come in other orders, and one of them slows down so that its later requests resemble each other."""
    a = conversations(tmp_path / "a", 1.25, fails=lambda number: number % 50 == 7)
    b = conversations(tmp_path / "b")
    found, turned = compare(a, b), compare(b, a)
    names = {"a faster": "b faster", "b faster": "a faster"}
    assert len([at for at in found.ratios if at.ratio is not None]) > 6
    for at, back in zip(found.ratios, turned.ratios, strict=True):
        assert back.claim == names.get(at.claim, at.claim)
        assert (back.ratio is None) == (at.ratio is None)
        if at.ratio is not None and at.low is not None and at.high is not None:
            assert (back.ratio, back.low, back.high) == pytest.approx((1 / at.ratio, 1 / at.high, 1 / at.low), rel=1e-9)
    assert (turned.num_only_a, turned.num_only_b) == (found.num_only_b, found.num_only_a)


def test_each_run_is_judged_in_the_order_of_its_own_due_times(tmp_path: Path) -> None:
    """The number of independent samples, and whether the run was long enough, depend on the run's own order."""
    a, b = (
        Window.of(read_records(conversations(tmp_path / name, slow))).between(0, 40) for name, slow in (("a", 3.0), ("b", 1.0))
    )
    pairs = Pairs.of(a, b)
    for window, common, series in zip((a, b), pairs.windows, pairs.series("ttft"), strict=True):
        kept = [k for k, key in enumerate(window.ids.tolist()) if key in set(common.ids.tolist())]
        own = window.bounds("ttft").high[kept]
        assert series.worth(0.9) == InMemory(own, own).worth(0.9)
        assert series.resolved == InMemory(own, own).resolved
        assert series.low is series.high  # one array sorted once
    blocks = [series.left_out(0.9) for series in pairs.series("ttft")]
    assert blocks[0] / blocks[1] == pytest.approx(np.full(10, 3.0), rel=1e-6)


def test_requests_that_were_due_in_one_window_only_are_counted_and_named(tmp_path: Path) -> None:
    """A run fails at each fifth conversation; the turns after the failure are missing on both sides."""
    a, b = conversations(tmp_path / "a", fails=lambda number: number % 15 == 0), conversations(tmp_path / "b")
    found = compare(a, b)
    ids = [set(due_ids(run)) for run in (a, b)]
    only = len(ids[0] - ids[1]), len(ids[1] - ids[0])
    assert only[0] == 0 < 100 < only[1]
    assert (found.num_only_a, found.num_only_b) == only
    assert found.lines()[0].endswith(f"({found.num_common} requests, each with itself; 0 due only in a, {only[1]} only in b)")
    said = [threat for threat in found.threats if "flatter" in threat]
    assert len(said) == 1
    assert said[0].startswith(f"0 requests were due in the window of a only and {only[1]} in that of b only; no ratio")
    assert not any("flatter" in threat for threat in compare(b, b).threats)


def test_each_ratio_is_that_of_the_rows_of_requests_that_are_in_both_windows(tmp_path: Path) -> None:
    """`compare` itself reads no row as such, and keeps no gap between tokens."""
    a, b = (
        synthetic.write_run(tmp_path / name, slow=slow, scenario={"duration_s": 40}) for name, slow in (("a", 1.0), ("b", 1.2))
    )
    found, runs = compare(a, b), (read_records(a), read_records(b))
    by_id = [{item.request.id: item for item in run.items() if 5 <= item.due_s < 40} for run in runs]
    assert found.num_common == len(by_id[0])
    for at in found.ratios:
        values = []
        for run, items in zip(runs, by_id, strict=True):
            bounds = metric_bounds(run, list(items.values()), at.metric)[1]
            values.append(InMemory(bounds, bounds))
        apart = log_ratio(values[0], values[1], at.q, paired=at.metric != "itl")
        expected = (None, None, None) if apart is None else pytest.approx(apart.interval(), rel=1e-9)
        assert (at.ratio, at.low, at.high) == expected
    assert len([at for at in found.ratios if at.ratio is not None]) > 8


def test_rates_of_conversations_have_intervals_of_two_loads(tmp_path: Path) -> None:
    """Where later turns come at other times, the parts of the window have other arrivals, and no chance cancels."""
    a, b = conversations(tmp_path / "a", 1.25), conversations(tmp_path / "b")
    runs = read_records(a), read_records(b)
    counts = [rate_counts(run, Window.of(run).between(0, 40), (0, 40))["completed"] for run in runs]
    completed = compare(a, b).rates[0]
    apart = rate_ratio_interval(counts[0], counts[1], paired=False)
    assert (completed.ratio, completed.low, completed.high) == pytest.approx(apart, rel=1e-12)
    assert any("as those of two different loads" in threat for threat in compare(a, b).threats)
    same = compare(run_of(tmp_path / "c", num=200), run_of(tmp_path / "d", num=200, noise=2))
    assert not any("two different loads" in threat for threat in same.threats)


def test_a_report_beside_a_run_whose_later_turns_came_at_other_times(tmp_path: Path) -> None:
    a, b = conversations(tmp_path / "a", 1.25, num=100), conversations(tmp_path / "b", num=100)
    num = compare(a, b).num_common
    assert f"paired: {num} requests of one schedule" in write_report(a, other=b).read_text()


def test_times_between_tokens_that_came_together_have_no_ratio(tmp_path: Path) -> None:
    def in_one_read(row: Row) -> Row:
        assert row.first_s is not None
        row.last_s, row.chunks = row.first_s, [(row.chunks[0][0], 4)]
        return row

    found = compare(write_run(tmp_path / "a", 2000), write_run(tmp_path / "b", 2000, in_one_read))
    claims = {(ratio.metric, ratio.q): (ratio.ratio, ratio.claim) for ratio in found.ratios}
    assert claims["tpot", 0.5] == claims["itl", 0.5] == (None, "not estimable")
    assert claims["ttft", 0.5][1] == "no difference shown"


def test_a_warm_up_that_was_found_in_one_run_is_named(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", 1200, slow_at_first, warmup_s=5), write_run(tmp_path / "b", 1200, warmup_s=5)
    found = compare(a, b)
    assert found.num_common == 1000
    said = [threat for threat in found.threats if "warm-up" in threat]
    assert said == ["The warm-up of a took 20 s, not the 5 s of the scenario: earlier requests are left out of both runs."]
    other = write_run(tmp_path / "other", 1200, warmup_s=5, session="other")
    said = [threat for threat in compare(a, other).threats if "warm-up" in threat]
    assert said == ["The warm-up of a took 20 s, not the 5 s of the scenario: earlier requests are left out of that run."]


def test_runs_of_two_scenarios_are_said_to_be_and_goodput_under_two_slos_has_no_ratio(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", slo="ttft_p90=2s", observe={"fleet": True})
    b = run_of(tmp_path / "b", noise=2, slo="ttft_p90=800ms", timeout_s=30, workers=2, name="another-name")
    found = compare(a, b)
    said = [threat for threat in found.threats if "differ" in threat and "scenario" in threat]
    assert said == [
        "The scenarios of the two runs differ in timeout_s, slo: a difference between the runs may come from that alone."
    ]
    assert [rate.name for rate in found.rates] == ["requests/s completed", "output tokens/s"]
    alike = compare(run_of(tmp_path / "c", slo="ttft_p90=2s", seed=2, session="c"), a)
    assert not any("The scenarios" in threat for threat in alike.threats)
    assert [rate.name for rate in alike.rates] == ["requests/s completed", "requests/s good", "output tokens/s"]
    model = compare(run_of(tmp_path / "d", slo="ttft_p90=2s", manifest={"model": "another"}), a)
    assert any(threat.startswith("The scenarios of the two runs differ in model:") for threat in model.threats)

from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from loadtest.errors import UsageError
from loadtest.judge.plan import Interval, make_plan, samples_needed
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
from loadtest.plan.slo import parse_slo


def plan_of(arrival: dict[str, Any], **values: Any) -> Any:
    cls = {"input_tokens": {"mean": 100}, "output_tokens": {"mean": 50}}
    scenario = parse_scenario({"name": "t", "arrival": arrival, "requests": [cls], **values})
    return make_plan(scenario, make_schedule(scenario))


@pytest.mark.parametrize("quantile", [0.01, 0.5, 0.9, 0.95, 0.99, 0.999])
def test_so_many_samples_bound_a_percentile_and_one_less_does_not(quantile: float) -> None:
    """Ranks l < u with P(fewer than l below the quantile) <= 2.5 % and P(u or more) <= 2.5 % exist: that is the definition."""

    def bounded(num: int) -> bool:
        below = stats.binom(num, quantile)
        return bool(below.cdf(0) <= 0.025 and below.sf(num - 1) <= 0.025)

    needed = samples_needed(quantile)
    assert bounded(needed)
    assert not bounded(needed - 1)


def test_the_published_sample_sizes() -> None:
    assert [samples_needed(q) for q in (0.95, 0.99, 0.999)] == [72, 368, 3688]


def test_a_plan_of_conversations_says_that_it_is_an_upper_bound_without_history() -> None:
    talk = {"endpoint": "chat", "prompt": "text", "conversation": {"turns": {"mean": 3}, "think_s": {"mean": 1}}}
    requests, tokens, *_ = plan_of({"law": "constant", "rate": 2}, requests=[talk]).lines()
    assert requests.startswith("requests    at most ")
    assert "of prompts without what each turn repeats of its conversation, " in tokens


def test_a_plan_counts_requests_tokens_time_and_workers() -> None:
    plan = plan_of({"law": "constant", "rate": 100}, duration_s=120, warmup_s=20, drain_s=60, slo="ttft_p99.5=1s")
    assert (plan.num_requests, plan.num_samples) == (12_000, 10_000)
    assert (plan.mean_rate, plan.peak_rate) == (100, 100)
    assert (plan.input_tokens, plan.output_tokens) == (1_200_000, 600_000)
    assert (plan.duration_s, plan.longest_s) == (120, 180)
    assert (plan.workers_needed, plan.workers) == (2, 1)  # 100 / 80 requests per second; 5000 / 10,240 tokens
    assert [i.quantile for i in plan.intervals] == [0.5, 0.9, 0.95, 0.99, 0.995, 0.999]
    assert plan.intervals[3] == Interval(0.99, 368, (20 + 368 / 100) / 60, possible=True)


def test_a_run_that_is_too_short_says_which_percentiles_it_cannot_bound() -> None:
    plan = plan_of({"law": "constant", "rate": 4}, duration_s=65, warmup_s=5)  # 240 samples
    assert {i.quantile: i.possible for i in plan.intervals} == {0.5: True, 0.9: True, 0.95: True, 0.99: False, 0.999: False}
    (line,) = (line for line in plan.lines() if line.startswith("p99 "))
    assert "NO interval" in line
    assert "needs 368 independent samples, 97 s" in line  # 5 + 92


def test_a_run_that_is_too_short_for_its_slo_says_so() -> None:
    arrival, slo = {"law": "constant", "rate": 1}, "ttft_p99=500ms,e2e_p90=9s,itl_p99=80ms"
    plan = plan_of(arrival, duration_s=506, warmup_s=0, slo=slo)
    assert [line for line in plan.lines() if line.startswith("SLO ")] == [
        "SLO         cannot be shown to be kept (exit status 5): ttft_p99=500ms; set a longer duration_s"
    ]
    assert plan_of(arrival, duration_s=507, warmup_s=0, slo=slo).undecidable == ()
    burst = plan_of({"law": "burst", "max_requests": 20}, slo="ttft_p99=500ms")
    assert burst.lines()[-2].endswith("ttft_p99=500ms; set more max_requests")


def test_workers_follow_the_busiest_ten_seconds_and_the_tokens() -> None:
    crowd = {"law": "flash-crowd", "rate": 1, "peak_rate": 400, "at_s": 30, "rise_s": 0, "hold_s": 10, "fall_s": 0}
    assert plan_of(crowd).workers_needed in (5, 6)  # 400 / 80, give or take a standard deviation of 6/s
    long = [{"output_tokens": {"mean": 2048}}]
    assert plan_of({"law": "constant", "rate": 10}, requests=long).workers_needed == 2  # 20,480 / 10,240


def test_a_closed_loop_and_a_burst_have_no_rate_of_their_own() -> None:
    closed, burst = (
        plan_of({"law": "closed", "concurrency": 450, "max_requests": 500}),
        plan_of({"law": "burst", "max_requests": 900}),
    )
    for plan, num in ((closed, 500), (burst, 900)):
        assert (plan.mean_rate, plan.peak_rate, plan.num_samples) == (None, None, num)
        assert plan.intervals[-2].minutes is None
        assert "rate set by the target" in plan.lines()[0]
    assert closed.workers_needed == 3  # 450 / 200 streams


def test_the_lines_name_what_to_change() -> None:
    lines = plan_of({"law": "constant", "rate": 100}).lines()
    assert "workers     2 needed; the scenario has 1: set workers: 2" in lines
    assert lines[0] == "requests    6,000 (5,500 after the warm-up), rate 100/s, 100/s in the busiest 10 s"


def test_times_are_said_as_people_say_them() -> None:
    lines = plan_of({"law": "constant", "rate": 1}, duration_s=110, drain_s=120).lines()
    assert "time        110 s of arrivals, at most 3.83 minutes with the last answers" in lines


def test_the_rate_of_a_trace_is_that_of_its_own_span(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"timestamp": {1000 * k}, "input_length": 8, "output_length": 4}}\n' for k in range(101)))
    plan = plan_of({"law": "trace", "file": str(trace)}, duration_s=1000, warmup_s=0)
    assert plan.mean_rate == 1.01  # 101 requests in 100 s
    assert plan.intervals[3].minutes == pytest.approx(368 / 1.01 / 60)


@pytest.mark.parametrize(
    ("percent", "quantile"), [("50", 0.5), ("97", 0.97), ("99.9", 0.999), ("99.99", 0.9999), ("99.99999", 0.9999999)]
)
def test_a_percentile_of_the_slo_is_the_quantile_that_one_would_write(percent: str, quantile: float) -> None:
    (limit,) = parse_slo(f"ttft_p{percent}=1s").limits
    assert (limit.quantile, str(limit)) == (quantile, f"ttft_p{percent}=1000ms")


@pytest.mark.parametrize("percent", ["0", "100", "99.99999999", "0.00000001"])
def test_a_percentile_that_is_none_or_all_is_refused(percent: str) -> None:
    with pytest.raises(UsageError, match="the percentile must be between 0 and 100"):
        parse_slo(f"ttft_p{percent}=1s")


def test_a_percentile_that_the_slo_names_too_is_planned_once() -> None:
    lines = plan_of({"law": "constant", "rate": 4}, slo="ttft_p99.9=1s,e2e_p97=2s").lines()
    assert [line.split()[0] for line in lines if line.startswith("p")] == ["p50", "p90", "p95", "p97", "p99", "p99.9"]

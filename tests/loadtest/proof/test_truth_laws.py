"""These tests compare the law server's pure laws with scipy and closed forms, and queue and stalls with counts by hand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from loadtest.errors import UsageError
from loadtest.proof.truth.laws import Laws, Timing
from loadtest.proof.truth.settings import load_law
from tests.loadtest.proof.test_truth import law_of


def timing_of(*, arrival_s: float, num_chunks: int = 1, **fields: Any) -> Timing:
    return Laws(law_of(**fields), seed=1).timing("r", arrival_s=arrival_s, num_chunks=num_chunks)


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        ({"law": "exponential", "mean_s": 0.3}, stats.expon(scale=0.3)),
        ({"law": "lognormal", "mean_s": 0.3, "cv": 0.5}, stats.lognorm(s=math.sqrt(math.log(1.25)), scale=0.3 / math.sqrt(1.25))),
    ],
)
@pytest.mark.parametrize("part", ["ttft", "gap", "service"])
def test_draws_follow_their_law(part: str, law: dict[str, Any], expected: Any) -> None:
    laws = Laws(law_of(**{part: law}), seed=7)
    timings = [laws.timing(f"r{i}", arrival_s=0, num_chunks=2) for i in range(5000)]
    made = np.array([timing.made_s for timing in timings])
    draws = {"ttft": made[:, 0], "gap": made[:, 1] - made[:, 0], "service": made[:, 1]}[part]
    assert stats.kstest(draws, expected.cdf).pvalue > 0.01


def test_gaps_of_one_request_follow_their_law_and_are_independent() -> None:
    """One row in a hundred is rejected by right: 20 rows, at most one rejection at 1 % (as T1 of the method)."""
    laws = Laws(law_of(gap={"law": "exponential", "mean_s": 0.02}), seed=1)
    rows = [np.diff(laws.timing(f"r{i}", arrival_s=0, num_chunks=5001).made_s) for i in range(20)]
    assert sum(stats.kstest(gaps, stats.expon(scale=0.02).cdf).pvalue < 0.01 for gaps in rows) <= 1
    assert sum(stats.spearmanr(gaps[1:], gaps[:-1]).pvalue < 0.01 for gaps in rows) <= 1


def test_a_two_point_law_has_two_points() -> None:
    laws = Laws(law_of(ttft={"law": "two-point", "low_s": 0.1, "high_s": 0.3, "high_probability": 0.2}), seed=7)
    draws = [laws.timing(f"r{i}", arrival_s=0, num_chunks=1).made_s[0] for i in range(5000)]
    assert set(draws) == {0.1, 0.3}
    assert stats.binomtest(draws.count(0.3), 5000, 0.2).pvalue > 0.01


def test_draws_depend_on_seed_and_request_only() -> None:
    law = law_of(ttft={"law": "exponential", "mean_s": 1}, gap={"law": "exponential", "mean_s": 1})
    first, second = Laws(law, seed=1), Laws(law, seed=1)
    there = {name: first.timing(name, arrival_s=0, num_chunks=4).made_s for name in "abc"}
    back = {name: second.timing(name, arrival_s=0, num_chunks=9).made_s[:4] for name in "cba"}
    assert there == back
    assert there["a"] != there["b"]
    assert there["a"][1] - there["a"][0] != pytest.approx(there["a"][0])  # nor are a request's own draws the same
    assert Laws(law, seed=2).timing("a", arrival_s=0, num_chunks=4).made_s != there["a"]


def test_requests_beyond_the_slots_wait_in_order_of_arrival() -> None:
    laws = Laws(law_of(slots=2, service={"law": "constant", "s": 1.0}), seed=1)
    timings = [laws.timing(str(at), arrival_s=at, num_chunks=2) for at in (0.0, 0.25, 0.5, 0.75, 5.0)]
    # Two slots: 0-1 and 0.25-1.25; then 1-2 and 1.25-2.25; the last finds both free.
    assert [t.start_s for t in timings] == [0.0, 0.25, 1.0, 1.25, 5.0]
    assert [t.sent_s for t in timings] == [[0.5, 1.0], [0.75, 1.25], [1.5, 2.0], [1.75, 2.25], [5.5, 6.0]]


def test_a_full_server_that_refuses_lets_nobody_wait() -> None:
    laws = Laws(law_of(slots=2, service={"law": "constant", "s": 1.0}, refuses_when_full=True), seed=1)
    refused = []
    for at in (0.0, 0.25, 0.5, 0.75, 1.0, 1.125, 1.25, 5.0):
        if laws.refuses(at):
            refused.append(at)
        else:
            assert laws.timing(str(at), arrival_s=at, num_chunks=2).start_s == at
    # Two slots: 0-1 and 0.25-1.25; then 1-2 and 1.25-2.25.
    assert refused == [0.5, 0.75, 1.125]


def test_a_full_server_refuses_the_share_that_the_formula_says() -> None:
    laws = Laws(law_of(slots=2, service={"law": "exponential", "mean_s": 1.0}, refuses_when_full=True), seed=3)
    num_refused = 0
    for at in np.cumsum(np.random.default_rng(3).exponential(1.0, 40_000)):
        if laws.refuses(at):
            num_refused += 1
        else:
            laws.timing(str(at), arrival_s=at, num_chunks=1)
    assert num_refused / 40_000 == pytest.approx(0.2, abs=0.01)  # Erlang's B of 2 servers with offered load 1: 1/2 of 1 + 1 + 1/2


def test_a_queue_of_one_exponential_slot_waits_as_long_as_the_formula_says() -> None:
    laws = Laws(law_of(slots=1, service={"law": "exponential", "mean_s": 1.0}), seed=3)
    arrivals = np.cumsum(np.random.default_rng(3).exponential(2.0, 40_000))
    waits = [t.start_s - t.arrival_s for t in (laws.timing(str(at), arrival_s=at, num_chunks=1) for at in arrivals)]
    assert np.mean(waits) == pytest.approx(1.0, rel=0.06)  # rho / (mu - lambda) = 0.5 / 0.5
    assert np.mean(np.asarray(waits) == 0) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("arrival_s", "accepted_s", "sent_s"),
    [
        (9.0, 9.0, [9.5, 9.75]),
        (9.25, 9.25, [9.75, 15.0]),  # the second chunk was due when the stall began
        (9.75, 9.75, [15.25, 15.5]),
        (12.0, 15.0, [15.5, 15.75]),
        (15.0, 15.0, [15.5, 15.75]),
        (19.75, 19.75, [21.25, 21.5]),
    ],
)
def test_in_a_stall_the_servers_clock_stands_still(arrival_s: float, accepted_s: float, sent_s: list[float]) -> None:
    times = {"ttft": {"law": "constant", "s": 0.5}, "gap": {"law": "constant", "s": 0.25}}
    timing = timing_of(arrival_s=arrival_s, num_chunks=2, stalls=[{"at_s": 10, "for_s": 5}, {"at_s": 20, "for_s": 1}], **times)
    assert (timing.accepted_s, timing.sent_s) == (accepted_s, sent_s)


@pytest.mark.parametrize(
    ("shape", "at_s", "factor"), [("linear", 0, 3), ("linear", 5, 2), ("linear", 10, 1), ("step", 9.5, 3), ("step", 10, 1)]
)
def test_warm_up_slows_what_starts_in_it(shape: str, at_s: float, factor: float) -> None:
    timing = timing_of(arrival_s=at_s, num_chunks=2, warm_up={"for_s": 10, "factor": 3, "shape": shape})
    assert timing.made_s == pytest.approx([at_s + factor * 0.01, at_s + factor * 0.011])


def test_the_edge_delays_every_chunk_and_takes_no_slot() -> None:
    laws = Laws(law_of(slots=1, edge={"law": "constant", "s": 0.5}), seed=1)
    timings = [laws.timing(str(k), arrival_s=0, num_chunks=2) for k in range(2)]
    assert [t.start_s for t in timings] == pytest.approx([0.0, 0.011])
    assert timings[1].sent_s == pytest.approx([0.521, 0.522])


def test_failures_hit_every_kth_request_or_a_share_that_depends_on_the_request() -> None:
    laws = Laws(law_of(failures=[{"kind": "drop", "every": 3}, {"kind": "html", "probability": 0.1}]), seed=5)
    found = {n: failure.kind for n in range(1, 6001) if (failure := laws.failure(f"r{n}", n))}
    assert [n for n, kind in found.items() if kind == "drop"] == list(range(3, 6001, 3))
    html = {n for n, kind in found.items() if kind == "html"}
    assert stats.binomtest(len(html), 4000, 0.1).pvalue > 0.01
    assert html == {n for n in range(1, 6001) if n % 3 and laws.failure(f"r{n}", 1)}  # whatever its place


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttfb: {law: constant, s: 1}", "ttfb"),
        ("ttft: {law: constant, s: -1}", "ttft.constant.s"),
        ("stalls: [{at_s: 1, for_s: 5}, {at_s: 2, for_s: 1}]", "the one at 2 begins before the one at 1 has ended"),
        ("failures: [{kind: drop}]", "give either every or probability, got every 0 and probability 0"),
        ("split: 0", "split 0 is below 1"),
        ("refuses_when_full: true", "refuses_when_full with slots 0"),
        ("a: [", "law.yaml"),
    ],
)
def test_a_wrong_law_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "law.yaml").write_text(text)
    with pytest.raises(UsageError) as error:
        load_law(tmp_path / "law.yaml")
    assert message in str(error.value)

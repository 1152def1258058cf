import math

import numpy as np
import pytest
from scipy import stats as law

from loadtest.judge import stats
from loadtest.judge.series import InMemory, log_ratio
from loadtest.judge.stats import Floats
from loadtest.proof.coverage import Queue


def rng(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(list(key)))


def in_memory(values: Floats) -> InMemory:
    return InMemory(values, values)


def test_a_quantile_is_a_sample_and_infinite_values_stay_at_the_end() -> None:
    values = np.array([3.0, 1.0, math.inf, 2.0])
    assert [stats.quantile(values, q) for q in (0.25, 0.5, 0.75, 0.76)] == [1.0, 2.0, 3.0, math.inf]
    assert math.isnan(stats.quantile(np.array([]), 0.5))


@pytest.mark.parametrize(("num", "n"), [(0, 1), (0, 80), (0, 44_746), (1, 20), (19, 20)])
def test_at_the_bound_of_a_share_so_few_or_fewer_are_seen_once_in_twenty(num: int, n: int) -> None:
    assert law.binom.cdf(num, n, stats.share_bound(num, n)) == pytest.approx(0.05)


def test_a_share_of_which_all_or_no_samples_were_seen_has_the_bounds_known_by_heart() -> None:
    assert stats.share_bound(0, 300) == pytest.approx(3 / 300, rel=0.01)  # the rule of three
    assert stats.share_bound(5, 5) == stats.share_bound(0, 0) == 1.0


def test_a_rank_is_not_moved_by_the_rounding_of_the_product() -> None:
    assert stats.rank(100, 0.07) == 7  # 0.07 * 100 is 7.000000000000001


@pytest.mark.parametrize(
    ("n", "ranks"),
    [
        (100, (97, None)),
        (300, (293, None)),
        (368, (360, 368)),
        (1000, (983, 997)),
        (10_000, (9880, 9920)),
        (30_000, (29_666, 29_734)),
    ],
)
def test_ranks_of_the_p99_are_those_of_the_published_table(n: int, ranks: tuple[int, int | None]) -> None:
    assert stats.order_ranks(n, 0.99) == ranks


@pytest.mark.parametrize(("q", "first"), [(0.95, 72), (0.99, 368), (0.999, 3688)])
def test_the_first_sample_with_an_upper_bound(q: float, first: int) -> None:
    assert stats.order_ranks(first - 1, q)[1] is None
    assert stats.order_ranks(first, q)[1] == first


def test_ranks_cover_at_least_as_often_as_promised() -> None:
    for n, q in ((50, 0.5), (200, 0.9), (500, 0.99)):
        low, high = stats.order_ranks(n, q)
        assert low is not None
        assert high is not None
        assert law.binom.cdf(high - 1, n, q) - law.binom.cdf(low - 1, n, q) >= 0.95


def test_a_smaller_effective_size_widens_the_interval() -> None:
    values = np.sort(rng(1).lognormal(size=4000))
    wide, narrow = (stats.order_interval(values, values, 0.9, n) for n in (400, 4000))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert stats.order_interval(values, values, 0.99, 300)[1] == math.inf
    assert stats.order_interval(values, values, 0.99, 0.5) == (-math.inf, math.inf)


def test_bounds_of_given_up_requests_bound_the_interval() -> None:
    low = np.sort(np.r_[np.arange(950.0), np.full(50, 2000.0)])
    high = np.sort(np.r_[np.arange(950.0), np.full(50, math.inf)])
    assert stats.order_interval(low, high, 0.5, 1000) == stats.order_interval(low, low, 0.5, 1000)
    assert stats.order_interval(low, high, 0.99, 1000) == (2000.0, math.inf)


def test_independent_samples_count_nearly_all_and_repeated_ones_once() -> None:
    independent = rng(2).exponential(size=4000)
    widening = (law.norm.ppf(0.975) / law.t.ppf(0.975, 9)) ** 2
    assert 0.3 < stats.effective_size(independent, 0.99) / 4000 / widening <= 1
    repeated = np.repeat(rng(2).exponential(size=40), 100)
    assert stats.effective_size(repeated, 0.9) < 80


def test_a_constant_series_is_worth_all_its_samples_resolved_and_steady() -> None:
    same = np.ones(1000)
    widening = (law.norm.ppf(0.975) / law.t.ppf(0.975, 9)) ** 2
    assert stats.effective_size(same, 0.99) == pytest.approx(1000 * widening)
    assert stats.resolved(same)
    assert stats.drift_interval(np.arange(1000, dtype=np.float64), same) == (0.0, 0.0)


def test_failures_in_a_row_are_worth_less_than_as_many_that_are_apart() -> None:
    """Also for the percentile that lies among them. Of 4,000 requests 120 failed."""
    values = rng(6).exponential(size=4000)
    row, apart = values.copy(), values.copy()
    row[2000:2120], apart[rng(7).permutation(4000)[:120]] = math.inf, math.inf
    assert stats.effective_size(row, 0.99) < 200 < 1000 < stats.effective_size(apart, 0.99)


def test_a_run_shorter_than_its_swings_is_not_resolved() -> None:
    swing = np.sin(np.linspace(0, 2 * math.pi, 2000))
    assert not stats.resolved(swing + rng(3).normal(size=2000))
    assert stats.resolved(rng(3).normal(size=2000))


def test_replicates_scatter_into_the_interval() -> None:
    runs = [rng(4, k).exponential(size=500) for k in range(10)]
    value, low, high = stats.replicate_interval(runs, 0.9)
    assert value == stats.quantile(np.concatenate(runs), 0.9)
    assert low < math.log(10) < high  # the p90 of the exponential law
    assert stats.replicate_interval([np.full(9, math.inf)] * 3, 0.9) == (math.inf, -math.inf, math.inf)


def test_band_and_share_against_other_sources() -> None:
    assert stats.dkw_half_width(100) == pytest.approx(0.136, abs=5e-4)
    assert stats.dkw_half_width(10_000) == pytest.approx(0.0136, abs=5e-5)
    expected = law.binomtest(985, 1000).proportion_ci(method="wilson")
    assert stats.wilson(0.985, 1000) == pytest.approx((expected.low, expected.high))
    assert stats.wilson(1.0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.95, 0.99, 0.999])
@pytest.mark.parametrize("n", [1, 2, 5, 8, 20, 50, 100, 300, 2000])
def test_a_share_that_is_at_its_quantile_is_rarely_below_its_interval(q: float, n: int) -> None:
    """Summed over what n independent samples may show. Wilson's interval alone is below it in 10 % of the cases at q = 0.9 and n = 1."""
    below = [num for num in range(n + 1) if stats.share_interval(num / n, n)[1] < q]
    assert law.binom.pmf(below, n, q).sum() <= 0.025


def test_the_interval_of_a_share_is_wilsons_where_there_are_many_samples() -> None:
    assert stats.share_interval(0.985, 100_000) == pytest.approx(stats.wilson(0.985, 100_000), abs=1e-4)
    assert stats.share_interval(1.0, 10) == pytest.approx(stats.wilson(1.0, 10))
    assert stats.share_interval(0.5, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("q", "confidence", "needed"),
    [
        (0.99, 0.95, [299, 473, 628, 1049, 1693, 2902]),
        (0.99, 0.99, [459, 662, 838, 1307, 2010, 3304]),
        (0.95, 0.95, [59, 93, 124, 208, 336, 577]),
        (0.90, 0.95, [29, 46, 61, 103, 167, 286]),
    ],
)
def test_samples_to_pass_are_those_of_the_published_table(q: float, confidence: float, needed: list[int]) -> None:
    assert [stats.samples_to_pass(t, q, confidence) for t in (0, 1, 2, 5, 10, 20)] == needed


def test_the_sequential_rule_is_the_binomial_one() -> None:
    for n, violations in ((700, 0), (700, 1), (700, 3), (700, 20), (0, 0), (700, 700)):
        passes = n > 0 and law.binom.cdf(violations, n, 0.01) <= 0.01
        fails = n > 0 and law.binom.sf(violations - 1, n, 0.01) <= 0.01
        assert stats.sequential_verdict(n, violations, 0.99) == ("pass" if passes else "fail" if fails else "undecided")


@pytest.mark.parametrize("q", [0.9, 0.95, 0.99])
def test_four_looks_pass_falsely_in_less_than_one_search_of_twenty(q: float) -> None:
    """At the boundary, where the share of good requests is exactly q."""
    first, last = stats.samples_to_pass(2, q), stats.samples_to_pass(20, q)
    looks = np.geomspace(first, last, 4).astype(int)
    over = rng(5).random((4000, last)) > q
    seen = over.cumsum(axis=1)[:, looks - 1]
    allowed = np.searchsorted([stats.samples_to_pass(t, q) for t in range(25)], looks, side="right") - 1
    assert (seen <= allowed).any(axis=1).mean() <= 0.05


def test_mser_finds_the_end_of_a_step() -> None:
    values = np.r_[np.full(100, 9.0), np.ones(400)] + rng(6).normal(0, 0.1, 500)
    assert stats.mser5(values) == 100
    assert stats.mser5(np.ones(10)) == 0


def slow_at_first(seed: int) -> tuple[stats.Floats, stats.Floats]:
    """20 requests/s for 120 s at a server that takes twice as long in its first 20 s (T10)."""
    due = np.cumsum(rng(7, seed).exponential(1 / 20, 2600))
    due = due[due < 120]
    return due, rng(8, seed).lognormal(math.log(0.3), 0.5, due.size) * np.where(due < 20, 2.0, 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_first_20_s_is_found_within_5_s(seed: int) -> None:
    due, took = slow_at_first(seed)
    assert due[stats.transient_length(took)] == pytest.approx(20, abs=5)


@pytest.mark.parametrize("queue", [Queue(0, 0.0), Queue(1, 0.5), Queue(1, 0.8), Queue(32, 0.8)], ids=str)
def test_the_cut_does_not_eat_a_stationary_run(queue: Queue) -> None:
    runs = [queue.latencies(4000, rng(9, seed)) for seed in range(20)]
    assert np.mean([stats.transient_length(run) > 0.05 * run.size for run in runs]) <= 0.05


def test_failed_requests_at_the_start_are_a_transient_too() -> None:
    values = np.r_[np.full(100, math.inf), rng(10).lognormal(size=900)]
    assert 95 <= stats.transient_length(values) <= 115
    assert stats.transient_length(np.array([])) == 0


def test_a_few_odd_requests_at_the_start_are_no_transient() -> None:
    values = np.ones(1000)
    values[8] = math.inf
    assert stats.mser5(np.asarray(law.rankdata(values))) == 10
    assert stats.transient_length(values) == 0


def test_a_drift_is_found_and_noise_is_none() -> None:
    at, noise = np.arange(2000, dtype=np.float64), rng(11).normal(10, 1, 2000)
    low, high = stats.drift_interval(at, noise + at / 1000)
    assert 0 < low < 2 < high
    low, high = stats.drift_interval(at, noise)
    assert low < 0 < high


def test_little_holds_where_nothing_crosses_the_edges_and_not_where_a_backlog_is_left() -> None:
    assert stats.little_gap(np.array([1.0, 2.0]), np.array([3.0, 9.0]), (0.0, 10.0)) == 0
    # Present in the window for 2 + 1 s; those that came took 2 + 6 s.
    assert stats.little_gap(np.array([1.0, 9.0]), np.array([3.0, 15.0]), (0.0, 10.0)) == pytest.approx((3 - 8) / 3)


def test_the_fit_never_rises() -> None:
    fit = stats.decreasing_fit(np.array([1.0, 0.8, 0.9, 0.2]), np.array([1.0, 1.0, 3.0, 1.0]))
    assert fit == pytest.approx([1.0, 0.875, 0.875, 0.2])  # by hand: (0.8 + 3 x 0.9) / 4


def test_poisson_arrivals_pass_and_others_do_not() -> None:
    poisson = stats.arrival_tests(np.cumsum(rng(12).exponential(size=3000)))
    assert min(poisson.gaps_p, poisson.dispersion_p, poisson.lag1_p) > 0.01
    constant = stats.arrival_tests(np.arange(1, 3001, dtype=np.float64))
    assert max(constant.gaps_p, constant.dispersion_p) < 1e-6
    assert constant.dispersion < 0.1
    # Ten processes with one seed: each gap comes ten times, which a test of the gaps alone would not see.
    shared = stats.arrival_tests(np.cumsum(np.repeat(rng(12).exponential(size=300), 10)))
    assert shared.dispersion > 3
    assert max(shared.dispersion_p, shared.lag1_p) < 1e-6


def test_the_ratio_of_paired_runs_is_known_more_exactly_than_that_of_strangers() -> None:
    common, noise = rng(13).exponential(size=4000) + 0.1, rng(14).normal(1, 0.02, (2, 4000))
    other = rng(15).exponential(size=4000) + 0.1
    paired = log_ratio(in_memory(common * noise[0]), in_memory(1.1 * common * noise[1]), 0.9, paired=True)
    strangers = log_ratio(in_memory(common), in_memory(1.1 * other), 0.9, paired=False)
    assert paired is not None
    assert strangers is not None
    _, low, high = paired.interval()
    assert low < 1 / 1.1 < high < 1
    assert strangers.error > 3 * paired.error


def test_no_ratio_where_the_percentile_is_unbounded_or_infinite() -> None:
    few, many = (in_memory(rng(16).exponential(size=num)) for num in (200, 4000))
    assert log_ratio(few, few, 0.99, paired=True) is None
    failed = in_memory(np.where(rng(17).random(4000) < 0.3, math.inf, rng(16).exponential(size=4000)))
    assert log_ratio(many, failed, 0.9, paired=True) is None
    with pytest.raises(ValueError, match="200 and 4000"):
        log_ratio(few, many, 0.5, paired=True)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_two_lines_that_meet_are_found_where_they_meet(noise: float) -> None:
    x = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], dtype=np.float64)
    y = 0.3 + 0.01 * x + 0.5 * np.maximum(0, x - 7.5) + np.random.default_rng(2).normal(0, noise, x.size)
    shuffled = np.random.default_rng(3).permutation(x.size)
    assert stats.breakpoint_of(x[shuffled], y[shuffled]) == pytest.approx(7.5, abs=0.2)


def test_one_line_has_no_breakpoint_nor_has_one_that_flattens() -> None:
    x = np.linspace(1, 20, 30)
    found = [stats.breakpoint_of(x, 0.2 * x + np.random.default_rng(seed).normal(0, 0.3, x.size)) for seed in range(100)]
    assert sum(at is not None for at in found) <= 8  # 1 % promised to each place, some more to the best of many
    assert stats.breakpoint_of(x, 3 * x) is None
    assert stats.breakpoint_of(x, -np.maximum(0, x - 10)) is None


@pytest.mark.parametrize("x", [[1, 2, 3, 4, 5], [1, 1, 1, 2, 2, 3, 3]])
def test_few_points_or_few_rates_have_no_breakpoint(x: list[float]) -> None:
    rates = np.array(x, dtype=np.float64)
    assert stats.breakpoint_of(rates, np.maximum(0, rates - 3)) is None


def test_a_mean_has_students_interval() -> None:
    mean, low, high = stats.mean_interval(np.array([1.0, 2.0, 3.0]))
    assert (mean, low, high) == pytest.approx((2.0, 2.0 - 4.302653 / 3**0.5, 2.0 + 4.302653 / 3**0.5))

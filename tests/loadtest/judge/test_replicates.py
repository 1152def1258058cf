"""These tests pool replicates: pooled values, interval widths by hand, and refusals."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.errors import ExitCode, InvalidRun, UsageError
from loadtest.judge.analysis import summary_of
from loadtest.judge.metrics import metric_bounds, read_records
from loadtest.judge.replicates import METRICS, Replicates, pool
from loadtest.judge.stats import quantile, replicate_interval
from loadtest.records import Row, ScheduledRequest
from tests.loadtest import synthetic
from tests.loadtest.judge.written_runs import answered, ended, slow_at_first, write_run

T_2 = 4.302653
"""Student's t with two degrees of freedom at 97.5 %, from a table."""


def a_run(folder: Path, seed: int, took_s: float, *, slow: int = 0, **values: Any) -> Path:
    """Return 100 requests, ten a second, each answered after ``took_s``; the first ``slow`` ones after ten seconds."""

    def change(row: Row) -> Row:
        request = ScheduledRequest(row.id, row.due_s, "default", 10, 4)
        return answered(request, row.due_s, 10.0 if row.id < slow else took_s)

    return write_run(folder / f"seed-{seed}", 100, change, seed=seed, **values)


def three(folder: Path, **values: Any) -> list[Path]:
    return [a_run(folder, seed, took_s, **values) for seed, took_s in ((1, 1.0), (2, 1.2), (3, 1.1))]


def found(pooled: Replicates, metric: str, q: float) -> tuple[Any, ...]:
    percentile = next(p for p in pooled.percentiles if (p.metric, p.at.q) == (metric, q))
    return percentile.at.value_s, percentile.at.low_s, percentile.at.high_s, percentile.per_run_s


def test_percentiles_are_of_all_requests_and_their_intervals_from_the_runs(tmp_path: Path) -> None:
    value, low, high, per_run = found(pool(three(tmp_path)), "ttft", 0.5)
    # Pooled 1.1. Without the first run 1.1, without the second 1.0, without the third 1.0: pseudo-values 1.1, 1.3, 1.3.
    half = T_2 * (0.04 / 3) ** 0.5 / 3**0.5
    assert (value, per_run) == (pytest.approx(1.1), pytest.approx([1.0, 1.2, 1.1]))
    assert (low, high) == pytest.approx((3.7 / 3 - half, 3.7 / 3 + half))


def test_a_rate_is_the_mean_of_the_runs_with_students_interval(tmp_path: Path) -> None:
    pooled = pool(three(tmp_path, slo="ttft_p90=1.15s"))
    goodput = next(mean for mean in pooled.rates if "good" in mean.name)
    assert [*goodput.per_run, goodput.value] == pytest.approx([10.0, 0.0, 10.0, 20 / 3])
    spread = (100 / 3) ** 0.5  # of 10, 0, 10
    assert (goodput.low, goodput.high) == pytest.approx((0.0, 20 / 3 + T_2 * spread / 3**0.5))
    offered = next(mean for mean in pooled.rates if "offered" in mean.name)
    assert (offered.value, offered.low, offered.high) == pytest.approx((10.0, 10.0, 10.0))


@pytest.mark.parametrize(
    ("slo", "slow", "verdict", "code"),
    [
        ("ttft_p50=5s", 0, "pass", ExitCode.PASS),
        ("ttft_p99=5s", 0, "undecided", ExitCode.UNDECIDED),  # all are inside, of too few samples
        ("ttft_p50=100ms", 0, "fail", ExitCode.SLO_MISSED),
        ("ttft_p90=1.15s", 0, "undecided", ExitCode.UNDECIDED),  # one run of three is outside
        ("ttft_p90=5s", 60, "fail", ExitCode.SLO_MISSED),
    ],
)
def test_the_slo_is_judged_by_the_runs_and_by_the_samples(
    tmp_path: Path, slo: str, slow: int, verdict: str, code: ExitCode
) -> None:
    pooled = pool(three(tmp_path, slo=slo, slow=slow))
    assert ([limit.verdict for limit in pooled.slo], pooled.exit_code()) == ([verdict], code)


def test_requests_that_failed_in_every_run_leave_no_value(tmp_path: Path) -> None:
    folders = [synthetic.write_run(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3)]
    pooled = pool(folders)
    assert found(pooled, "ttft", 0.99)[:3] == (None, None, None)  # 1 in 97 failed
    value, low, high, _ = found(pooled, "ttft", 0.9)
    assert low < value < high
    assert "ttft p99 beyond all that was measured: too many failed" in pooled.lines()


@pytest.mark.parametrize("metric", METRICS)
def test_the_interval_is_that_of_the_statistics_module_over_the_rows(tmp_path: Path, metric: str) -> None:
    """Its coverage is what docs/loadtest.md states. `pool` itself reads no row as such, and keeps no gap between tokens."""
    folders = [synthetic.write_run(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3, 4)]
    value, low, high, per_run = found(pool(folders), metric, 0.5)
    values = []
    for folder in folders:
        records = read_records(folder)
        begin, end = summary_of(records).window_s
        items = [item for item in records.items() if begin <= item.due_s < end]
        values.append(metric_bounds(records, items, metric)[1])
    assert per_run == pytest.approx([quantile(v, 0.5) for v in values], rel=1e-9)
    assert (value, low, high) == pytest.approx(replicate_interval(values, 0.5), rel=1e-9)


def test_what_is_no_replicate_is_refused(tmp_path: Path) -> None:
    runs = three(tmp_path)
    with pytest.raises(UsageError, match="RUN: 2 runs are not enough"):
        pool(runs[:2])
    (tmp_path / "again").mkdir()
    with pytest.raises(UsageError, match=r"again/seed-1: has the seed 1, as .*seed-1 has"):
        pool([*runs, a_run(tmp_path / "again", 1, 1.0)])
    with pytest.raises(UsageError, match=r"seed-7: differs from .*seed-1 in stall_s, slo; replicates differ in the seed only"):
        pool([*runs, a_run(tmp_path, 7, 1.0, stall_s=2.0, slo="ttft_p99=1s")])
    with pytest.raises(UsageError, match=r"seed-8: differs from .*seed-1 in model"):
        pool([*runs, a_run(tmp_path, 8, 1.0, manifest={"model": "another"})])
    with pytest.raises(UsageError, match="seed-9: did not come to its end"):
        pool([*runs, a_run(tmp_path, 9, 1.0, manifest={"state": "interrupted"})])
    with pytest.raises(InvalidRun, match="seed-10: worker 1 was lost"):
        pool([*runs, a_run(tmp_path, 10, 1.0, manifest={"problems": ["worker 1 was lost"]})])


def test_the_same_schedule_under_other_seeds_is_a_threat(tmp_path: Path) -> None:
    threats = " ".join(pool(three(tmp_path)).threats)
    assert "Some runs had the same schedule" in threats
    apart = [synthetic.write_run(tmp_path / str(seed), seed=seed, target=f"http://127.0.0.1:{seed}") for seed in (1, 2, 3)]
    threats = " ".join(pool(apart).threats)
    assert "The runs asked different addresses (http://127.0.0.1:1, " in threats
    assert "the same schedule" not in threats


def test_the_command_prints_lines_or_json(tmp_path: Path) -> None:
    runs = [str(run) for run in three(tmp_path, slo="ttft_p50=5s")]
    said = CliRunner().invoke(app, ["pool", *runs])
    assert (said.exit_code, said.output.splitlines()[0][:28]) == (0, "3 replicates, seeds 1, 2, 3;")
    as_json = CliRunner().invoke(app, ["pool", *runs, "--json"])
    assert msgspec.json.decode(as_json.output, type=Replicates) == pool([Path(run) for run in runs])


def refused(folder: Path, seed: int, **values: Any) -> Path:
    return write_run(folder / f"seed-{seed}", 100, lambda row: ended(row, "http_error", row.due_s), seed=seed, **values)


@pytest.mark.parametrize("num_refused", [1, 3])
def test_runs_without_a_complete_answer_pass_nothing(tmp_path: Path, num_refused: int) -> None:
    """Also without an SLO, as one such run alone."""
    whole = [a_run(tmp_path, seed, 1.0) for seed in (4, 5)]
    pooled = pool([*(refused(tmp_path, seed) for seed in range(1, num_refused + 1)), *whole])
    assert pooled.exit_code() is ExitCode.UNDECIDED
    assert pooled.num_ok == [*[0] * num_refused, 100, 100]
    names = ", ".join(f"seed-{seed}" for seed in range(1, num_refused + 1))
    assert f"No request was answered completely in {names}: the runs together pass nothing." in pooled.threats
    assert CliRunner().invoke(app, ["pool", *map(str, (tmp_path / name for name in pooled.runs))]).exit_code == 5


def test_a_warm_up_that_was_found_is_named(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"seed-{seed}", 1200, slow_at_first, seed=seed, warmup_s=5) for seed in (1, 2)]
    threats = pool([*runs, write_run(tmp_path / "seed-3", 1200, seed=3, warmup_s=5)]).threats
    said = [threat for threat in threats if "warm-up" in threat]
    assert said == [
        f"The warm-up of seed-{seed} took 20 s, not the 5 s of the scenario; all of it is left out." for seed in (1, 2)
    ]


def test_a_percentile_that_lies_among_the_failed_without_one_run_has_no_upper_bound(tmp_path: Path) -> None:
    """12 of 300 requests failed, all in the third run: 4 %. Without the first run 6 % failed, more than the p95 leaves out."""
    whole = [a_run(tmp_path, seed, 1.0) for seed in (1, 2)]
    third = write_run(tmp_path / "seed-3", 100, lambda row: ended(row, "http_error", row.due_s) if row.id < 12 else row, seed=3)
    p95 = next(p for p in pool([*whole, third]).percentiles if (p.metric, p.at.q) == ("ttft", 0.95))
    assert (p95.at.value_s, p95.at.low_s, p95.at.high_failed) == (1.0, None, True)
    assert str(p95) == "ttft p95 1000 ms [–, ∞]"

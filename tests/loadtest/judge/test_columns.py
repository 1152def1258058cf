"""These tests compare the columns with `loadtest.judge.metrics`, row by row, and check that no row stays in memory."""

import gc
import shutil
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from loadtest.judge import stats
from loadtest.judge.analysis import analyse, summary_of
from loadtest.judge.columns import Chunked, Ints, RowColumns
from loadtest.judge.compare import compare
from loadtest.judge.gaps import INFINITE_US, Gaps, Sorted
from loadtest.judge.metrics import METRICS, bounds_s, gaps_s, is_good, metric_bounds, read_records
from loadtest.judge.replicates import pool
from loadtest.judge.series import InMemory
from loadtest.judge.window import Window
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
from loadtest.records import HealthSample, Manifest, Row
from tests.loadtest import synthetic

CHUNKS = st.lists(st.tuples(st.integers(0, 5_000_000), st.integers(0, 4)), max_size=6)


def of_rows(rows: list[list[tuple[int, int]]]) -> Chunked:
    flat = [chunk for chunks in rows for chunk in chunks]
    us, tokens = (np.array([chunk[k] for chunk in flat], dtype=np.int64) for k in (0, 1))
    return Chunked(us, tokens, np.cumsum([0, *map(len, rows)]).astype(np.int64))


@given(rows=st.lists(CHUNKS, max_size=5))
def test_the_gaps_of_many_rows_are_those_of_each(rows: list[list[tuple[int, int]]]) -> None:
    rows = [sorted(chunks) for chunks in rows]
    gaps, counts = of_rows(rows).gaps_us()
    each = [gaps_s(Row(0, 0, 0.0, "ok", chunks=[(us / 1000, tokens) for us, tokens in chunks])) for chunks in rows]
    assert counts.tolist() == [one.size for one in each]
    assert gaps / 1e6 == pytest.approx(np.concatenate([np.empty(0), *each]), abs=1e-9)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """720 requests, of which some failed, timed out or were refused; a limit of each metric."""
    slo = "ttft_p99=900ms,tpot_p90=25ms,itl_p95=30ms,max_itl_p90=60ms,e2e_p50=2s"
    return synthetic.write_run(tmp_path_factory.mktemp("columns") / "run", scenario={"slo": slo, "warmup_s": 0})


@pytest.mark.parametrize("metric", METRICS)
def test_the_bounds_of_all_requests_are_those_of_each(run: Path, metric: str) -> None:
    records = read_records(run)
    found = Window.of(records).bounds(metric)
    each = [bounds_s(item.request, item.row, metric, closed=False, stream=True) for item in records.items()]
    assert found.has.tolist() == [pair is not None for pair in each]
    known = [pair for pair in each if pair is not None]
    assert np.stack([found.low, found.high], axis=1) == pytest.approx(np.array(known), abs=2e-9)


def test_goodput_counts_the_same_requests_either_way(run: Path) -> None:
    records = read_records(run)
    limits = records.scenario.slo.limits
    for chosen in [*((limit,) for limit in limits), limits]:
        each = [is_good(item.request, item.row, chosen, closed=False, stream=True) for item in records.items()]
        assert Window.of(records).good(chosen).tolist() == each
        assert 0 < sum(each) < len(each)


def test_the_counted_gaps_give_the_figures_of_the_gaps_themselves(run: Path) -> None:
    records = read_records(run)
    gaps = Window.of(records).gaps
    listed = InMemory(*metric_bounds(records, records.items(), "itl"))
    assert (gaps.size, gaps.num_failed, gaps.resolved) == (listed.size, listed.num_failed, listed.resolved)
    assert gaps.mean_answered_s == pytest.approx(listed.mean_answered_s)
    assert [gaps.low[k] for k in range(gaps.size)] == pytest.approx(listed.low, abs=1e-9)
    for q in stats.QUANTILES:
        assert gaps.worth(q) == pytest.approx(listed.worth(q), rel=1e-9)
    assert gaps.attained(0.03) == listed.attained(0.03)
    assert gaps.worth(0.95, 0.03) == pytest.approx(listed.worth(0.95, 0.03), rel=1e-9)


@given(
    values=st.lists(st.sampled_from([0, 7, 20_000, 20_001, 2_097_151, 2_097_152, 9_000_000, INFINITE_US]), max_size=300),
    cut=st.integers(1, 90),
)
@settings(max_examples=40, deadline=None)
def test_gaps_that_come_in_pieces_are_one_series(values: list[int], cut: int) -> None:
    array = np.array(values, dtype=np.int64)
    seconds = np.where(array == INFINITE_US, np.inf, array / 1e6)

    def pieces() -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        yield from (array[first : first + cut] for first in range(0, array.size, cut))

    gaps, listed = Gaps(pieces, stats.QUANTILES, [0.02]), InMemory(seconds, seconds)
    assert (gaps.size, gaps.num_failed) == (listed.size, listed.num_failed)
    if values:
        assert gaps.resolved == listed.resolved
        assert [gaps.worth(q) for q in stats.QUANTILES] == pytest.approx([listed.worth(q) for q in stats.QUANTILES])
        assert gaps.worth(0.9, 0.02) == pytest.approx(listed.worth(0.9, 0.02))
    if len(values) >= stats.NUM_BATCHES:
        for q in stats.QUANTILES:
            assert gaps.left_out(q).tolist() == listed.left_out(q).tolist()


@given(runs=st.lists(st.lists(st.sampled_from([0, 7, 20_000, 3_000_000, 9_000_000, INFINITE_US])), min_size=1, max_size=4))
def test_gaps_of_several_runs_are_merged_as_if_they_were_one(runs: list[list[int]]) -> None:
    parts = [Sorted.of([np.array(run, dtype=np.int64)]) for run in runs]
    together, values = Sorted.merged(parts), sorted(value for run in runs for value in run)
    assert [together[k] for k in range(together.size)] == [np.inf if value == INFINITE_US else value / 1e6 for value in values]
    assert together.num_infinite == values.count(INFINITE_US)


def test_rows_that_are_read_from_parquet_are_those_that_were_recorded(run: Path) -> None:
    records = read_records(run)
    table = parquet.read_table(run / "rows.parquet")
    by_due = sorted(records.rows, key=lambda row: row.due_s)
    assert table["id"].to_pylist() == [row.id for row in by_due]
    assert table["state"].to_pylist() == [row.state for row in by_due]
    assert table["first_s"].to_pylist() == [row.first_s for row in by_due]
    ms = [[round(at, 3) for at, _ in row.chunks] for row in by_due]
    assert [[us / 1000 for us in chunks] for chunks in table["chunk_us"].to_pylist()] == ms
    assert table["chunk_tokens"].to_pylist() == [[tokens for _, tokens in row.chunks] for row in by_due]
    direct = RowColumns.of(by_due)
    assert direct.num_gaps.tolist() == records.columns.num_gaps.tolist()
    assert direct.max_gap_us.tolist() == records.columns.max_gap_us.tolist()


def test_a_folder_that_cannot_be_written_is_analysed_too(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = analyse(run)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in run.glob("*.json*"):
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "rows.parquet").mkdir()  # root may write anywhere: a folder in the way of the file stands for a read-only one
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert msgspec.json.encode(analyse(copy)) == msgspec.json.encode(expected)
    assert list((copy / "rows.parquet").iterdir()) == list(copy.glob("*.part")) == list(temporary.iterdir()) == []


@pytest.mark.parametrize("num_later", [360, 1440])
def test_a_run_that_another_process_reads_as_well_keeps_the_rows_that_were_read_first(
    run: Path, tmp_path: Path, num_later: int
) -> None:
    """The other reader rewrites rows.parquet, with more rows if the run continues."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    lines = (run / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "seal.jsonl").unlink(missing_ok=True)
    records = read_records(copy)
    expected = summary_of(records)
    (copy / "rows.jsonl").write_bytes(b"".join((2 * lines)[:num_later]))
    read_records(copy)
    assert parquet.read_metadata(copy / "rows.parquet").num_rows == num_later
    assert summary_of(records) == expected


def test_a_window_whose_gaps_were_counted_is_freed_at_once(run: Path) -> None:
    """Not only when the garbage collector runs: a million requests are 150 MB, and `pool` reads one run after the other."""
    gc.disable()
    try:
        window = Window.of(read_records(run))
        assert window.gaps.size
        assert window.sorted_gaps().size
        assert window.gaps.left_out(0.5).size
        kept = weakref.ref(window), weakref.ref(window.records)
        del window
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_grows_by_less_than_half_a_kilobyte_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million requests of 100 tokens then need less than 500 MB beyond the interpreter and what different gaps take (below).

    In lists of rows they took 9 GB.
    """
    monkeypatch.setattr("loadtest.rows_file.BATCH_ROWS", 200)
    few, many = (write_many(tmp_path / str(num), num) for num in (1000, 3000))
    analyse(few)  # what is loaded once
    assert peak_bytes(lambda: analyse(many)) - peak_bytes(lambda: analyse(few)) < 2000 * 500


WORKS: dict[str, tuple[Callable[[list[Path]], object], int]] = {
    "compare": (lambda runs: compare(runs[0], runs[1]), 2),
    "pool": (pool, 1),
}
"""By command: what it does, and how many runs are in memory at a time."""


@pytest.mark.parametrize("name", WORKS)
def test_memory_of_several_runs_grows_by_less_than_half_a_kilobyte_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In lists of rows it was five kilobytes. Few and many have the same 2,001 different gaps, which take memory of their own."""
    monkeypatch.setattr("loadtest.rows_file.BATCH_ROWS", 200)
    monkeypatch.setattr("loadtest.judge.gaps._DENSE_US", 1 << 15)  # else these arrays of one size are the peak of either
    (work, num_held), few, many = WORKS[name], *(three_of(tmp_path / str(num), num) for num in (400, 1200))
    assert num_different_gaps(few) == num_different_gaps(many) == 2001
    work(few)  # what is loaded once
    assert peak_bytes(lambda: work(many)) - peak_bytes(lambda: work(few)) < num_held * 800 * 500


@pytest.mark.parametrize("name", WORKS)
def test_memory_of_several_runs_grows_by_less_than_a_kilobyte_a_different_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Gaps are counted by their microseconds, for `compare` in each tenth of a run. A tenth has most of the different gaps here."""
    monkeypatch.setattr("loadtest.rows_file.BATCH_ROWS", 50)
    monkeypatch.setattr("loadtest.judge.gaps._DENSE_US", 1 << 15)
    work = WORKS[name][0]
    alike, different = (three_of(tmp_path / str(spread), 400, spread_us=spread) for spread in (1, 2000))
    more = num_different_gaps(different) - num_different_gaps(alike)
    assert more > 3900
    work(alike)  # what is loaded once
    grown = peak_bytes(lambda: work(different)) - peak_bytes(lambda: work(alike))
    assert grown < 1000 * more


def num_different_gaps(runs: list[Path]) -> int:
    return np.unique(np.concatenate([chunks.gaps_us()[0] for run in runs for chunks in read_records(run).chunks()])).size


def three_of(folder: Path, num: int, *, spread_us: int = 1000) -> list[Path]:
    folder.mkdir()
    return [write_many(folder / str(seed), num, seed=seed, spread_us=spread_us) for seed in (1, 2, 3)]


def write_many(run: Path, num: int, *, seed: int = 1, spread_us: int = 1000) -> Path:
    """A run of so many answers of 100 chunks each at 1,000 requests/s; gaps are 20 ms, more or less by up to ``spread_us``."""
    scenario = parse_scenario(
        {
            "name": "many",
            "seed": seed,
            "arrival": {"law": "constant", "rate": 1000},
            "duration_s": num / 1000,
            "warmup_s": 0,
            "requests": [{"output_tokens": {"mean": 100}}],
        }
    )
    schedule = make_schedule(scenario)
    gaps_us = np.random.Generator(np.random.Philox(seed)).integers(20_000 - spread_us, 20_000 + spread_us + 1, (num, 99))
    rows = [a_row(request.id, request.due_s or 0.0, gaps_us[request.id]) for request in schedule.requests]
    run.mkdir()
    manifest = Manifest(
        "finished", scenario.model_dump(mode="json"), schedule.sha256, num, "", "", 1.0, [], ended_s=num / 1000 + 3
    )
    (run / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    schedule.write(run / "schedule.jsonl")
    synthetic.write_lines(run / "rows.jsonl", rows)
    samples = [HealthSample(float(t), 0, 0.1, 0.001, 0.0, 0, 0, 0) for t in range(num // 1000 + 4)]
    synthetic.write_lines(run / "health.jsonl", samples)
    return run


def a_row(number: int, due_s: float, gaps_us: Ints) -> Row:
    at_ms = (100 + np.cumsum([0, *gaps_us]) / 1000).tolist()
    last_s = due_s + at_ms[-1] / 1000
    row = Row(number, 0, due_s, "ok", sent_s=due_s, first_s=due_s + 0.1, last_s=last_s, end_s=last_s)
    row.chunks, row.output_tokens = [(ms, 1) for ms in at_ms], 100
    return row

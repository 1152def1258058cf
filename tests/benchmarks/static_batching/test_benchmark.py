"""These tests check the batching benchmark's pure parts: lengths, block arithmetic, and equal requests for all systems."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import batching
from benchmarks.batching import Bench, Experiment
from benchmarks.batching_figures import draw
from benchmarks.batching_records import Run, round_folder
from benchmarks.batching_setups import (
    CONTINUOUS,
    PAPER_BATCH,
    SETUPS,
    STATIC,
    SYSTEMS,
    Setup,
    burst,
    fleet_model,
    of_round,
    only,
    poisson,
    quick,
    static_run_s,
    static_values,
)
from benchmarks.batching_theory import LengthLaw, Life, block_use, plain_multiple, rows_of
from benchmarks.static_batching.batches import step_ends_s
from benchmarks.static_batching.settings import parse_static
from loadtest.plan.scenario import Scenario
from loadtest.plan.schedule import make_schedule
from loadtest.recorder import as_lines
from loadtest.records import HealthSample, Manifest, Row
from serve_app.config import ModelSettings

A100 = SETUPS["a100-40gb-llama-13b"]
CPU = SETUPS["smollm2-135m-cpu"]


@pytest.mark.parametrize(("cap", "mean", "waste"), [(32, 15.6, 1.95), (128, 53.7, 2.11), (512, 118.5, 2.53), (1536, 128.0, 2.08)])
def test_the_waste_of_a_batch_is_that_of_the_study(cap: int, mean: float, waste: float) -> None:
    """Check values: notes 1.4, drawn from the study's own generator, which allows a length of 0."""
    law = LengthLaw(128.0, cap, least=0)
    assert law.expected_max(1) == pytest.approx(mean, abs=0.05)
    assert law.waste(PAPER_BATCH[cap]) == pytest.approx(waste, abs=0.01)


def test_the_law_is_that_of_the_schedule() -> None:
    drawn = np.array([r.output_tokens for r in make_schedule(burst(A100, 512, 20_000)).requests])
    law = LengthLaw(A100.mean_tokens, 512)
    assert drawn.mean() == pytest.approx(law.expected_max(1), rel=4 / np.sqrt(20_000))
    batches = drawn[: 20_000 // 8 * 8].reshape(-1, 8).max(axis=1)
    assert batches.mean() == pytest.approx(law.expected_max(8), rel=0.02)
    assert (drawn.min(), drawn.max() <= 512) == (1, True)


def test_multiples_at_equal_step_times_by_hand() -> None:
    law = LengthLaw(0.02, 4)  # all lengths are 1
    assert plain_multiple(law, 8, 4, 100, own_max=True) == pytest.approx(2.0)
    wide = LengthLaw(1e9, 2)  # 1 or 2, evenly: mean 1.5, and the largest of many is 2
    assert plain_multiple(wide, 4, 4, 1000, own_max=False) == pytest.approx(2 / 1.5)


def test_blocks_are_whole_and_only_of_those_that_run() -> None:
    lives = [Life(15, 0.0, 2.0, [0.0, 1.0, 2.0]), Life(1, 1.0, 4.0, [1.0, 4.0])]
    times, allocated, used = block_use(lives, block_size=16, num_samples=4)
    assert times.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert used.tolist() == [16, 17 + 2, 2, 2]
    assert allocated.tolist() == [16, 32 + 16, 16, 16]


def test_a_row_is_taken_again_when_it_is_free() -> None:
    assert rows_of([(0, 5), (1, 2), (2, 3), (4, 9), (5, 6)]) == [0, 1, 1, 1, 0]


def test_all_systems_are_asked_the_same_whatever_the_time_scale() -> None:
    slow, fast = (make_schedule(poisson(A100, 4.0, 25.0, time_scale=scale, drain=True)).requests for scale in (1.0, 0.05))
    assert [(r.input_tokens, r.output_tokens) for r in slow] == [(r.input_tokens, r.output_tokens) for r in fast]
    assert [r.due_s for r in fast] == pytest.approx([0.05 * (r.due_s or 0) for r in slow])


@pytest.mark.parametrize("setup", [*SETUPS.values(), quick(A100), quick(CPU)], ids=lambda s: f"{s.name}-{len(s.caps)}")
def test_every_static_server_of_the_benchmark_has_valid_settings_and_both_sides_the_same_memory(setup: object) -> None:
    assert isinstance(setup, type(A100))
    for system in STATIC:
        for cap in setup.caps:
            static = parse_static(static_values(setup, system, cap, setup.cap(cap), 0.5))
            assert static.batch_size == setup.batch_size(system, cap)
            assert static.batch_size * static.max_length <= setup.kv_tokens
    model = ModelSettings.model_validate(fleet_model(setup))
    if setup.profile is None:
        assert model.kv_cache_gib * 2**30 / (2 * 30 * 3 * 64 * 4) == pytest.approx(15_802 // 8 + 32)


def test_fair_batches_are_as_large_as_memory_allows() -> None:
    sizes = [[s.batch_size("fair static", cap) for cap in PAPER_BATCH] for s in SETUPS.values()]
    assert sizes == [[29, 24, 15, 7], [29, 24, 15, 7], [28, 24, 15, 7]]


def test_a_static_run_is_the_sum_of_its_batches() -> None:
    profile = A100.profile
    assert profile is not None
    lengths = [(8, 3), (4, 9), (6, 2)]
    fair = step_ends_s(profile, [8, 4], 9)[-1] + step_ends_s(profile, [6], 2)[-1]
    paper = step_ends_s(profile, [8, 4], 12)[-1] + step_ends_s(profile, [6], 12)[-1]
    assert static_run_s(profile, lengths, form="fair", batch_size=2, global_max=12) == pytest.approx(fair)
    assert static_run_s(profile, lengths, form="paper", batch_size=2, global_max=12) == pytest.approx(paper)


def write_records(scenario: Scenario, out: Path, *, token_s: float, problems: list[str]) -> None:
    """Write a run in which all requests are answered at once, a token each ``token_s``."""
    schedule, rows = make_schedule(scenario), []
    for request in schedule.requests:
        chunks = [(round(1e3 * token_s * (k + 1), 3), 1) for k in range(request.output_tokens)]
        row = Row(request.id, 0, request.due_s or 0.0, "ok", sent_s=request.due_s or 0.0, status=200, chunks=chunks)
        row.prompt_tokens, row.output_tokens = request.input_tokens, request.output_tokens
        row.first_s, row.last_s = (row.due_s + chunks[at][0] / 1e3 for at in (0, -1))
        row.end_s = row.last_s
        rows.append(row)
    out.mkdir()
    schedule.write(out / "schedule.jsonl")
    (out / "rows.jsonl").write_bytes(as_lines(rows))
    (out / "health.jsonl").write_bytes(as_lines([HealthSample(float(t), 0, 0.1, 0.001, 0.0, 0, 0, 0) for t in range(60)]))
    described = scenario.model_dump(mode="json")
    manifest = Manifest("finished", described, schedule.sha256, len(rows), "", "m", 1.7e9, [], ended_s=60.0, problems=problems)
    (out / "manifest.json").write_bytes(msgspec.json.encode(manifest))


class Loads:
    """Stands for real loads: leaves records that are invalid as often as a list says, and then valid."""

    def __init__(self, num_invalid: int, token_s: float = 0.01) -> None:
        self.left, self.token_s, self.num = num_invalid, token_s, 0

    def __call__(self, scenario: Scenario, url: str, out: Path) -> list[str]:
        self.num, self.left = self.num + 1, self.left - 1
        write_records(scenario, out, token_s=self.token_s, problems=["sick"] if self.left >= 0 else [])
        return Run(out, 1.0).problems


@pytest.mark.parametrize(("num_invalid", "tries", "found"), [(0, 1, True), (2, 3, True), (3, 3, False), (9, 3, False)])
def test_an_invalid_run_is_repeated_three_times_at_most(
    num_invalid: int, tries: int, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "_load", loads := Loads(num_invalid))
    begun: list[int] = []
    bench = Bench(A100, tmp_path)
    measured = bench.measure(Experiment("burst", "naive", 32, num=8), "", 1.0, begin=lambda: begun.append(loads.num))
    assert (loads.num, begun, measured is not None) == (tries, list(range(tries)), found)
    results = json.loads((tmp_path / "runs.json").read_text())
    (entry,) = results["runs"]
    assert (entry["tries"], bool(entry["problems"])) == (tries, not found)
    assert Path(entry["folder"]).name == ("burst-naive-32" if tries == 1 else f"burst-naive-32-{tries}")
    assert (results["commit"], results["date"][:2]) == (batching.commit(), "20")


@pytest.fixture
def setup() -> Setup:
    return replace(A100, caps=(32, 128), num_burst=12, num_latency=30)


@pytest.fixture
def results(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two rounds, in the first of which two measurements are invalid: a burst of the base that others are divided by, and a latency."""
    for round_number in (2, 1):
        round_folder(tmp_path, round_number).mkdir(exist_ok=True)
        bench = Bench(of_round(setup, round_number), round_folder(tmp_path, round_number))
        for cap in setup.caps:
            for number, system in enumerate(SYSTEMS):
                sick = (cap, system, round_number) == (128, "paper static", 1)
                monkeypatch.setattr(batching, "_load", Loads(9 if sick else 0, 0.04 / (number + round_number)))
                bench.measure(Experiment("burst", system, cap, num=setup.num_burst), "", 1.0)
        for system in ("naive", CONTINUOUS) if round_number == 1 else (CONTINUOUS,):
            monkeypatch.setattr(batching, "_load", Loads(9 if system == "naive" else 0, 0.01 * round_number))
            bench.measure(Experiment("latency", system, 1536, qps=4.0, num=30), "", 1.0, nominal_qps=4.0)
            rate = Experiment("rate", system, 1536, qps=4.0, window_s=3.0)
            bench.measure(rate, "", 1.0, nominal_qps=4.0, share=4.0)
    return tmp_path


def test_the_cells_of_invalid_runs_are_empty_and_their_figures_left_out(setup: Setup, results: Path) -> None:
    table = draw(setup, results).splitlines()
    assert f"commit {batching.commit()}." in table[2]
    rows = {tuple(line.split(" | ")[:2]): line for line in table if line.startswith("|")}
    assert rows["| 128", "paper static"] == "| 128 | paper static | invalid 3 of 3 |  |  |  |  |  |  |  |  | 1 |"
    assert rows["| 4", "naive"] == "| 4 | naive | invalid 3 of 3 |  |  | 1 |"
    assert rows["| 32", "naive"].split(" | ")[6] == "0.50"  # a token in 40 ms, the base of its cap one in 20
    assert rows["| 128", "naive"].split(" | ")[6] == ""  # the base of this cap is invalid
    report = json.loads((results / "report.json").read_text())
    assert [row["system"] for row in report["latency"] if "e2e_s" in row] == [CONTINUOUS]
    assert not (results / "occupancy.png").exists()
    assert (results / "latency.png").exists()


def test_multiples_are_stated_over_the_rounds_whose_runs_are_valid(setup: Setup, results: Path) -> None:
    lines = draw(setup, results).splitlines()
    at = lines.index(
        "| cap | continuous / paper static | continuous / fair static | continuous / naive | fair static / paper static |"
    )
    # Tokens take 0.04 s / (number of the system + number of the round), and each round has lengths of its own.
    # sqrt(4/2 * 5/3), times or over exp(12.706 * log(4/2 / (5/3)) / 2), since 12.706 is Student's t of two values.
    assert lines[at + 2].split("|")[2] == " 1.83 (0.57-5.81), 2 rounds "
    assert lines[at + 3].split(" | ")[1] == "1.67, one round"  # in the other one the base is invalid


def test_a_round_that_was_ended_early_counts_in_no_multiple(setup: Setup, results: Path) -> None:
    path = round_folder(results, 2) / "runs.json"
    begun = json.loads(path.read_text())
    path.write_text(json.dumps({**begun, "runs": begun["runs"][:7]}))  # of eight bursts
    assert "| 32 | 2.00, one round | " in draw(setup, results)


def test_latencies_and_rates_are_stated_over_the_rounds(setup: Setup, results: Path) -> None:
    lines = draw(setup, results).splitlines()
    (latency,) = (line for line in lines if line.startswith("| 4 | continuous"))
    runs = [Run(round_folder(results, number) / "latency-continuous-4qps", 1.0) for number in (1, 2)]
    first, second = (run.median_s("e2e")[0] or 0.0 for run in runs)
    assert second > 1.2 * first  # a token takes twice as long, and the lengths are others
    cells = latency.split(" | ")
    num = sum(len(run.rows) for run in runs)
    assert (cells[2], cells[3].split()[0], cells[3][-8:]) == (f"{num}", f"{(first * second) ** 0.5:.2f}", "2 rounds")
    (rate,) = (line for line in lines if line.startswith("| continuous | 4.00"))
    tokens = [Run(round_folder(results, number) / "rate-continuous-4qps", 1.0).window_tokens_per_s(3.0)[0] for number in (1, 2)]
    assert rate.split(" | ")[2].startswith(f"{sum(tokens) / 2:.0f} (")
    assert next(line for line in lines if line.startswith("| naive | 4.00")) == "| naive | 4.00 | invalid 3 of 3 |  |"


def test_without_bursts_latencies_and_rates_are_drawn_alone(setup: Setup, results: Path) -> None:
    path = results / "runs.json"
    measured = json.loads(path.read_text())
    path.write_text(json.dumps({**measured, "runs": [run for run in measured["runs"] if run["kind"] != "burst"]}))
    (round_folder(results, 2) / "runs.json").unlink()
    lines = draw(setup, results).splitlines()
    assert any(line.startswith("| 4 | continuous | ") for line in lines)
    assert not (results / "throughput.png").exists()


def test_each_round_has_other_lengths_and_only_the_parts_that_are_asked_for() -> None:
    first, second = (of_round(A100, number) for number in (1, 2))
    lengths = [[r.output_tokens for r in make_schedule(burst(each, 512, 50)).requests] for each in (A100, first, second)]
    assert lengths[0] == lengths[1] != lengths[2]
    alone = only(second, ["bursts"])
    assert (alone.num_burst, alone.qps, alone.rates, alone.static_rates) == (A100.num_burst, (), (), ())
    others = only(second, ["latencies", "rates"])
    assert (others.num_burst, others.qps, others.static_rates) == (0, A100.qps, A100.static_rates)
    with pytest.raises(ValueError, match="smollm2-135m-cpu has no rates without its bursts"):
        only(CPU, ["rates"])


def test_throughput_and_medians_are_those_of_the_rows(setup: Setup, results: Path) -> None:
    run = Run(results / "burst-naive-32", 0.5)
    ends = [row.end_s or 0.0 for row in run.rows]
    tokens = sum(row.output_tokens or 0 for row in run.rows)
    assert run.per_s("output_tokens") == pytest.approx(tokens / max(ends) * 0.5)
    assert run.per_s("completed") == pytest.approx(setup.num_burst / max(ends) * 0.5)
    assert run.median_s("e2e")[0] == pytest.approx(sorted(ends)[5] / 0.5)
    assert run.latencies_s("e2e").tolist() == pytest.approx([end / 0.5 for end in ends])

"""These tests check the batch benchmark: its lines, its naive side in simulated time, its tables."""

import pytest

from benchmarks.batch_figures import best_s, tables
from benchmarks.batch_lines import Lengths, lines, sizes
from benchmarks.batch_naive import SimulatedHandler, run_naive
from benchmarks.static_batching.batches import step_ends_s
from serve_app.simulated.profiles import PROFILES

T4 = PROFILES["t4-gemma-2b"]


def test_lines_are_the_same_each_time_and_keep_to_their_lengths() -> None:
    made = lines(500, Lengths())
    assert made == lines(500, Lengths())
    prompts, answers = zip(*map(sizes, made), strict=True)
    assert (min(prompts) >= 1, max(prompts) <= 1024, min(answers) >= 1, max(answers) <= 256) == (True,) * 4
    assert 80 <= sorted(prompts)[250] <= 115
    assert 20 <= sorted(answers)[250] <= 29


def test_a_fixed_batch_lasts_until_its_longest_answer_is_done() -> None:
    made = [
        {"id": str(i), "prompt": "a " * words, "max_tokens": tokens} for i, (words, tokens) in enumerate([(3, 5), (9, 2), (1, 1)])
    ]
    clock = run_naive(made, SimulatedHandler("t4-gemma-2b", 2))
    assert clock.batches == [2, 1]
    assert clock.now_s == pytest.approx(step_ends_s(T4, [3, 9], 5)[-1] + step_ends_s(T4, [1], 1)[-1])


def test_the_engines_own_scheduler_is_faster_than_any_fixed_batch() -> None:
    made = lines(300, Lengths())
    assert best_s(T4, made) < min(run_naive(made, SimulatedHandler("t4-gemma-2b", size)).now_s for size in (1, 32, 300))


def test_the_table_divides_by_beams_default_batching() -> None:
    results = [
        {"side": "Beam's default", "seconds": 7200.0, "cpu_s": None, "num_batches": 3},
        {"side": "ours", "seconds": 3600.0, "cpu_s": None, "num_batches": None},
    ]
    found = tables({"simulated": {"num_lines": 2, "lengths": Lengths().__dict__, "results": results}})
    assert "| ours | 1.0000 | 2.0 | none | 3600 |" in found
    assert "59.137 against 2.481 vCPU-hours, 23.8" in found

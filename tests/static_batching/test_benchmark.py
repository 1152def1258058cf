"""The pure parts of the batching benchmark: the law of lengths, block arithmetic, and that all systems are asked the same."""

import numpy as np
import pytest

from benchmarks.batching_setups import (
    PAPER_BATCH,
    SETUPS,
    STATIC,
    burst,
    fleet_model,
    poisson,
    quick,
    static_run_s,
    static_values,
)
from benchmarks.batching_theory import LengthLaw, Life, block_use, plain_multiple, rows_of
from loadtest.schedule import make_schedule
from serve_app.config import ModelSettings
from serve_app.static_batching.batches import step_ends_s
from serve_app.static_batching.settings import parse_static

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

"""The roofline agrees with numbers worked out by hand and is monotonic; the step clock keeps its deadlines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.simulated.profiles import PROFILES, Accelerator, ModelShape, Profile, profile_from
from serve_app.simulated.timing import StepClock, StepWork, step_time_s, step_work

ROUND = Profile(  # numbers that make hand calculation easy
    accelerator=Accelerator(
        memory_bytes=10**9,
        bandwidth_bytes_per_s=1e9,
        flops_per_s=1e12,
        bandwidth_efficiency=1.0,
        compute_efficiency=1.0,
    ),
    model=ModelShape(
        num_parameters=1_100_000,
        lookup_parameters=100_000,
        num_layers=10,
        num_attention_heads=4,
        num_kv_heads=2,
        head_size=25,
    ),
    step_overhead_s=0.0005,
)


def test_the_work_of_a_step_counts_tokens_and_pairs() -> None:
    # 10 decoding after 7 and 5; 3 new after 4 attend to 5 + 6 + 7 = 18, 1 after 7 to 8, 1 after 5 to 6.
    assert step_work([4, 7, 5], [3, 1, 1]) == StepWork(num_tokens=5, kv_tokens=21, attention_pairs=32)
    assert step_work([], []) == StepWork(num_tokens=0, kv_tokens=0, attention_pairs=0)


def test_a_decode_step_takes_as_long_as_reading_weights_and_kv() -> None:
    # weights 1e6 x 2 = 2,000,000 B; KV 2 x 10 x 2 x 25 x 2 = 2,000 B per token, 500 + 500 tokens = 2,000,000 B; 1e9 B/s
    assert step_time_s(ROUND, step_work([499, 499], [1, 1])) == pytest.approx(0.0045)


def test_a_prefill_step_takes_as_long_as_its_multiplications() -> None:
    # 2 x 1e6 x 9,999 = 1.9998e10 FLOP; 9,999 x 10,000 / 2 = 49,995,000 pairs of 4,000 FLOP; 1e12 FLOP/s
    assert step_time_s(ROUND, step_work([0], [9_999])) == pytest.approx(0.0005 + 0.019998 + 0.19998)


def test_an_empty_step_takes_no_time() -> None:
    assert step_time_s(ROUND, step_work([], [])) == 0.0


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        # 1000 tokens: 0.001 + (parameters without lookups x 2 + 1000 x KV bytes) / (bandwidth x efficiency)
        ("h100-llama-8b", 0.001 + (15_009_849_344 + 131_072_000) / 2.68e12),  # 6.6 ms
        ("a10g-llama-8b", 0.001 + (15_009_849_344 + 131_072_000) / 480e9),  # 32.5 ms
        ("a10g-llama-7b", 0.001 + (13_214_687_232 + 524_288_000) / 480e9),  # 29.6 ms
        ("a100-40gb-opt-13b", 0.001 + (25_685_954_560 + 819_200_000) / 1.244e12),  # 22.3 ms
        ("a100-40gb-llama-13b", 0.001 + (25_704_048_640 + 819_200_000) / 1.244e12),  # 22.3 ms
        ("t4-gemma-2b", 0.001 + (5_012_344_832 + 18_432_000) / 220.8e9),  # 23.8 ms
    ],
)
def test_decoding_one_sequence_on_each_profile(name: str, seconds: float) -> None:
    assert step_time_s(PROFILES[name], step_work([999], [1])) == pytest.approx(seconds, rel=1e-12)


def test_prefilling_2048_tokens_on_an_h100() -> None:
    # 2 x 7,504,924,672 x 2048 = 30,740,171,456,512 FLOP; 2048 x 2049 / 2 = 2,098,176 pairs of 4 x 32 x 32 x 128 FLOP
    # are 1,100,048,498,688; at 989.4e12 x 0.5 FLOP/s
    expected = 0.001 + (30_740_171_456_512 + 1_100_048_498_688) / 494.7e12  # 65.4 ms
    assert step_time_s(PROFILES["h100-llama-8b"], step_work([0], [2048])) == pytest.approx(expected, rel=1e-12)


def test_two_accelerators_are_faster_by_twice_their_efficiency() -> None:
    one = PROFILES["a100-40gb-opt-13b"]
    two = profile_from({"accelerator": "a100-40gb", "model": "opt-13b", "num_accelerators": 2})
    for work in (step_work([999], [1]), step_work([0], [512])):
        ratio = (step_time_s(one, work) - 0.001) / (step_time_s(two, work) - 0.001)
        assert ratio == pytest.approx(2 * 0.85)


requests = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 512)), min_size=1, max_size=8)
profiles = st.sampled_from(list(PROFILES.values()))


def time_of(profile: Profile, batch: list[tuple[int, int]]) -> float:
    return step_time_s(profile, step_work([c for c, _ in batch], [n for _, n in batch]))


@given(profile=profiles, batch=requests, request=st.tuples(st.integers(0, 4000), st.integers(1, 512)))
def test_one_more_request_never_makes_a_step_faster(
    profile: Profile, batch: list[tuple[int, int]], request: tuple[int, int]
) -> None:
    assert time_of(profile, batch) <= time_of(profile, [*batch, request])


@given(profile=profiles, batch=requests, more_context=st.integers(0, 1000), more_tokens=st.integers(0, 1000))
def test_longer_contexts_and_chunks_never_make_a_step_faster(
    profile: Profile, batch: list[tuple[int, int]], more_context: int, more_tokens: int
) -> None:
    (context, new), *rest = batch
    assert time_of(profile, batch) <= time_of(profile, [(context + more_context, new + more_tokens), *rest])


@given(profile=profiles, context=st.integers(0, 2000), new=st.integers(2, 2000), data=st.data())
def test_cutting_a_prompt_into_chunks_changes_no_attention_work(
    profile: Profile, context: int, new: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, new - 1))
    whole, head, tail = (
        step_work([context], [new]),
        step_work([context], [cut]),
        step_work([context + cut], [new - cut]),
    )
    assert whole.attention_pairs == head.attention_pairs + tail.attention_pairs
    assert whole.num_tokens == head.num_tokens + tail.num_tokens


@given(profile=profiles, batch=requests)
def test_batching_is_never_slower_than_one_after_the_other(profile: Profile, batch: list[tuple[int, int]]) -> None:
    assert time_of(profile, batch) <= sum(time_of(profile, [r]) for r in batch) + 1e-9


def test_a_busy_engine_does_not_make_steps_slow() -> None:
    clock = StepClock()
    assert clock.deadline(10.0, 0.5) == 10.5
    # woken 0.01 late, 0.1 of scheduling: the next step still ends 0.5 after the first one's end
    assert clock.deadline(10.61, 0.5) == 11.0


def test_an_engine_slower_than_its_steps_gets_no_credit() -> None:
    clock = StepClock()
    assert clock.deadline(10.0, 0.5) == 10.5
    assert clock.deadline(20.0, 0.5) == 20.0
    assert clock.deadline(20.1, 0.5) == 20.5


def test_after_a_pause_a_step_takes_its_full_time() -> None:
    clock = StepClock()
    assert clock.deadline(10.0, 0.5) == 10.5
    clock.idle()
    assert clock.deadline(10.6, 0.5) == 11.1

"""These tests compare static batching, as arithmetic, with counts by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.static_batching.batches import (
    BatchGate,
    BatchRecord,
    KvUse,
    Member,
    closed_at,
    kv_tokens,
    kv_use,
    largest_batch,
    num_steps,
    step_ends_s,
)
from serve_app.simulated.profiles import A100_40GB, LLAMA_7B, PROFILES, Profile

# Weights of 2 GB at 1 GB/s, 4 bytes of KV per token, computing takes no time: a step lasts 2 s and 4 ns per token held.
MODEL = replace(
    LLAMA_7B, num_parameters=10**9, lookup_parameters=0, num_layers=1, num_attention_heads=1, num_kv_heads=1, head_size=1
)
DEVICE = replace(A100_40GB, bandwidth_bytes_per_s=1e9, bandwidth_efficiency=1.0, flops_per_s=1e30)
SLOW = Profile(accelerator=DEVICE, model=MODEL, step_overhead_s=0.0)
BATCH = BatchRecord(0.0, [1.0, 2.0, 4.0], [Member("a", 5, 1), Member("b", 2, 3)], max_length=10)


def test_paper_static_decodes_to_the_global_maximum_and_fair_static_to_its_own() -> None:
    assert (num_steps("paper", [3, 9], 40), num_steps("fair", [3, 9], 40)) == (40, 9)


def test_as_many_fit_as_can_reserve_their_full_length() -> None:
    """Notes 1.2: 28 sequences of 512 or 7 of 2,048 on an A100-40GB with 13B."""
    kv = PROFILES["a100-40gb-llama-13b"].kv_cache_tokens
    assert [largest_batch(kv, length) for length in (512, 2048, kv, kv + 1)] == [30, 7, 1, 0]


def test_every_step_holds_all_places_padded_to_the_longest_prompt() -> None:
    # Two places, prompts padded to 3: 6 tokens after the prefill, then 8, then 10.
    assert step_ends_s(SLOW, [1, 3], 3) == pytest.approx([2.000000024, 4.000000056, 6.000000096], rel=1e-15)


def test_a_batch_closes_when_it_is_full_or_its_wait_is_over_but_not_while_the_last_one_runs() -> None:
    def at(arrivals: list[float], free_at: float) -> float:
        return closed_at(arrivals, free_at, batch_size=3, wait_s=0.5)

    assert at([1.0, 1.1, 1.2], 0.0) == 1.2
    assert at([1.0, 1.1, 1.2], 9.0) == 9.0
    assert at([1.0, 1.1], 0.0) == 1.5
    assert at([1.0, 1.1], 9.0) == 9.5


def test_what_a_batch_reserves_holds_and_uses() -> None:
    # Prompts 5 and 2 padded to 5; after step 1 both have a token, after step 2 only b gains one.
    assert [kv_tokens(BATCH, step) for step in (1, 2, 3)] == [(20, 12, 9), (20, 14, 10), (20, 16, 11)]
    # Steps of 1, 1 and 2 seconds.
    assert kv_use(BATCH) == KvUse(reserved=80.0, padded=12 + 14 + 32.0, used=9 + 10 + 22.0)


def test_requests_that_come_while_a_batch_runs_form_the_next_one() -> None:
    gate = BatchGate[str](2)
    assert gate.arrived("a") == ["a"]
    gate.started()
    assert (gate.arrived("b"), gate.arrived("c"), gate.arrived("d")) == ([], [], [])
    assert (gate.left("a"), gate.num_waiting) == (["b", "c"], 1)


def test_until_a_batch_starts_others_may_join_it() -> None:
    gate = BatchGate[str](2)
    assert (gate.arrived("a"), gate.arrived("b"), gate.arrived("c")) == (["a"], ["b"], [])


def test_a_batch_whose_clients_all_went_away_does_not_block_the_next() -> None:
    gate = BatchGate[str](2)
    for name in "abcd":
        gate.arrived(name)
    assert (gate.left("c"), gate.left("a"), gate.left("b")) == ([], ["d"], [])
    assert gate.num_waiting == 0


@given(events=st.lists(st.sampled_from(["arrive", "start", "end", "leave"]), max_size=60), size=st.integers(1, 4))
def test_the_gate_lets_everybody_in_once_in_order_and_never_too_many(events: list[str], size: int) -> None:
    gate, inside, admitted, gone, num = BatchGate[int](size), list[int](), list[int](), set[int](), 0

    def let_in(items: list[int]) -> None:
        admitted.extend(items)
        inside.extend(items)
        assert len(inside) <= size

    for event in events:
        if event == "arrive":
            let_in(gate.arrived(num))
            num += 1
        elif event == "start" and inside:
            gate.started()
        elif event == "end":
            for item in list(inside):
                inside.remove(item)
                let_in(gate.left(item))
        elif event == "leave" and (waiting := [i for i in range(num) if i not in admitted and i not in gone]):
            gone.add(waiting[-1])
            let_in(gate.left(waiting[-1]))
    while inside:
        let_in(gate.left(inside.pop(0)))
    assert admitted == [i for i in range(num) if i not in gone]

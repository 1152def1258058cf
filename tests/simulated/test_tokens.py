"""The tokens are a function of the sequence and the seed alone, whatever the batch and the place of a cut."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.simulated.sequences import SamplingRules, Sequences, slots_of
from serve_app.simulated.tokens import Ids, SequenceHash, TokenSource, salt_of

EOS = 1
VOCABULARY = np.arange(10, 1000, dtype=np.int64)
CLOSING = np.array([10, 11], dtype=np.int64)
PLAIN = SamplingRules(eos_token_id=EOS)


def source(eos_probability: float = 0.0) -> TokenSource:
    return TokenSource(VOCABULARY, CLOSING, eos_probability=eos_probability)


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


class Engine:
    """A minimal model runner: it holds sequences and appends one token to some of them per step."""

    def __init__(self, *, seed: int = 0, eos_probability: float = 0.0, num_slots: int = 1) -> None:
        self._hash, self._source = SequenceHash(seed), source(eos_probability)
        self._sequences = Sequences(num_slots)
        self.outputs: dict[str, list[int]] = {}

    def add(self, request_id: str, prompt: list[int], rules: SamplingRules = PLAIN) -> None:
        state, size = self._hash.state(prompt), len(prompt)
        self._sequences.add(request_id, state=state, length=size, num_prompt_tokens=size, rules=rules)
        self.outputs[request_id] = []

    def remove(self, request_id: str) -> None:
        self._sequences.remove(request_id)

    def step(self, *request_ids: str) -> None:
        slots = slots_of(self._sequences, request_ids)
        tokens = self._sequences.sample(slots, self._source)
        self._sequences.append(slots, tokens)
        for request_id, token in zip(request_ids, tokens.tolist(), strict=True):
            self.outputs[request_id].append(token)


def generate(prompt: list[int], count: int, *, seed: int = 0, rules: SamplingRules = PLAIN, eos: float = 0.0) -> list[int]:
    engine = Engine(seed=seed, eos_probability=eos)
    engine.add("r", prompt, rules)
    for _ in range(count):
        engine.step("r")
    return engine.outputs["r"]


prompts = st.lists(st.integers(0, 200_000), max_size=40)
seeds = st.integers(0, 2**63)


@given(prompt=prompts, seed=seeds, cut=st.integers(0, 12), eos=st.sampled_from([0.0, 0.3]))
def test_a_resumed_request_continues_with_the_same_tokens(prompt: list[int], seed: int, cut: int, eos: float) -> None:
    whole = generate(prompt, 12, seed=seed, eos=eos)
    assert whole[cut:] == generate([*prompt, *whole[:cut]], 12 - cut, seed=seed, eos=eos)


@given(prompt=prompts, seed=seeds, request_seed=st.integers(-(2**63), 2**63 - 1))
def test_a_seeded_request_resumes_too(prompt: list[int], seed: int, request_seed: int) -> None:
    rules = SamplingRules(eos_token_id=EOS, salt=salt_of(request_seed))
    whole = generate(prompt, 6, seed=seed, rules=rules)
    assert whole[3:] == generate([*prompt, *whole[:3]], 3, seed=seed, rules=rules)
    assert whole != generate(prompt, 6, seed=seed)


@given(batch=st.lists(prompts, min_size=2, max_size=6), turns=st.lists(st.sets(st.integers(0, 5)), max_size=12))
def test_tokens_do_not_depend_on_the_rest_of_the_batch(batch: list[list[int]], turns: list[set[int]]) -> None:
    engine = Engine()  # grows from one slot
    for index, prompt in enumerate(batch):
        engine.add(str(index), prompt)
    for turn in turns:
        engine.step(*(str(index) for index in sorted(turn) if index < len(batch)))
    for index, prompt in enumerate(batch):
        assert engine.outputs[str(index)] == generate(prompt, len(engine.outputs[str(index)]))


def test_a_slot_used_again_remembers_nothing() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3], SamplingRules(allowed_token_ids=(5,)))
    engine.step("a")
    engine.remove("a")
    engine.add("b", [4])
    engine.step("b")
    assert engine.outputs == {"a": [5], "b": generate([4], 1)}


def test_one_more_or_other_token_changes_what_follows() -> None:
    outputs = [generate(p, 8) for p in ([5, 6, 7], [5, 6], [6, 5, 7], [5, 6, 8], [0, 5, 6, 7], [])]
    assert len({tuple(o) for o in outputs}) == len(outputs)
    assert generate([5, 6, 7], 8, seed=1) != generate([5, 6, 7], 8, seed=2)


def test_the_state_is_the_polynomial_it_is_said_to_be() -> None:
    # Reference with Python's unbounded integers, Horner's rule; the start state is that of the empty sequence.
    hashing = SequenceHash(7)
    expected = hashing.state([])
    for token in (3, 0, 128_255):
        expected = (expected * 0x9E3779B97F4A7C15 + token + 1) % 2**64
    assert hashing.state([3, 0, 128_255]) == expected


def test_tokens_are_the_same_in_every_release() -> None:
    # Recorded once: replicas of different versions must agree while a roll-out mixes them.
    digest = hashlib.sha256(str(generate([1, 2, 3], 64, seed=42)).encode()).hexdigest()
    assert digest[:16] == "f31aab05706d7283"


def test_tokens_cover_the_vocabulary_evenly() -> None:
    tokens = generate([1], 20_000)
    counts = np.bincount(tokens, minlength=1000)[10:]
    # 990 equally likely tokens: chi-squared has mean 989 and deviation sqrt(2 x 989) = 44.5; 6 deviations are 1256.
    assert float(((counts - 20_000 / 990) ** 2 / (20_000 / 990)).sum()) < 1256


def test_eos_comes_as_often_as_asked() -> None:
    tokens = generate([1], 20_000, eos=0.05)
    # binomial(20000, 0.05): mean 1000, deviation 30.8
    assert 1000 - 6 * 31 < tokens.count(EOS) < 1000 + 6 * 31
    assert generate([1], 50, eos=1.0) == [EOS] * 50


def test_eos_never_comes_unasked() -> None:
    assert EOS not in generate([1], 20_000, eos=0.0)
    assert EOS not in generate([1], 2000, eos=1.0, rules=SamplingRules())  # ignore_eos


def test_no_stop_token_comes_before_min_tokens() -> None:
    natural = generate([1], 20)
    rules = SamplingRules(eos_token_id=EOS, min_tokens=10, stop_token_ids=frozenset({EOS, natural[4], natural[14]}))
    assert EOS not in generate([1], 10, rules=rules, eos=1.0)
    assert generate([1], 11, rules=rules, eos=1.0)[10] == EOS
    kept = generate([1], 20, rules=rules)
    assert kept[:4] == natural[:4]
    assert natural[4] not in kept[:10]


def test_only_allowed_tokens_come() -> None:
    rules = SamplingRules(allowed_token_ids=(3, 20, 21))  # 3 is no plain text: drawn only if nothing else is allowed
    assert set(generate([1], 100, rules=rules)) == {20, 21}
    assert set(generate([1], 5, rules=SamplingRules(allowed_token_ids=(3,)))) == {3}


def test_a_grammar_is_led_to_its_end() -> None:
    allowed = ids(*range(10, 1000))
    drawn = [source().draw_allowed(SequenceHash(0).state([i]), allowed, set()) for i in range(4000)]
    # a quarter is taken from the two closing tokens: 1000 + 3000 x 2/990 = 1006, deviation 27.5
    assert 1006 - 6 * 28 < sum(token in (10, 11) for token in drawn) < 1006 + 6 * 28


def test_a_finished_grammar_stops() -> None:
    assert source().draw_allowed(SequenceHash(0).state([1]), ids(EOS), {EOS}) == EOS


@given(prompt=prompts, count=st.integers(1, 40))
def test_candidates_are_distinct_and_fall_from_the_sampled_token(prompt: list[int], count: int) -> None:
    state = SequenceHash(0).state(prompt)
    (sampled,) = generate(prompt, 1)
    found = source().candidates(state, sampled, count)
    assert found.token_ids[0] == sampled
    assert len(set(found.token_ids)) == len(found.token_ids) == count
    assert found.logprobs == sorted(found.logprobs, reverse=True)
    assert sum(map(math.exp, found.logprobs)) <= 1 + 1e-9
    assert found.token_ids[: count // 2] == source().candidates(state, sampled, count // 2).token_ids if count > 1 else True


def test_a_sampled_token_that_is_no_candidate_comes_first_all_the_same() -> None:
    found = source().candidates(SequenceHash(0).state([1]), EOS, 3)
    assert found.token_ids == [EOS, *source().candidates(SequenceHash(0).state([1]), generate([1], 1)[0], 2).token_ids]


def test_more_candidates_than_words_are_all_words() -> None:
    few = TokenSource(ids(4, 5, 6), ids(), eos_probability=0.0)
    assert sorted(few.candidates(0, 4, 20).token_ids) == [4, 5, 6]


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary is empty"):
        TokenSource(ids(), ids(), eos_probability=0.0)


@given(prompts)
def test_each_token_is_drawn_from_the_state_of_those_before_it(token_ids: list[int]) -> None:
    whole = SequenceHash(7)
    assert whole.states_before(token_ids) == [whole.state(token_ids[:size]) for size in range(len(token_ids))]

"""The index of replicas' caches agrees with a list of all prompts, and keeps within its bounds."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serve_app.core.prefix_index import Prefix, PrefixIndex, tokens_at

BLOCK = 4
CAPACITY = 12 * BLOCK
MAX_ENTRIES = 16
REPLICAS = ("a", "b", "c")
prompts = st.lists(st.integers(0, 1), max_size=15)


def chain(words: list[int]) -> list[int]:
    """Each word is a block; equal hashes are equal beginnings."""
    return [hash(tuple(words[: n + 1])) for n in range(len(words))]


def num_points(index: PrefixIndex, replica_id: str) -> int:
    """Return how many points are remembered of the replica."""
    return len(index._held.get(replica_id, ()))


def test_points_are_each_block_then_each_8th_then_each_64th() -> None:
    ends = [tokens_at(point, 16) for point in range(200)]
    gaps = [b - a for a, b in pairwise([0, *ends])]
    assert gaps == [16] * 64 + [128] * 56 + [1024] * 80


@given(st.integers(0, 300), st.integers(1, 256))
def test_a_gap_between_points_is_at_most_an_eighth_of_what_comes_before_or_one_block(point: int, block_size: int) -> None:
    before, end = tokens_at(point, block_size), tokens_at(point + 1, block_size)
    assert block_size <= end - before <= max(block_size, before / 8)


class IndexMachine(RuleBasedStateMachine):
    """Runs the index beside a slow and simple one: a list of each replica's prompts, the latest last."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(MAX_ENTRIES)
        self.given: dict[str, list[list[int]]] = {}

    @rule(replica_id=st.sampled_from(REPLICAS), words=prompts)
    def add(self, replica_id: str, words: list[int]) -> None:
        self.given.setdefault(replica_id, []).append(words)
        self.index.add(replica_id, Prefix(chain(words), BLOCK), CAPACITY)
        most = min(CAPACITY // BLOCK, MAX_ENTRIES // len(self.given))
        assert num_points(self.index, replica_id) <= most
        assert self.index.count(replica_id, chain(words)) == min(len(words), most), "the beginning of the latest prompt is kept"

    @rule(replica_id=st.sampled_from(REPLICAS))
    def forget(self, replica_id: str) -> None:
        self.given.pop(replica_id, None)
        self.index.forget(replica_id)
        assert num_points(self.index, replica_id) == 0

    @rule(words=prompts)
    def look(self, words: list[int]) -> None:
        hashes = chain(words)
        counts = {replica_id: self.index.count(replica_id, hashes) for replica_id in REPLICAS}
        for replica_id, count in counts.items():
            longest = max((len(shared(words, prompt)) for prompt in self.given.get(replica_id, [])), default=0)
            assert count <= longest, "it holds nothing that it was not given"
        count, holders = self.index.deepest(hashes)
        assert count == max(counts.values())
        assert holders == {replica_id for replica_id, c in counts.items() if c == count > 0}

    @invariant()
    def is_valid(self) -> None:
        self.index.validate(self.given)

    @invariant()
    def what_is_held_has_no_gaps(self) -> None:
        for replica_id in self.given:
            held = set(self.index._held[replica_id])
            for prompt in self.given[replica_id]:
                known = [hashed in held for hashed in chain(prompt)]
                assert known == sorted(known, reverse=True)


def shared(a: list[int], b: list[int]) -> list[int]:
    count = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:count]


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase


def test_a_replica_of_unknown_room_is_bounded_by_entries() -> None:
    index = PrefixIndex(8)
    index.add("a", Prefix(range(100), BLOCK), 0)
    assert num_points(index, "a") == 8
    assert index.count("a", range(100)) == 8

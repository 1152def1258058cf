"""An ingress's index agrees with what engines have cached, as long as no digest is lost, and holds nothing of a replica after a gap."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve_app.core.affinity import PrefixAffinity
from serve_app.core.cached_points import (
    MAX_GONE,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CachedPoints,
    Changes,
    Digest,
    DigestStream,
)
from serve_app.core.events import CacheReported, LinkOpened, RequestArrived
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import StartAttempt
from serve_app.core.prefix_index import Prefix, PrefixIndex, blocks_to, tokens_at
from serve_app.core.prompt_hashes import hash_points
from serve_app.core.request import Resume
from tests.core.apart_fleet import fleet_apart

BLOCK = 2
TIERS = ("GPU", "CPU")
LINKS = ("a", "b")
MOST = 3
"""Points of a digest."""
prompts = st.lists(st.integers(0, 1), max_size=7)


def ids_of(words: Sequence[int]) -> list[int]:
    return [token for word in words for token in (word, 10 + word)]


def block(words: Sequence[int]) -> int:
    """Return the engine's hash of the block of the last word."""
    return hash(("engine", *words))


def stored(words: Sequence[int], begin: int = 0, medium: str = "GPU", *, named: bool = True) -> BlocksStored:
    """Report the blocks of these words from number ``begin`` on, with tokens if they are ``named``."""
    parent = block(words[:begin]) if begin and named else None
    hashes: list[int | bytes] = [block(words[: n + 1]) for n in range(begin, len(words))]
    return BlocksStored(medium, hashes, parent, ids_of(words[begin:]) if named else [])


def removed(words: Sequence[int], medium: str = "GPU") -> BlocksRemoved:
    """Report that the last block of these words has left a tier."""
    return BlocksRemoved(medium, [block(words)])


def points(words: Sequence[int]) -> list[int]:
    return hash_points(ids_of(words), BLOCK)


@given(st.integers(1, 5000))
def test_a_point_is_where_a_block_ends_that_ends_a_point(depth: int) -> None:
    ends = [tokens_at(point, 1) for point in range(300)]
    assert (blocks_to(depth) > 0) == (depth in ends)
    if depth in ends:
        assert blocks_to(depth) == depth - ([0, *ends][ends.index(depth)])


@pytest.mark.parametrize("step", [1, 5, 700])
def test_a_long_prompt_has_the_points_of_the_ingress_however_its_blocks_come(step: int) -> None:
    words = [n % 7 for n in range(700)]
    cached = CachedPoints(BLOCK)
    for begin in range(0, len(words), step):
        cached.note(stored(words[: begin + step], begin))
    assert list(cached.points) == points(words)
    cached.validate()
    cached.note(removed(words[:100]))
    assert list(cached.points) == points(words[:99])
    cached.note(stored(words[:100], 99))
    assert set(cached.points) == set(points(words)), "the rest was there all the time"
    cached.validate()


def test_adapters_salts_and_media_make_other_points() -> None:
    ids, marks = list(range(40)), [(3, 77), (12, 78), (13, 79)]
    cached = CachedPoints(4)
    in_blocks = [(place // 4, place % 4, what) for place, what in reversed(marks)]
    cached.note(BlocksStored("GPU", list(range(10)), None, ids, 5, in_blocks))
    assert list(cached.points) == hash_points(ids, 4, 5, marks)


def test_a_part_of_a_block_is_no_point() -> None:
    cached = CachedPoints(4)
    cached.note(BlocksStored("GPU", [1], None, [1, 2]))
    assert (cached.points, cached.take()) == ({}, ([], []))


def test_a_slower_tier_may_report_a_block_after_the_faster_one_has_dropped_it() -> None:
    cached, words = CachedPoints(BLOCK), [1, 0]
    cached.note(stored(words))
    cached.note(removed(words))
    cached.note(stored(words, 1, "CPU", named=False))
    assert list(cached.points) == points(words)
    cached.note(removed(words, "CPU"))
    for number in range(MAX_GONE):
        cached.note(BlocksStored("GPU", [number], None, [number, 0]))
        cached.note(BlocksRemoved("GPU", [number]))
    cached.note(stored(words, 1, "CPU", named=False))
    assert list(cached.points) == points(words[:1]), "its tokens are forgotten"
    cached.validate()


def test_a_digest_is_split_and_what_is_removed_goes_first() -> None:
    digest_stream = DigestStream()
    assert digest_stream.digests(Changes((), ()), range(5), 3, has_room=True) == [
        Digest(0, True, [0, 1, 2], ()),
        Digest(1, False, [3, 4], ()),
    ]
    changes = Changes([1, 2, 3, 4], [5, 6, 7, 8])
    assert digest_stream.digests(changes, (), 3, has_room=True) == [
        Digest(2, False, (), [5, 6, 7]),
        Digest(3, False, [1, 2, 3], [8]),
        Digest(4, False, [4], ()),
    ]
    assert digest_stream.digests(changes, (), 3, has_room=False) == []
    assert digest_stream.digests(changes, [9], 3, has_room=True) == [Digest(5, True, [9], ())]


class CacheMachine(RuleBasedStateMachine):
    """Runs one engine with two tiers and two links to one index each, beside lists of the blocks in each tier."""

    def __init__(self) -> None:
        super().__init__()
        self.cached = CachedPoints(BLOCK)
        self.tiers: dict[str, set[tuple[int, ...]]] = {tier: set() for tier in TIERS}
        self.streams = {link: DigestStream() for link in LINKS}
        self.indexes = {link: PrefixIndex(1000) for link in LINKS}
        self.on_the_way: dict[str, list[Digest]] = {link: [] for link in LINKS}
        self.in_step: dict[str, bool] = {}
        """Whether no digest of a link was lost since the last that began anew and came in time."""
        self.come: dict[str, list[Digest]] = {link: [] for link in LINKS}
        """The digests of a link that came, the lost ones left out, in the order in which they came."""

    def here(self) -> set[int]:
        """Return the points of all prompts whose blocks are all in some tier."""
        everywhere = set[tuple[int, ...]]().union(*self.tiers.values())
        whole = [words for words in everywhere if all(words[: n + 1] in everywhere for n in range(len(words)))]
        return {points(words)[-1] for words in whole}

    @rule(words=prompts)
    def compute(self, words: list[int]) -> None:
        """Compute a prompt: what is in no tier before is new."""
        begin = next((n for n in range(len(words)) if tuple(words[: n + 1]) not in self.tiers["GPU"]), len(words))
        if begin < len(words):
            self.cached.note(stored(words, begin))
            self.tiers["GPU"] |= {tuple(words[: n + 1]) for n in range(begin, len(words))}

    @precondition(lambda self: self.tiers["GPU"])
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        words = data.draw(st.sampled_from(sorted(self.tiers["GPU"])))
        self.cached.note(stored(words, len(words) - 1, "CPU", named=False))
        self.tiers["CPU"].add(words)

    @precondition(lambda self: any(self.tiers.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        tier = data.draw(st.sampled_from([tier for tier in TIERS if self.tiers[tier]]))
        words = data.draw(st.sampled_from(sorted(self.tiers[tier])))
        self.cached.note(removed(words, tier))
        self.tiers[tier].remove(words)

    @rule()
    def clear(self) -> None:
        self.cached.note(CacheCleared())
        for blocks in self.tiers.values():
            blocks.clear()

    @rule(full=st.sets(st.sampled_from(LINKS)))
    def tell(self, full: set[str]) -> None:
        changes = self.cached.take()
        for link in LINKS:
            told = self.streams[link].digests(changes, self.cached.points, MOST, has_room=link not in full)
            self.on_the_way[link] += told

    @rule(link=st.sampled_from(LINKS), fate=st.sampled_from(["comes", "comes", "comes", "lost", "late", "twice"]))
    def carry(self, link: str, fate: str) -> None:
        """Bring one digest, or lose it, or bring the one after it first. A link does none but the first."""
        way = self.on_the_way[link]
        if not way:
            return
        if fate == "late" and len(way) > 1:
            way[0], way[1] = way[1], way[0]
        digest = way.pop(0)
        for _ in range({"lost": 0, "twice": 2}.get(fate, 1)):
            self.bring(link, digest)

    def bring(self, link: str, digest: Digest) -> None:
        self.indexes[link].take_digest("r", *digest)
        self.come[link].append(digest)

    def whole_run(self, link: str) -> set[int]:
        """Return the points of the newest digests that came one after the other from one that began anew on; none after a gap."""
        newest = list[Digest]()
        for digest in self.come[link]:
            if not newest or digest.number > newest[-1].number:
                newest.append(digest)
        run = list[Digest]()
        for digest in reversed(newest):
            if run and digest.number != run[-1].number - 1:
                break
            run.append(digest)
            if digest.anew:
                break
        self.in_step[link] = bool(run) and run[-1].anew
        held = set[int]()
        for digest in reversed(run) if self.in_step[link] else ():
            held = (held - set(digest.removed)) | set(digest.added)
        return held

    @rule()
    def bring_all(self) -> None:
        """Bring what is on the way, and what comes next: then each index in step holds what is cached."""
        self.tell(set())
        for link in LINKS:
            for digest in self.on_the_way[link]:
                self.bring(link, digest)
            self.on_the_way[link].clear()
            held = self.whole_run(link)
            if self.in_step[link]:
                assert held == self.here()

    @rule(link=st.sampled_from(LINKS))
    def link_anew(self, link: str) -> None:
        self.indexes[link].forget("r")
        self.on_the_way[link].clear()
        self.streams[link] = DigestStream()
        self.come[link].clear()

    @invariant()
    def the_points_are_those_whose_blocks_are_here(self) -> None:
        assert self.cached.points.keys() == self.here()
        self.cached.validate()

    @invariant()
    def an_index_holds_what_it_was_told_without_a_gap(self) -> None:
        for link, index in self.indexes.items():
            index.validate(["r"])
            assert set(index._reported.get("r", {})) == self.whole_run(link)


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCache = CacheMachine.TestCase


def told(index: PrefixIndex, number: int, added: Sequence[Sequence[int]] = (), gone: Sequence[Sequence[int]] = ()) -> None:
    """Bring a digest of the last points of these prompts."""
    index.take_digest("r", number, number == 0, [points(words)[-1] for words in added], [points(words)[-1] for words in gone])


def test_a_prompt_counts_from_its_start_on_and_no_longer_than_the_replica_has_it() -> None:
    index, words = PrefixIndex(), [1, 0, 1]
    told(index, 0)
    index.add("r", Prefix(points(words), BLOCK), 100)
    assert index.count("r", points(words)) == 3
    told(index, 1, [[1], [1, 0], [1, 0, 1]])
    assert index.count("r", points(words)) == 3
    told(index, 2, [], [[1, 0, 1], [1, 0]])
    assert (index.count("r", points(words)), index.deepest(points(words))) == (1, (1, {"r"}))
    index.add("r", Prefix(points(words), BLOCK), 100)
    assert index.count("r", points(words)) == 3, "it is computed there again"
    told(index, 3, [], [[1, 0, 1]])
    assert index.count("r", points(words)) == 2, "it was computed and gone between two digests"


def test_what_is_reported_is_not_forgotten_for_want_of_room_and_what_is_not_computed_is() -> None:
    index = PrefixIndex()
    told(index, 0, [[0], [0, 0]])
    index.add("r", Prefix(points([1, 1, 1]), BLOCK), 2 * BLOCK)
    assert index.count("r", points([0, 0])) == 2
    assert index.count("r", points([1, 1, 1])) == 2
    index.validate(["r"])


def test_after_a_gap_the_index_guesses_until_a_digest_begins_anew() -> None:
    index = PrefixIndex()
    told(index, 0, [[0]])
    told(index, 2, [[1]])
    assert (index.count("r", points([0])), index.count("r", points([1]))) == (0, 0)
    index.add("r", Prefix(points([1, 1]), BLOCK), 100)
    told(index, 3, [[0]], [[1]])
    assert (index.count("r", points([0])), index.count("r", points([1, 1]))) == (0, 2), "as without digests"
    index.take_digest("r", 4, True, points([0]), ())
    assert (index.count("r", points([0])), index.count("r", points([1, 1]))) == (1, 0)


def test_of_more_points_than_half_of_a_replicas_share_the_first_are_kept_also_when_the_share_shrinks() -> None:
    index = PrefixIndex(16)
    index.take_digest("r", 0, True, range(7), ())
    assert index.count("r", range(7)) == 7
    index.add("r", Prefix(range(7, 9), BLOCK), 100)
    index.add("other", Prefix(range(100, 102), BLOCK), 100)
    index.take_digest("r", 1, False, [20], [1000])
    assert (index.count("r", range(7)), index.count("r", range(7, 9)), index.count("r", [20])) == (4, 2, 0)
    index.take_digest("r", 2, False, (), [3])
    index.take_digest("r", 3, False, [20], ())
    assert (index.count("r", range(7)), index.count("r", [20])) == (3, 1), "there is room again"
    index.validate(["r", "other"])


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_prompt_goes_where_it_is_reported_to_be_and_reports_of_others_than_linked_replicas_are_ignored(is_apart: bool) -> None:
    words = [1, 0, 1, 1]
    if is_apart:
        fleet = fleet_apart("a", "b", routing=PrefixAffinity())
    else:
        fleet = FleetState(FleetSettings(model="m"), PrefixAffinity())
        for replica_id in "ab":
            fleet.handle(LinkOpened(replica_id, 8), now=0.0)
    for replica_id in ("b", "gone"):
        assert fleet.handle(CacheReported(replica_id, 0, True, points(words), ()), now=0.0) == []
    arrived = RequestArrived("r", 2 * len(words), 1, Resume.CONTINUE, "f", prefix=Prefix(points(words), BLOCK))
    (start,) = fleet.handle(arrived, now=0.0)
    assert isinstance(start, StartAttempt)
    assert start.replica_id == "b"
    assert fleet.requests["r"].trail.expected_hit_tokens == 2 * len(words) - 1, "an engine computes the last token"
    fleet.validate()

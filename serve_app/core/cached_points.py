"""`CachedPoints` turns an engine's reports of stored and removed blocks into the points that ingresses' `PrefixIndex` looks for.

Pure. A replica has one for an engine with several tiers of KV, and a `DigestStream` for each link. A prompt can use
the KV of a block only if all blocks before it are there, too: a point counts as cached while its block is *reached* in this sense.

vLLM reports each copy of a block, and names none. So a block of which the engine has two copies in a tier counts as gone when one of them
goes, until a request uses the other.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from serve_app.core.prefix_index import blocks_to, tokens_at
from serve_app.core.prompt_hashes import MAX_POINTS, next_hash

MAX_GONE = 1024
"""Blocks that have left all tiers and are remembered: a report of the slower tier, which has no tokens, may come after that."""

_MAX_DEPTH = tokens_at(MAX_POINTS - 1, 1)
"""Blocks of the longest prompt that has points."""

BlockHash = int | bytes


class BlocksStored(Struct, tag="stored", array_like=True, frozen=True):
    """Blocks that follow each other are in the tier ``medium``. Without ``token_ids`` the blocks were reported before.

    ``parent`` is the block before the first one; None at a prompt's beginning, where ``root`` is that of `hash_points`. ``marks`` are the
    media that begin in these blocks: the number of the block among these, the place in the block, and identity.
    """

    medium: str
    hashes: list[BlockHash]
    parent: BlockHash | None = None
    token_ids: list[int] = []
    root: int = 0
    marks: list[tuple[int, int, int]] = []


class BlocksRemoved(Struct, tag="removed", array_like=True, frozen=True):
    """Blocks are no longer in the tier ``medium``."""

    medium: str
    hashes: list[BlockHash]


class CacheCleared(Struct, tag="cleared", array_like=True, frozen=True):
    """All tiers are empty."""


Report = BlocksStored | BlocksRemoved | CacheCleared


class Changes(NamedTuple):
    """What happened to the points since the last `CachedPoints.take`: first some were removed, then some added."""

    added: Sequence[int]
    removed: Sequence[int]


class Digest(NamedTuple):
    """One message to an ingress: first points are removed, then added. ``anew``: all earlier points are removed.

    ``number`` counts the digests of a link from 0.
    """

    number: int
    anew: bool
    added: Sequence[int]
    removed: Sequence[int]


@dataclass(slots=True)
class _Block:
    parent: BlockHash | None
    ids: "array[int]"
    marks: tuple[tuple[int, int], ...]
    """Place in the block and identity."""
    root: int
    tiers: int = 0
    """A bit for each tier that has the block."""
    is_reached: bool = False
    depth: int = 0
    """While it is reached: blocks of the prompt up to the end of this one; and the hash of the last point up to there."""
    point: int = 0


class CachedPoints:
    """The blocks of one engine, by vLLM's hashes."""

    def __init__(self, block_size: int) -> None:
        self.points: dict[int, None] = {}
        """All points that are cached."""
        self._block_size = block_size
        self._bits: dict[str, int] = {}
        """Tier -> its bit."""
        self._blocks: dict[BlockHash, _Block] = {}
        self._after: dict[BlockHash, dict[BlockHash, None]] = {}
        """Block, which may be gone -> the blocks that follow it."""
        self._gone: OrderedDict[BlockHash, _Block] = OrderedDict()
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def note(self, report: Report) -> None:
        """Take in one report, in the engine's order."""
        match report:
            case BlocksStored():
                self._store(report)
            case BlocksRemoved():
                for hashed in report.hashes:
                    self._remove(hashed, report.medium)
            case CacheCleared():
                self._removed.update(self.points)
                for everything in (self.points, self._added, self._blocks, self._after, self._gone):
                    everything.clear()

    def take(self) -> Changes:
        """Return the changes since the last call."""
        changes = Changes(list(self._added), list(self._removed))
        self._added, self._removed = {}, {}
        return changes

    def _store(self, report: BlocksStored) -> None:
        parent, size, bit = report.parent, self._block_size, self._bits.setdefault(report.medium, 1 << len(self._bits))
        if report.token_ids and len(report.token_ids) != len(report.hashes) * size:
            return  # a partial block, at whose end no point is
        for number, hashed in enumerate(report.hashes):
            block = self._blocks.get(hashed)
            if block is None:
                if (block := self._gone.pop(hashed, None)) is None:
                    if not report.token_ids:
                        continue
                    ids = array("q", report.token_ids[number * size : (number + 1) * size])
                    marks = tuple(sorted((place, what) for of, place, what in report.marks if of == number))
                    block = _Block(parent, ids, marks, report.root)
                self._blocks[hashed] = block
                if block.parent is not None:
                    self._after.setdefault(block.parent, {})[hashed] = None
                self._reach(hashed)
            block.tiers |= bit
            parent = hashed

    def _remove(self, hashed: BlockHash, medium: str) -> None:
        if (block := self._blocks.get(hashed)) is None:
            return
        block.tiers &= ~self._bits.get(medium, 0)
        if block.tiers:
            return
        for each in self._with_those_after(hashed) if block.is_reached else ():
            each.is_reached = False
            if _has_point(each):
                self.points.pop(each.point, None)
                self._added.pop(each.point, None)
                self._removed[each.point] = None
        del self._blocks[hashed]
        if block.parent is not None:
            after = self._after[block.parent]
            del after[hashed]
            if not after:
                del self._after[block.parent]
        self._gone[hashed] = block
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _reach(self, hashed: BlockHash) -> None:
        """Reach a new block and those after it, if all before it are there."""
        first = self._blocks[hashed]
        if first.parent is not None and not ((before := self._blocks.get(first.parent)) and before.is_reached):
            return
        for block in self._with_those_after(hashed):
            parent = None if block.parent is None else self._blocks[block.parent]
            block.is_reached = True
            block.depth, block.point = (1, block.root) if parent is None else (parent.depth + 1, parent.point)
            if _has_point(block):
                block.point = self._point(block, blocks_to(block.depth))
                self.points[block.point] = self._added[block.point] = None

    def _point(self, block: _Block, count: int) -> int:
        """Return the hash of the point at the end of this block, ``count`` blocks after the point before it."""
        last, before = block, [block]
        while len(before) < count:
            assert last.parent is not None
            last = self._blocks[last.parent]
            before.append(last)
        size, start = self._block_size, block.depth - count
        spans = list(enumerate(reversed(before), start))
        marks = ((number * size + place, what) for number, each in spans for place, what in each.marks)
        return next_hash(block.point, (i for _, each in spans for i in each.ids), marks)

    def _with_those_after(self, hashed: BlockHash) -> Iterator[_Block]:
        """Yield a block and all that follow it, each after the one before it."""
        left = [hashed]
        while left:
            hashed = left.pop()
            yield self._blocks[hashed]
            left += self._after.get(hashed, ())

    def validate(self) -> None:
        """Assert the invariants."""
        assert all(block.tiers for block in self._blocks.values())
        assert self._gone.keys().isdisjoint(self._blocks)
        assert len(self._gone) <= MAX_GONE
        assert {(parent, each) for parent, after in self._after.items() for each in after} == {
            (block.parent, hashed) for hashed, block in self._blocks.items() if block.parent is not None
        }
        for block in self._blocks.values():
            before = True if block.parent is None else block.parent in self._blocks and self._blocks[block.parent].is_reached
            assert block.is_reached == before
        reached = [block for block in self._blocks.values() if block.is_reached]
        assert self.points.keys() == {block.point for block in reached if _has_point(block)}


@dataclass(slots=True)
class DigestStream:
    """What was sent to an ingress over one link. After a digest that was left out, the next one begins anew."""

    is_in_step: bool = False
    _next_number: int = 0

    def digests(self, changes: Changes, points: Iterable[int], most: int, *, has_room: bool) -> list[Digest]:
        """Return what to send after these changes, of which ``points`` are the result. Without room on the link, nothing.

        Args:
            most: The most points that one digest adds, and that it removes.
        """
        anew, self.is_in_step = not self.is_in_step, has_room
        if not has_room:
            return []
        if anew:
            changes = Changes(list(points), ())
        *before, removed = _parts(changes.removed, most)
        added, *after = _parts(changes.added, most)
        parts = [*(Changes((), each) for each in before), Changes(added, removed), *(Changes(each, ()) for each in after)]
        first = self._next_number
        self._next_number += len(parts)
        return [Digest(number, anew and number == first, *part) for number, part in enumerate(parts, first)]


def _has_point(block: _Block) -> bool:
    """Return whether a point is at the end of this block, which is reached."""
    return block.depth <= _MAX_DEPTH and blocks_to(block.depth) > 0


def _parts(points: Sequence[int], most: int) -> list[Sequence[int]]:
    return [points[start : start + most] for start in range(0, len(points), most)] or [()]

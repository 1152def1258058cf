"""`PrefixIndex` remembers which prompts this ingress sent to each replica, and so what the replica's prefix cache probably holds.

Pure. Only `PrefixAffinity` calls this module. A prompt is a chain of hashes, one for each *point* of it: two prompts with an equal hash at
a point are equal up to that point. The index remembers as much of a replica as its KV cache or its host's memory has room for, and keeps
the prompts that were used last. A replica with several tiers reports which points it holds (`CachedPoints`). Then the index holds these,
and the prompts that were sent there and not reported yet.
"""

from collections import ChainMap, OrderedDict
from collections.abc import Container, Sequence, Set
from dataclasses import dataclass
from typing import Any

FINE_POINTS, MEDIUM_POINTS = 64, 56
"""Numbers of points at each block, then at each 8th block; after them points are at each 64th. 100,000 tokens in blocks of 16 have 210
points, not 6,250.

Two prompts that part between two points share tokens after the first of the points. The index does not see these: at most an eighth of
the tokens that they share before it.
"""
MAX_ENTRIES = 1 << 19
"""Points remembered of all replicas together, divided equally among them: some 100 MB at most."""


def tokens_at(point: int, block_size: int) -> int:
    """Return how many tokens of a prompt come before the end of its point number ``point``, counted from 0."""
    if point < FINE_POINTS:
        return (point + 1) * block_size
    if point < FINE_POINTS + MEDIUM_POINTS:
        return (FINE_POINTS + 8 * (point - FINE_POINTS + 1)) * block_size
    return (FINE_POINTS + 8 * MEDIUM_POINTS + 64 * (point - FINE_POINTS - MEDIUM_POINTS + 1)) * block_size


def _blocks_of(point: int) -> int:
    """Return how many blocks are between a point and the point before it."""
    return 1 if point < FINE_POINTS else 8 if point < FINE_POINTS + MEDIUM_POINTS else 64


def blocks_to(depth: int) -> int:
    """Return how many blocks after the point before it a point is at the end of a prompt's block number ``depth``, from 1; 0 for none."""
    medium, coarse = depth - FINE_POINTS, depth - FINE_POINTS - 8 * MEDIUM_POINTS
    if medium <= 0:
        return 1
    step, blocks = (8, medium) if coarse <= 0 else (64, coarse)
    return 0 if blocks % step else step


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a prompt that routing uses.

    ``hashes`` has one hash for each point, of the prompt up to that point. ``session`` is equal for requests that the client wants to go
    to one replica.
    """

    hashes: Sequence[int] = ()
    block_size: int = 1
    session: int | None = None

    def tokens(self, num_points: int) -> int:
        """Return how many tokens the first ``num_points`` points cover."""
        return tokens_at(num_points - 1, self.block_size) if num_points else 0


NO_PREFIX = Prefix()


class PrefixIndex:
    """Points by replica and replicas by point. A replica that holds a point holds all points before it, so that searches bisect.

    An exception is a replica that reports the end of a beginning while it has yet to compute a prompt with it. Until then, a search may
    find more or less of that prompt than is there.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._held: dict[str, OrderedDict[int, int]] = {}
        """Replica -> point -> tokens since the point before it. The points that were used last come last, and within a prompt its first
        point comes last: so the end of a prompt is forgotten before its middle."""
        self._tokens: dict[str, int] = {}
        self._reported: dict[str, dict[int, None]] = {}
        """Replica -> points that it reported, which are not in ``_held``. For replicas whose digests come without a gap."""
        self._next_digest: dict[str, int] = {}
        self._holders: dict[int, str | dict[str, None]] = {}
        """Point -> its replica, or its replicas in the order in which they got it, so that simulations with the same seed are equal. Most
        points have one replica; a dictionary for each would double the memory of the index."""

    def deepest(self, hashes: Sequence[int]) -> tuple[int, Set[str]]:
        """Return the number of leading points that some replica holds, and the replicas that hold all of them."""
        count = count_known(hashes, self._holders)
        holders = self._holders[hashes[count - 1]] if count else dict[str, None]()
        return count, {holders} if isinstance(holders, str) else holders.keys()

    def count(self, replica_id: str, hashes: Sequence[int]) -> int:
        """Return the number of leading points that the replica holds."""
        held: Any = self._held.get(replica_id, {})
        reported: Any = self._reported.get(replica_id)
        return count_known(hashes, held if reported is None else ChainMap(reported, held))

    def add(self, replica_id: str, prefix: Prefix, capacity_tokens: int) -> None:
        """Add a prompt that the replica gets; forget its oldest points beyond ``capacity_tokens``. 0: the capacity is unknown."""
        held = self._held.setdefault(replica_id, OrderedDict())
        used = self._tokens.get(replica_id, 0)
        self._limit_reported(replica_id)
        reported = self._reported.get(replica_id, {})
        for point in range(len(prefix.hashes) - 1, -1, -1):
            hashed = prefix.hashes[point]
            if hashed in reported:
                continue
            if hashed in held:
                held.move_to_end(hashed)
                continue
            held[hashed] = tokens = prefix.block_size * _blocks_of(point)
            used += tokens
            self._hold(hashed, replica_id)
        most = self._max_entries // len(self._held)
        while held and (len(held) + len(reported) > most or used > capacity_tokens > 0):
            oldest, tokens = held.popitem(last=False)
            used -= tokens
            self._drop(oldest, replica_id)
        self._tokens[replica_id] = used

    def take_digest(self, replica_id: str, number: int, anew: bool, added: Sequence[int], removed: Sequence[int]) -> None:
        """Take in what a replica reports, as in `Digest`. One that comes late or twice is ignored.

        After a gap the index forgets the points, and guesses until a digest begins anew. It keeps the points that came first, up to half of
        this replica's share of ``max_entries``.
        """
        expected = self._next_digest.get(replica_id, 0)
        if number < expected:
            return
        self._next_digest[replica_id] = number + 1
        if anew or number > expected:
            self._forget_points(replica_id)
        if anew:
            self._reported[replica_id] = {}
        elif replica_id not in self._reported:
            return
        reported = self._reported[replica_id]
        self._held.setdefault(replica_id, OrderedDict())
        for hashed in removed:
            if reported.pop(hashed, 0) is None or self._forget_point(replica_id, hashed):
                self._drop(hashed, replica_id)
        for hashed in added:
            if hashed in reported:
                continue
            if not self._forget_point(replica_id, hashed):
                self._hold(hashed, replica_id)
            reported[hashed] = None
        self._limit_reported(replica_id)

    def _limit_reported(self, replica_id: str) -> None:
        """Forget the last points beyond half of the replica's share: the other half is for prompts that were sent there since."""
        reported, most = self._reported.get(replica_id, {}), self._max_entries // (2 * len(self._held))
        while len(reported) > most:
            self._drop(reported.popitem()[0], replica_id)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is gone, and its cache with it."""
        self._forget_points(replica_id)
        self._next_digest.pop(replica_id, None)

    def _forget_points(self, replica_id: str) -> None:
        for points in (self._held.pop(replica_id, ()), self._reported.pop(replica_id, ())):
            for hashed in points:
                self._drop(hashed, replica_id)
        self._tokens.pop(replica_id, None)

    def _forget_point(self, replica_id: str, hashed: int) -> bool:
        """Forget that a prompt with this point was sent to the replica; return whether one was."""
        if (tokens := self._held[replica_id].pop(hashed, None)) is None:
            return False
        self._tokens[replica_id] -= tokens
        return True

    def _hold(self, hashed: int, replica_id: str) -> None:
        holders = self._holders.setdefault(hashed, replica_id)
        if isinstance(holders, dict):
            holders[replica_id] = None
        elif holders != replica_id:
            self._holders[hashed] = {holders: None, replica_id: None}

    def _drop(self, hashed: int, replica_id: str) -> None:
        holders = self._holders[hashed]
        if isinstance(holders, str):
            del self._holders[hashed]
            return
        del holders[replica_id]
        if len(holders) == 1:
            [self._holders[hashed]] = holders

    def validate(self, alive: Container[str]) -> None:
        """Assert the invariants; only replicas in ``alive`` may hold points."""
        assert all(replica_id in alive for replica_id in self._held)
        assert all(len(held) <= self._max_entries for held in self._held.values())
        assert self._held.keys() >= self._reported.keys() <= self._next_digest.keys()
        holders: dict[int, set[str]] = {}
        for replica_id, held in self._held.items():
            assert self._tokens.get(replica_id, 0) == sum(held.values())
            reported = self._reported.get(replica_id, {})
            assert held.keys().isdisjoint(reported)
            for hashed in (*held, *reported):
                holders.setdefault(hashed, set()).add(replica_id)
        assert {hashed: {one} if isinstance(one, str) else one.keys() for hashed, one in self._holders.items()} == holders
        assert all(len(some) > 1 for some in self._holders.values() if isinstance(some, dict))


def count_known(hashes: Sequence[int], known: Container[int]) -> int:
    """Return how many leading hashes are known, provided that no hash after an unknown one is known."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low

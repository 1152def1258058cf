"""`PrefixIndex` remembers which prompts this ingress sent to each replica, and so what the replica's prefix cache probably holds.

Pure. Only `PrefixAffinity` calls this module. A prompt is a chain of hashes, one for each *point* of it: two prompts with an equal hash at
a point are equal up to that point. The index remembers as much of a replica as its KV cache or its host's memory has room for, and keeps
the prompts that were used last.
"""

from collections import OrderedDict
from collections.abc import Container, Sequence, Set
from dataclasses import dataclass

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
    """Points by replica and replicas by point. A replica that holds a point holds all points before it, so that searches bisect."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._held: dict[str, OrderedDict[int, int]] = {}
        """Replica -> point -> tokens since the point before it. The points that were used last come last, and within a prompt its first
        point comes last: so the end of a prompt is forgotten before its middle."""
        self._tokens: dict[str, int] = {}
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
        return count_known(hashes, self._held.get(replica_id, {}))

    def add(self, replica_id: str, prefix: Prefix, capacity_tokens: int) -> None:
        """Add a prompt that the replica gets; forget its oldest points beyond ``capacity_tokens``. 0: the capacity is unknown."""
        held = self._held.setdefault(replica_id, OrderedDict())
        used = self._tokens.get(replica_id, 0)
        for point in range(len(prefix.hashes) - 1, -1, -1):
            hashed = prefix.hashes[point]
            if hashed in held:
                held.move_to_end(hashed)
                continue
            held[hashed] = tokens = prefix.block_size * _blocks_of(point)
            used += tokens
            self._hold(hashed, replica_id)
        most = self._max_entries // len(self._held)
        while held and (len(held) > most or used > capacity_tokens > 0):
            oldest, tokens = held.popitem(last=False)
            used -= tokens
            self._drop(oldest, replica_id)
        self._tokens[replica_id] = used

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is gone, and its cache with it."""
        for hashed in self._held.pop(replica_id, ()):
            self._drop(hashed, replica_id)
        self._tokens.pop(replica_id, None)

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
        holders: dict[int, set[str]] = {}
        for replica_id, held in self._held.items():
            assert self._tokens[replica_id] == sum(held.values())
            for hashed in held:
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

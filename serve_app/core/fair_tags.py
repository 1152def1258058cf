"""A tag is a request's place in the order of `FairOrder`, as a value of vLLM's `priority`: the lowest starts first. Pure.

The tag is odd if the request's tenant is ahead of its share. Such an interactive or batch request gives its place in an engine to others,
even while it runs.
"""

import math
from bisect import bisect_right
from collections import deque

from serve_app.core.tenants import PRIORITIES, Priority

_STEP_S = 1e-6
"""Resolution of tags, in virtual seconds. Each step has an even and an odd tag."""
_MAX_S = 5e11
"""Later virtual times have the tag of this one, so that no tag leaves its range: 16,000 years of one GPU for a tenant of weight 1."""
BACKGROUND_PRIORITY = 1_000_000
"""Requests with this value of vLLM's `priority` or a higher one are background work, such as lines of batches: they start after all
others. Others without a tag have 0, or the value that the client chose."""
FIRST_TAG: dict[Priority, int] = {"interactive": -(1 << 62), "batch": -(1 << 61), "background": BACKGROUND_PRIORITY}
"""The lowest tag of each priority."""
_END_OF_TAGS = FIRST_TAG["batch"] // 2
"""Tags of interactive and batch requests are lower. Values from here to `BACKGROUND_PRIORITY` are no tags."""
_RANGES = (FIRST_TAG["batch"], _END_OF_TAGS, BACKGROUND_PRIORITY)
"""The first values of all ranges but the first one: interactive, batch, no tag, background."""
_OVERTAKEN_S = 20.0
"""Much more than the difference of the waits at two engines: at the one with more to do, all requests of a backlog have low tags."""


def tag_of(priority: Priority, tag_s: float, *, is_ahead: bool) -> int:
    """Return the tag of a virtual time, >= 0 seconds."""
    return FIRST_TAG[priority] + 2 * round(min(max(0.0, tag_s), _MAX_S) / _STEP_S) + is_ahead


def later(value: int, seconds: float) -> int:
    """Return the tag of a virtual time so many seconds later, in the same range. Values that are no tags of interactive or batch requests
    are returned as they are."""
    if not FIRST_TAG["interactive"] <= value < _END_OF_TAGS:
        return value
    last = tag_of(priority_of_tag(value), _MAX_S, is_ahead=is_ahead(value))
    return min(value + 2 * round(seconds / _STEP_S), max(value, last))


def priority_of_tag(tag: int) -> Priority:
    """Return the priority to whose range the tag belongs."""
    return next(priority for priority in reversed(PRIORITIES) if tag >= FIRST_TAG[priority])


def is_ahead(value: int) -> bool:
    """Return whether a value of vLLM's `priority` is the tag of an interactive or batch request whose tenant is ahead of its share."""
    return value < _END_OF_TAGS and value % 2 == 1


def is_in_same_range(value: int, other: int) -> bool:
    """Return whether two values of vLLM's `priority` are tags of the same priority, or both no tags."""
    return bisect_right(_RANGES, value) == bisect_right(_RANGES, other)


def gives_way(running: int, waiting: int) -> bool:
    """Return whether a running request gives its place to a waiting one. The arguments are their values of vLLM's `priority`.

    Background work gives way to all else, and batch requests to interactive ones. Among requests of one of these two priorities, those of
    a tenant that is ahead of its share give way to those of a tenant that is not.
    """
    if running >= BACKGROUND_PRIORITY:
        return waiting < BACKGROUND_PRIORITY
    if max(running, waiting) >= _END_OF_TAGS:
        return False
    is_later, other_is_later = running >= FIRST_TAG["batch"], waiting >= FIRST_TAG["batch"]
    if is_later != other_is_later:
        return is_later
    return is_ahead(running) and not is_ahead(waiting)


class Overtakers:
    """The requests that began in an engine before others with lower tags, whose tenants were ahead of their shares when those came.

    A tag does not change, and requests of tenants that are not ahead may come for ever. So a request counts as one of theirs once such
    with higher tags have begun before it for `_OVERTAKEN_S` to twice as long.
    """

    def __init__(self) -> None:
        self._spans = deque[dict[Priority, int]](maxlen=3)
        """The highest tags in this span of `_OVERTAKEN_S`, and in the two before it."""
        self._span_ends_at = -math.inf

    def note(self, tag: int, now: float) -> None:
        """Note that a request with this tag begins before one with a lower tag."""
        self._go_to(now)
        priority = priority_of_tag(tag)
        self._spans[-1][priority] = max(tag, self._spans[-1].get(priority, tag))

    def is_overdue(self, tag: int, now: float) -> bool:
        """Return whether a request with this tag counts as one of a tenant that is not ahead."""
        if not is_ahead(tag):
            return False
        self._go_to(now)
        return tag < self._spans[0].get(priority_of_tag(tag), tag)

    def _go_to(self, now: float) -> None:
        self._span_ends_at = max(self._span_ends_at, now - 3 * _OVERTAKEN_S)
        while now >= self._span_ends_at:
            self._spans.append({})
            self._span_ends_at += _OVERTAKEN_S

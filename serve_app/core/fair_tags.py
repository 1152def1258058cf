"""Tags: places in the order of `FairOrder`, as values of vLLM's `priority`. The request with the lowest one goes first. Pure.

An odd tag is that of a request whose tenant is ahead of its share: it gives way to others, even when it runs.
"""

from serve_app.core.tenants import PRIORITIES, Priority

_STEP_S = 1e-6
"""Virtual seconds by which a tag and the next one of the same kind differ."""
BACKGROUND_PRIORITY = 1_000_000
"""vLLM's `priority` of lines of batches, or a higher number: after all requests of clients, whose priority is 0 if they have no tag."""
FIRST_TAG: dict[Priority, int] = {"interactive": -(1 << 62), "batch": -(1 << 61), "background": BACKGROUND_PRIORITY}
"""The lowest tag of each priority."""
_LAST_TAG = FIRST_TAG["batch"] // 2
"""No tag of requests of clients is higher; a higher number was chosen by the client."""


def tag_of(priority: Priority, tag_s: float, *, is_ahead: bool) -> int:
    """Return the tag of a virtual time, >= 0 seconds."""
    return FIRST_TAG[priority] + 2 * round(max(0.0, tag_s) / _STEP_S) + is_ahead


def is_ahead(priority: int) -> bool:
    """Return whether the request's tenant is ahead of its share. Arguments of this and the others are values of vLLM's `priority`."""
    return priority < _LAST_TAG and priority % 2 == 1


def can_give_way(running: int) -> bool:
    """Return whether a request that runs gives its place to some that may wait."""
    return running >= BACKGROUND_PRIORITY or FIRST_TAG["batch"] <= running < _LAST_TAG or is_ahead(running)


def priority_of_tag(tag: int) -> Priority:
    """Return the priority to whose range of tags a tag belongs."""
    return next(priority for priority in reversed(PRIORITIES) if tag >= FIRST_TAG[priority])


def gives_way(running: int, waiting: int) -> bool:
    """Return whether a request that runs gives its place to one that waits.

    It does if its priority is a later one. Within a priority, a tenant that is ahead of its share gives way to one that is not.
    """
    if running >= BACKGROUND_PRIORITY:
        return waiting < BACKGROUND_PRIORITY
    if max(running, waiting) >= _LAST_TAG:
        return False
    is_later = [priority >= FIRST_TAG["batch"] for priority in (running, waiting)]
    return is_later == [True, False] or (is_later[0] == is_later[1] and is_ahead(running) and not is_ahead(waiting))

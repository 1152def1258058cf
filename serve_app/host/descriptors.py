"""This module measures how near this process is to its limit of open files (RLIMIT_NOFILE).

At the limit the process can open nothing any more: no link to a replica, no file, no connection of a probe. So the last ``SPARE`` numbers
are kept for these. The kernel gives each new descriptor the lowest free number, so a descriptor gets one of the last ``SPARE`` numbers only
while all lower numbers are taken.
"""

import os
import resource

SPARE = 64
"""Spare descriptors. An ingress opens one for each replica that it dials and a few for files; a probe or scrape takes one for a moment."""


def limit() -> int:
    """Return the number of descriptors that this process may have open; another process may change it at any time."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def are_short(descriptor: int) -> bool:
    """Return whether only spare descriptors were free when this descriptor was opened."""
    return descriptor >= limit() - SPARE


def are_nearly_gone(descriptor: int) -> bool:
    """Return whether half of the spare descriptors were taken, too, when this descriptor was opened."""
    return descriptor >= limit() - SPARE // 2


def are_short_now() -> bool:
    """Return whether only spare descriptors are free at this moment."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    os.close(descriptor)
    return are_short(descriptor)

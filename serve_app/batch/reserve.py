"""`Reserve` keeps room on a folder's disk for deletions, cancellations and the start of an ingress.

Each of these changes or opens the database, for which a full disk has no room.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of an OSError of a write for which the disk, the user's quota or the largest size of a file has no room."""
_RESERVE_BYTES = 1 << 20


class Reserve:
    """The reserve of one folder. ``path`` is the file that takes the room, and ``part`` names a new file of the same disk."""

    def __init__(self, path: Path, part: Callable[[], Path]) -> None:
        self._path, self._part = path, part

    def keep(self) -> None:
        """Take the room that `free` may give back, unless the reserve exists or the disk has little more room than the reserve.

        On a full disk, deletions and cancellations use the room that `free` has given back. `keep` must not take it away from them.
        """
        if self._path.exists() or shutil.disk_usage(self._path.parent).free < 2 * _RESERVE_BYTES:
            return
        part = self._part()
        try:
            part.write_bytes(os.urandom(_RESERVE_BYTES))  # zeros take no room on a file system that compresses
            part.replace(self._path)
        except OSError as exc:
            part.unlink(missing_ok=True)
            if exc.errno not in NO_ROOM:
                raise

    def free(self) -> bool:
        """Give the room back to the disk; return whether there was any."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True

"""`OomKills` finds out whether the kernel has ended a process of ours for lack of memory: the process's memory cgroup counts such kills."""

import re
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class OomKills:
    """The count of kills in this process's cgroup; in a pod, the container's."""

    def __init__(self, root: Path = _ROOT, process: Path = Path("/proc/self")) -> None:
        self._root = root
        self._process = process
        self._before = self._count()

    def any_since(self) -> bool:
        """Return whether a process was killed since this object was made or the process changed its cgroup; False without a count."""
        (where, num_before), (now_where, num_now) = self._before, self._count()
        return num_now > (num_before if where == now_where else 0)

    def _count(self) -> tuple[Path | None, int]:
        for file in self._files():
            try:
                found = re.search(r"^oom_kill (\d+)$", file.read_text(), flags=re.MULTILINE)
            except OSError:
                continue
            return file, int(found[1]) if found else 0
        return None, 0

    def _files(self) -> list[Path]:
        """Return the files that may hold the count (cgroup v1 and v2). A container sees its own cgroup as the root, whatever /proc says."""
        try:
            lines = (self._process / "cgroup").read_text().splitlines()
        except OSError:
            return []
        files = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "memory":
                files += [self._root / "memory" / own / "memory.oom_control" for own in (path.lstrip("/"), "")]
            elif not controllers:
                files += [self._root / own / "memory.events" for own in (path.lstrip("/"), "")]
        return files

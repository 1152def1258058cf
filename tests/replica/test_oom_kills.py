"""A replica finds out that the kernel has killed one of its processes for lack of memory: the files of cgroup v1 and v2."""

from pathlib import Path

import pytest

from serve_app.replica.oom_kills import OomKills


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("4:memory:/pods/a", "memory/pods/a/memory.oom_control"),
        ("4:memory:/pods/a", "memory/memory.oom_control"),
        ("0::/pods/a", "pods/a/memory.events"),
        ("0::/", "memory.events"),
    ],
)
def test_a_kill_is_seen_in_the_own_cgroup_or_in_that_of_the_container(tmp_path: Path, line: str, file: str) -> None:
    write(tmp_path / "proc/cgroup", f"3:cpu:/elsewhere\n{line}\n")
    write(tmp_path / "root" / file, "low 0\noom 7\noom_kill 2\n")
    kills = OomKills(tmp_path / "root", tmp_path / "proc")
    assert not kills.any_since()
    write(tmp_path / "root" / file, "low 0\noom 7\noom_kill 3\n")
    assert kills.any_since()


def test_in_another_cgroup_than_at_the_start_every_kill_counts(tmp_path: Path) -> None:
    for group, num in (("old", 5), ("new", 1), ("quiet", 0)):
        write(tmp_path / "root" / group / "memory.events", f"oom_kill {num}\n")
    write(tmp_path / "proc/cgroup", "0::/old\n")
    kills = OomKills(tmp_path / "root", tmp_path / "proc")
    for group, seen in (("new", True), ("quiet", False), ("old", False)):
        write(tmp_path / "proc/cgroup", f"0::/{group}\n")
        assert kills.any_since() == seen


def test_where_the_kernel_counts_nothing_nothing_is_seen(tmp_path: Path) -> None:
    assert not OomKills(tmp_path, tmp_path / "proc").any_since()

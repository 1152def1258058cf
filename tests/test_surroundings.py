import math
from pathlib import Path

import pytest

from serve_app.host.surroundings import ClockSteps, free_threads


def cgroup(folder: Path, *, limit: str, current: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pids.max").write_text(f"{limit}\n")
    (folder / "pids.current").write_text(f"{current}\n")


def of(root: Path, process: Path, lines: str) -> float:
    process.mkdir(exist_ok=True)
    (process / "cgroup").write_text(lines)
    return free_threads(root, process)


def test_the_narrowest_limit_of_the_own_group_and_those_around_it_counts(tmp_path: Path) -> None:
    root, process = tmp_path / "cgroup", tmp_path / "self"
    cgroup(root / "pids/pods/one", limit="max", current=40)
    cgroup(root / "pids/pods", limit="200", current=190)
    cgroup(root / "pids", limit="1000", current=500)
    assert of(root, process, "8:pids:/pods/one\n1:cpu:/elsewhere\n0::/\n") == 10


def test_cgroup_2_and_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root, process = tmp_path / "cgroup", tmp_path / "self"
    cgroup(root / "user/me", limit="64", current=60)
    assert of(root, process, "0::/user/me\n") == 4
    cgroup(root, limit="100", current=130)
    assert of(root, process, "0::/kubepods/of/the/host\n") == 0


def test_without_a_limit_there_is_no_end(tmp_path: Path) -> None:
    root, process = tmp_path / "cgroup", tmp_path / "self"
    cgroup(root, limit="max", current=130)
    assert of(root, process, "0::/\n") == math.inf
    assert free_threads(root, tmp_path / "nobody") == math.inf


def test_a_clock_that_was_set_an_hour_back_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"time": 1000.0, "monotonic": 50.0}
    for name in times:
        monkeypatch.setattr(f"time.{name}", lambda name=name: times[name])
    steps = ClockSteps()
    assert steps.seconds() == 0.0
    times.update(time=1010.0 - 3600.0, monotonic=60.0)
    assert steps.seconds() == -3600.0

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAD = '''
import os
import pathlib
import pytest

def tries(name):
    """Return how often this was called with the name, by any process."""
    with pathlib.Path(name).open("a") as file:
        file.write("x")
    return len(pathlib.Path(name).read_text())
'''
SOUND = "def test_sound(): assert tries('sound') == 1\n"
FLAKY = "def test_flaky(): assert tries('flaky') == 2, 'too early'\n"
FLAKY_FIXTURE = """
@pytest.fixture
def server(): assert tries('server') == 2

@pytest.mark.xdist_group('a-group')
def test_with_a_server(server): pass
"""
BROKEN = "def test_broken(): assert not tries('broken')\n"
SKIPPED = "def test_skipped():\n    if tries('skipped') == 2: pytest.skip('no more')\n    assert 0\n"
BAD_END = """
@pytest.fixture
def bad_end():
    yield
    assert tries('end') == 2, 'not yet'

def test_with_a_bad_end(bad_end): pass
"""
INTERRUPTED = "def test_interrupted():\n    tries('interrupted')\n    raise KeyboardInterrupt\n"
CRASHING = "def test_crashing():\n    if tries('crashing') == 1: os._exit(3)\n"


def try_twice(folder: Path, *tests: str, workers: int = 0) -> tuple[int, list[str]]:
    """Return the exit status and the lines of the list, after asserting that all lines were printed."""
    (folder / "test_them.py").write_text("\n".join([HEAD, *tests]))
    (folder / "pytest.ini").touch()
    distribution = ["-n", str(workers), *(["--dist", "loadgroup"] if workers else [])]
    command = [sys.executable, "-m", "tests.second_try", "flaky.txt", *distribution, "test_them.py"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = inherited | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    lines = (folder / "flaky.txt").read_text().splitlines()
    assert set(lines) <= set(ended.stdout.splitlines()), ended.stdout + ended.stderr
    return ended.returncode, lines


def num_tries(folder: Path, name: str) -> int:
    return len((folder / name).read_text())


@pytest.mark.parametrize("workers", [0, 1])
def test_what_passes_on_its_second_try_is_listed_as_flaky(tmp_path: Path, workers: int) -> None:
    assert try_twice(tmp_path, SOUND, FLAKY, FLAKY_FIXTURE, workers=workers) == (
        0,
        [
            "flaky: test_them.py::test_flaky: AssertionError: too early",
            "flaky: test_them.py::test_with_a_server: AssertionError: assert 1 == 2",
        ],
    )
    assert num_tries(tmp_path, "sound") == 1


def test_without_a_failure_the_list_is_empty(tmp_path: Path) -> None:
    (tmp_path / "flaky.txt").write_text("flaky: of an earlier run\n")
    assert try_twice(tmp_path, SOUND) == (0, [])


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    status, lines = try_twice(tmp_path, FLAKY, BROKEN)
    assert (status, lines) == (1, ["flaky: test_them.py::test_flaky: AssertionError: too early"])
    assert num_tries(tmp_path, "broken") == 2


def test_a_skip_on_the_second_try_is_a_failure(tmp_path: Path) -> None:
    assert try_twice(tmp_path, SKIPPED) == (1, [])


def test_a_test_that_ended_its_worker_has_failed_once(tmp_path: Path) -> None:
    status, lines = try_twice(tmp_path, CRASHING, workers=1)
    assert status == 0
    assert [line.partition(" crashed ")[0] for line in lines] == ["flaky: test_them.py::test_crashing: worker 'gw0'"]


def test_a_test_whose_teardown_fails_once_is_run_again(tmp_path: Path) -> None:
    assert try_twice(tmp_path, BAD_END) == (0, ["flaky: test_them.py::test_with_a_bad_end: AssertionError: not yet"])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_module_that_cannot_be_collected_has_no_second_try(tmp_path: Path, workers: int) -> None:
    status, lines = try_twice(tmp_path, "if tries('collected') <= 2: raise ValueError", FLAKY, workers=workers)
    assert status != 0
    assert lines == []


def test_an_interrupted_run_has_no_second_try(tmp_path: Path) -> None:
    assert try_twice(tmp_path, INTERRUPTED) == (2, [])
    assert num_tries(tmp_path, "interrupted") == 1

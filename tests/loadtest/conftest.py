import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from loadtest.target import Target

NUM_TOGETHER = 3

_FOUND = pytest.StashKey[dict[str, Future[None]]]()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the selected tests of a module that are marked ``together`` side by side, in threads, before the first of them ends.

    They wait for processes more than they compute. Each fails by what it found itself. They take `target` and ``tmp_path`` alone, and leave
    alone what the process has only once: its limits, signals and variables, and what looks for its children.
    """
    if not is_together(pyfuncitem):
        return None
    module = pyfuncitem.getparent(pytest.Module)
    assert module is not None
    if _FOUND not in module.stash:
        items: list[Any] = [
            item for item in module.session.items if item.getparent(pytest.Module) is module and is_together(item)
        ]
        with ThreadPoolExecutor(NUM_TOGETHER) as pool:
            module.stash[_FOUND] = {item.nodeid: pool.submit(item.obj, **arguments(item, pyfuncitem)) for item in items}
    module.stash[_FOUND][pyfuncitem.nodeid].result()
    return True


def is_together(item: pytest.Item) -> bool:
    return item.get_closest_marker("together") is not None


def arguments(item: Any, first: Any) -> dict[str, Any]:
    """Return what the test takes: the module's target, which is there for the first, and a folder of its own."""
    value = first._request.getfixturevalue
    making = {"target": lambda: value("target"), "tmp_path": lambda: value("tmp_path_factory").mktemp("together")}
    return {name: making[name]() for name in item._fixtureinfo.argnames}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Answers of 8 tokens in about 0.1 s."""
    folder = tmp_path_factory.mktemp("truth")
    (folder / "law.yaml").write_text("ttft: {law: constant, s: 0.03}\ngap: {law: constant, s: 0.01}\n")
    command = [sys.executable, "-m", "loadtest.truth", "--port", "0", "--law", "law.yaml", "--log", "log.jsonl"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Target(process.stdout.readline().split()[-1])
        process.terminate()

"""This file has the settings and the model of all tests, and groups the tests that share a worker of pytest-xdist."""

from pathlib import Path

import pytest
from hypothesis import settings

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("serve-app", deadline=None)
settings.load_profile("serve-app")

SECOND_LANE = ("tests/e2e_fleet/", "tests/replica/")
"""Folders whose engines run beside those of all others; with these the two lanes of `make test` take about the same time."""
EARLY = "tests/loadtest/"
"""Folder of tests that wait more than they compute: they run while the lanes compute."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with random weights, which no test changes."""
    from serve_app.checkpoints import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a module's tests on one worker, where its fixtures are; the mark ``apart`` lets any worker run a test.

    The tests that start engines share two workers, whatever their number: two cores can start two fleets at once, not three. The lanes
    come first, as they last longest. A test's lane depends on nothing but its path, for its name on a worker ends with it.
    """
    engines = {_module(item) for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: (_module(item) not in engines, not item.nodeid.startswith(EARLY)))
    for item in items:
        if _module(item) in engines:
            lane = 2 if item.nodeid.startswith(SECOND_LANE) else 1
            item.add_marker(pytest.mark.xdist_group(f"engines-{lane}"))
        elif not item.get_closest_marker("apart"):
            item.add_marker(pytest.mark.xdist_group(_module(item)))


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]

"""Settings of all tests, and which of them share a worker of pytest-xdist."""

import pytest
from hypothesis import settings

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("serve-app", deadline=None)
settings.load_profile("serve-app")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a module's tests on one worker, where its fixtures are: but for the marks ``xdist_group``, of several modules, and ``apart``.

    What starts engines comes first, as it lasts longest.
    """
    items.sort(key=lambda item: item.get_closest_marker("engine") is None)
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in ("xdist_group", "apart")):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))

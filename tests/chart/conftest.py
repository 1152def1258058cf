"""The chart's tests need helm; `make charts` says where it comes from."""

import pytest

from tests.chart.render import tool


@pytest.fixture(autouse=True, scope="session")
def _helm() -> None:
    if tool("helm") is None:
        pytest.skip("helm is neither on the PATH nor in $KUBE_TESTBED/bin")

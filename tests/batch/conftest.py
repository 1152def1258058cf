from collections.abc import Iterator

import pytest

from tests.batch.service import Service


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.close()

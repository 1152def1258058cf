"""These fixtures open the pages in a headless Chromium, in front of a fake service; tests/ui/test_app.py has its own."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ui.axe import write_report
from tests.ui.browser import chromium
from tests.ui.fake_service import FakeService, fake_service, listening


@pytest.fixture(scope="session", autouse=True)
def _axe_report() -> Iterator[None]:
    """Write what axe-core found to the file that the variable AXE_REPORT names."""
    yield
    if path := os.environ.get("AXE_REPORT"):
        write_report(Path(path))


@pytest.fixture(scope="session")
def _fake() -> Iterator[FakeService]:
    with fake_service() as fake:
        yield fake


@pytest.fixture
def fake(_fake: FakeService) -> Iterator[FakeService]:
    yield _fake
    _fake.holds = _fake.busy = _fake.asks_for_key = _fake.breaks = False
    _fake.line, _fake.report, _fake.ways = "", FakeService().report, FakeService().ways


@pytest.fixture(scope="session")
def site(_fake: FakeService) -> Iterator[str]:
    """The pages of a demo whose engines are children of this process."""
    pytest.importorskip("gradio", reason="Gradio is not installed: pip install 'serve-app[ui]'")
    from serve_app.ui.app import web_app
    from serve_app.ui.killing import Killer

    with listening(web_app(_fake.url, Killer(psutil.Process()))) as url:
        yield url


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """Of a module only: no test beside Playwright's event loop could run its own."""
    with chromium() as page:
        yield page

"""Front ends of tests: vLLM's own, with the shortcuts, or without them where SERVE_APP_TEST_SHORTCUTS is `off`."""

import os
from typing import Any

import pytest

from serve_app.config import ModelSettings
from serve_app.ingress import shortcuts
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.front_end.front_end import FrontEnd, build_front_end
from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler

WITH_SHORTCUTS = os.environ.get("SERVE_APP_TEST_SHORTCUTS") != "off"
of_shortcuts: Any = pytest.mark.skipif(not WITH_SHORTCUTS, reason="is about a shortcut, and they are off")


async def front_end(model: ModelSettings, path: str, client: FleetClient, grammars: GrammarCompiler) -> FrontEnd:
    """Build a front end as the runtime does."""
    front = await build_front_end(model, path, client, grammars)
    if WITH_SHORTCUTS:
        shortcuts.install(front)
    return front

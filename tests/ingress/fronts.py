"""This module builds front ends as the runtime does, for tests."""

from serve_app.config import ModelSettings
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.front_end.front_end import FrontEnd, build_front_end
from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
from tests.shortcuts import WITH_SHORTCUTS


async def front_end(model: ModelSettings, path: str, client: FleetClient, grammars: GrammarCompiler) -> FrontEnd:
    """Build a front end as the runtime does."""
    if not WITH_SHORTCUTS:
        return await build_front_end(model, path, client, grammars)
    from serve_app.ingress import shortcuts

    return await build_front_end(model, path, client, grammars, shortcuts.install)

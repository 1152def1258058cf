"""vLLM's own front end around a fleet client, without any replica."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_app.checkpoints import make_tiny_embedding
from serve_app.config import parse_settings
from serve_app.ingress.fleet_client import FleetClient
from serve_app.ingress.frontend import build_front_end, serves
from serve_app.testing.fake_engine import CAPABILITIES
from serve_app.testing.fleet import in_loop

pytestmark = pytest.mark.engine


@in_loop
async def test_routes_follow_the_tasks_that_the_replicas_report(tmp_path: Path) -> None:
    model: Any = {
        "model": str(make_tiny_embedding(tmp_path / "model")),
        "engine_args": {"max_model_len": 64},
    }
    values = parse_settings({"models": {"embedding": model}})
    client = FleetClient(values, values.models["embedding"], ingress_id="ingress-1", token=b"", tls=None)
    front = await build_front_end(values.models["embedding"], model["model"], client)
    guessed = await front.app()
    assert serves(guessed, "/v1/embeddings")

    client.links.capabilities = msgspec.structs.replace(CAPABILITIES, tasks=("token_classify",))
    assert not serves(await front.app(), "/v1/embeddings")

    client.links.capabilities = msgspec.structs.replace(CAPABILITIES, tasks=("embed",))
    again = await front.app()
    assert serves(again, "/v1/embeddings")
    assert again is not guessed
    assert await front.app() is again

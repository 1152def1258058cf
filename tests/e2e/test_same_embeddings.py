"""These tests compare a fleet's embeddings with one vLLM server's. They have their own pair, as a server has one model."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_embedding
from tests.e2e.answers import Case, Json, differences, is_error
from tests.e2e.conftest import ask_both
from tests.e2e.fleet import MODEL, started_pair

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def embed(name: str, **fields: Any) -> Case:
    wanted = fields.pop("wanted", {})
    return Case(f"embeddings {name}", "/v1/embeddings", {"model": MODEL, "input": "The sea", **fields}, wanted=wanted)


CASES = [
    embed("text"),
    embed("texts", input=["The sea", "A train leaves the station"]),
    embed("token ids", input=[5, 300, 17]),
    embed("lists of token ids", input=[[5, 300], [17]]),
    embed("encoding_format float", encoding_format="float"),
    embed("user", user="u"),
    embed("truncate_prompt_tokens", input="hello " * 3000, truncate_prompt_tokens=100),
    embed("without normalization", use_activation=False),
    embed("invalid: dimensions", dimensions=64),
    embed("invalid: encoding_format", encoding_format="roman"),
    embed("invalid: too long", input="hello " * 3000),
    embed("invalid: no input", input=None),
    embed("invalid: token id outside", input=[99999]),
    embed(
        "invalid: unknown model",
        model="other",
        wanted={"body.error.message": "unknown-model", "body.error.param": "unknown-model"},
    ),
    Case("embeddings models", "/v1/models", method="GET"),
    Case(
        "embeddings invalid: completions",
        "/v1/completions",
        {"model": MODEL, "prompt": "a"},
        wanted={"body.detail": "error-bodies", "body.error": "error-bodies"},
    ),
    Case("embeddings tokenize", "/tokenize", {"model": MODEL, "prompt": "The sea"}),
]


@pytest.fixture(scope="module")
def embedding_answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Json, Json]]]:
    root = tmp_path_factory.mktemp("embedding")
    model = make_tiny_embedding(root / "tiny")
    with started_pair(model, root, port=8032, num_replicas=1, flags=[], frontend_args={}) as pair:
        yield asyncio.run(ask_both(pair, CASES))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_fleet_embeds_as_vllm(case: Case, embedding_answers: dict[str, tuple[Json, Json]]) -> None:
    bare, fleet = embedding_answers[case.name]
    assert is_error(bare) == ("invalid:" in case.name), bare
    found = differences(bare, fleet)
    assert set(found) == set(case.wanted), found

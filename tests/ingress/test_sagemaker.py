"""SageMaker's routes answer if they are configured."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ingress.fake_fronts import MAX_BODY_BYTES, error, front, get, ingress, post
from tests.ingress.tenants import of_keys


@pytest.mark.parametrize(
    ("field", "route"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "stream": True}, "/v1/chat/completions"),
        ({"prompt": "a", "model": "tiny"}, "/v1/completions"),
        ({"input": "a"}, "/v1/embeddings"),
    ],
)
def test_an_invocation_is_answered_by_the_route_that_its_body_is_for(field: dict[str, Any], route: str) -> None:
    response = post(ingress(sagemaker=True), "/invocations", json=field)
    answer = response.json()
    assert (response.status_code, answer["path"], json.loads(answer["body"])) == (200, route, field)


@pytest.mark.parametrize("body", [b"{}", b"[1]", b"no JSON", b"[" * 100_000])
def test_an_invocation_that_is_for_no_route_says_which_fields_identify_one(body: bytes) -> None:
    response = post(ingress(sagemaker=True), "/invocations", content=body[:MAX_BODY_BYTES])
    said = "body: is no JSON object with one of the fields messages, prompt, input, by which /invocations chooses a route"
    assert (response.status_code, response.json()) == (400, error(said, "BadRequestError", 400, "body"))


def test_ping_is_as_ready_as_readyz_and_needs_no_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("0123456789abcdef\n")
    keys = of_keys(tmp_path / "keys")
    assert get(ingress(sagemaker=True, tenants=keys), "/ping") == (200, {"status": "ready"})
    assert get(ingress(front("tiny", ready=False), sagemaker=True), "/ping")[0] == 503
    assert post(ingress(sagemaker=True, tenants=keys), "/invocations", json={"prompt": "a"}).status_code == 401


def test_sagemakers_routes_are_not_there_unless_configured() -> None:
    status, body = get(ingress(), "/ping")
    said = "/ping does not exist here: this server has no routes of SageMaker (ingress.sagemaker_routes)"
    assert (status, body["error"]["message"]) == (404, said)
    assert post(ingress(), "/invocations", json={"prompt": "a"}).status_code == 404

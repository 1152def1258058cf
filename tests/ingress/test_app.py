"""The outer application counts, routes, is ready, and picks the model that answers, over fake front ends."""

import asyncio
from typing import Any

import pytest
from prometheus_client import REGISTRY

from serve_app.errors import LeaseBoardSilent
from serve_app.ingress.routes.app import VLLM_ROUTES, AppLimits, IngressApp
from tests.doubles.fleet import in_loop
from tests.ingress.fake_fronts import MAX_BODY_BYTES, call, error, front, get, ingress, name_of_big, post


def counted(model: str) -> dict[str, float]:
    """What `serve_app_requests_total` says of the model, by outcome."""
    samples = [s for m in REGISTRY.collect() if m.name == "serve_app_requests" for s in m.samples if s.name.endswith("_total")]
    return {s.labels["outcome"]: s.value for s in samples if s.labels["model"] == model}


# Counts.


@in_loop
async def test_each_request_to_a_model_is_counted_once_however_it_ends_and_no_other_is() -> None:
    app = ingress(front("counted"))
    unknown = counted("").get("invalid", 0.0)
    for path in ("/v1/completions", "/v1/chat/completions"):
        await call(app, "POST", path, json={"model": "counted"})
    await call(app, "POST", "/v1/completions", json={"model": "of nobody"})
    await call(app, "GET", "/v1/models")
    await call(app, "GET", "/v1/completions")
    assert (counted("counted"), counted("")["invalid"] - unknown) == ({"complete": 2.0}, 1.0)


# Routes.


@in_loop
async def test_a_route_that_is_not_for_this_kind_of_model_is_named_with_the_model() -> None:
    response = await call(ingress(front("chat")), "POST", "/v1/embeddings", json={"model": "chat", "input": "a"})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "the model 'chat' does not serve /v1/embeddings: it is for generate"


@pytest.mark.parametrize("path", sorted(VLLM_ROUTES))
def test_a_route_of_vllms_reaches_its_app_with_the_whole_body(path: str) -> None:
    answer = post(ingress(), path, content=b'{"model": "tiny", "x": 1}')
    assert answer.json() == {"path": path, "body": '{"model": "tiny", "x": 1}', "more": False}


@pytest.mark.parametrize("path", ["/docs", "/v1/load_lora_adapter", "/pause", "/v1/completions/"])
def test_what_is_not_on_the_list_does_not_exist(path: str) -> None:
    for method in ("GET", "POST"):
        response = asyncio.run(call(ingress(), method, path))
        assert response.status_code == 404
        assert response.json() == error(f"{path} does not exist here", "NotFoundError", 404)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/chat/completions", "POST"), ("DELETE", "/generate", "POST"), ("POST", "/v1/models", "GET, HEAD")],
)
def test_another_method_is_answered_with_the_allowed_ones(method: str, path: str, allowed: str) -> None:
    response = asyncio.run(call(ingress(), method, path))
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert response.json() == error(f"allowed methods: {allowed}", "Method Not Allowed", 405)


def test_stored_responses_are_not_supported_and_say_so() -> None:
    status, body = get(ingress(), "/v1/responses/resp_1")
    message = "GET /v1/responses/resp_1 is not supported; this server keeps no responses between requests"
    assert (status, body) == (400, error(message, "BadRequestError", 400))


@in_loop
async def test_the_fleet_is_asked_for_once_however_many_people_look() -> None:
    num_asked = 0

    async def report() -> dict[str, Any]:
        nonlocal num_asked
        num_asked += 1
        return {"members": [{"replica_id": "a"}], "decisions": []}

    app = IngressApp({"tiny": front("tiny")}, AppLimits(MAX_BODY_BYTES), version={}, report=report)
    answers = await asyncio.gather(*(call(app, "GET", "/fleet") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert answers[0].json().items() >= {"members": [{"replica_id": "a"}], "decisions": []}.items()
    assert num_asked == 1


@in_loop
async def test_a_fleet_that_cannot_be_reported_is_503_and_other_routes_still_answer() -> None:
    async def report() -> dict[str, Any]:
        raise LeaseBoardSilent(retry_after_s=2.0)

    app = IngressApp({"tiny": front("tiny")}, AppLimits(MAX_BODY_BYTES), version={}, report=report)
    refused = await call(app, "GET", "/fleet")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert refused.json()["error"]["type"] == "lease_board_silent"
    assert (await call(app, "GET", "/v1/models")).status_code == 200


def test_without_a_board_there_is_no_fleet_to_report() -> None:
    assert get(ingress(), "/fleet")[0] == 404


def test_version_and_models_are_of_all_front_ends() -> None:
    app = ingress(front("tiny"), front("big"))
    assert get(app, "/version") == (200, {"version": "0.32.0", "serve_app": "0.1.0"})
    assert get(app, "/v1/models") == (200, {"object": "list", "data": [{"id": "tiny"}, {"id": "big"}]})


def test_a_model_is_found_by_its_id_and_an_unknown_one_is_404() -> None:
    app = ingress(front("tiny"), front("org/big"))
    assert get(app, "/v1/models/org/big") == (200, {"id": "org/big"})
    status, body = get(app, "/v1/models/small")
    assert (status, body["error"]["code"]) == (404, 404)
    assert "tiny, org/big" in body["error"]["message"]
    assert asyncio.run(call(app, "POST", "/v1/models/tiny")).status_code == 404


def test_metrics_are_prometheus_text() -> None:
    response = asyncio.run(call(ingress(), "GET", "/metrics"))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")


# Readiness.


def test_an_ingress_is_alive_whatever_its_replicas() -> None:
    assert get(ingress(front("tiny", ready=False)), "/healthz") == (200, {"status": "ok", "fleet": ""})
    response = asyncio.run(call(ingress(front("tiny", ready=False)), "GET", "/health"))
    assert (response.status_code, response.content) == (200, b""), "as vLLM's"


def test_an_ingress_is_ready_when_every_required_model_has_a_replica() -> None:
    optional = front("optional", ready=False, required=False)
    assert get(ingress(front("tiny"), optional), "/readyz") == (200, {"status": "ready"})
    waiting = {"status": "waiting", "models_without_a_replica": ["big"]}
    assert get(ingress(front("tiny"), front("big", ready=False)), "/readyz") == (503, waiting)


def test_a_draining_ingress_is_not_ready_and_still_answers() -> None:
    app = ingress()
    app.draining = True
    assert get(app, "/readyz") == (503, {"status": "draining"})
    assert post(app, content=b"{}").status_code == 200


# Which model.


def test_the_bodys_model_picks_the_front_end() -> None:
    app = ingress(front("tiny"), front("big", name_of_big))
    assert post(app, content=b'{"model": "big"}').json() == "big"
    assert post(app, content=b'{"model": "tiny"}').json()["path"] == "/v1/completions"


def test_an_unknown_model_is_answered_with_the_served_ones() -> None:
    response = post(ingress(front("tiny"), front("big")), content=b'{"model": "huge"}')
    message = "the model 'huge' does not exist; served here: tiny, big"
    assert (response.status_code, response.json()) == (404, error(message, "NotFoundError", 404, "model"))


def test_without_a_model_the_only_one_is_meant_and_of_several_none() -> None:
    assert post(ingress(), content=b"{}").status_code == 200
    response = post(ingress(front("tiny"), front("big")), content=b"{}")
    assert (response.status_code, response.json()) == (
        400,
        error("model: name one of tiny, big", "BadRequestError", 400, "model"),
    )


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"model": 5}', b"[]", b"[" * 400, b'{"model": "\xff"}'])
def test_a_body_that_names_no_model_gets_vllms_own_error_from_the_first_front_end(body: bytes) -> None:
    app = ingress(front("big", name_of_big), front("tiny"))
    assert post(app, content=body).json() == "big"

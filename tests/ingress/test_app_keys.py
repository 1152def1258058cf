"""The outer application asks for an API key on all routes but those of probes."""

import asyncio
from pathlib import Path

import pytest

from serve_app.ingress.routes.app import IngressApp
from tests.ingress.fake_fronts import call, error, ingress, post
from tests.ingress.tenants import of_keys


@pytest.fixture
def locked(tmp_path: Path) -> IngressApp:
    """An ingress that asks for the key `0123456789abcdef`."""
    (tmp_path / "keys").write_text("0123456789abcdef")
    return ingress(tenants=of_keys(tmp_path / "keys"))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/tiny",
        "/version",
        "/v1/completions",
        "/generate",
        "/v1/responses/x",
        "/docs",
        "/metrics/",
        "/fleet",
    ],
)
def test_without_a_key_every_route_answers_401_as_openai_does(locked: IngressApp, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        response = asyncio.run(call(locked, method, path))
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        said = "no API key was given; send the header `Authorization: Bearer KEY` with a key of this server"
        assert response.json() == error(said, "invalid_api_key", 401)


@pytest.mark.parametrize("path", ["/healthz", "/health", "/readyz", "/metrics"])
def test_probes_and_prometheus_need_no_key(locked: IngressApp, path: str) -> None:
    assert asyncio.run(call(locked, "GET", path)).status_code == 200


def test_a_request_with_a_key_is_served_and_the_key_is_looked_for_nowhere_else(locked: IngressApp) -> None:
    body = {"model": "tiny"}
    assert post(locked, json=body, headers={"Authorization": "Bearer 0123456789abcdef"}).status_code == 200
    assert post(locked, json=body, headers={"X-Api-Key": "0123456789abcdef"}).status_code == 200, "as Anthropic's clients send it"
    both = {"X-Api-Key": "0123456789abcdef", "Authorization": "Bearer x"}
    assert post(locked, json=body, headers=both).status_code == 401
    assert post(locked, "/v1/completions?api_key=0123456789abcdef", json=body).status_code == 401

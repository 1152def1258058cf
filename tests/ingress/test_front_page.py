"""`GET /` leads to what is there, and tells a client without a key nothing about this fleet."""

import asyncio

import pytest
from httpx import Response

from serve_app.ingress.routes.app import AppLimits, IngressApp
from serve_app.ingress.routes.front_page import FrontPage
from tests.ingress.fake_fronts import MAX_BODY_BYTES, call, front, ingress

CHAT = "http://127.0.0.1:8011/"


def get(app: IngressApp, accept: str = "*/*") -> Response:
    return asyncio.run(call(app, "GET", "/", headers={"accept": accept}))


def test_a_program_gets_the_links_as_json_and_a_browser_as_html() -> None:
    app = ingress(front("tiny"))
    answer = get(app)
    assert answer.status_code == 200
    assert list(answer.json()["links"]) == ["/v1/models", "/v1/chat/completions", "/readyz", "/healthz", "/metrics"]
    assert answer.json()["needs_key"] is False
    page = get(app, "text/html,application/xhtml+xml,*/*;q=0.8")
    assert page.headers["content-type"].startswith("text/html")
    assert '<a href="/v1/models">' in page.text
    assert [each.headers["vary"] for each in (answer, page)] == ["Accept", "Accept"]


def test_the_chat_page_is_linked_if_there_is_one() -> None:
    fronts = {"tiny": front("tiny")}
    app = IngressApp(fronts, AppLimits(MAX_BODY_BYTES), version={}, chat_page=CHAT)
    assert CHAT in get(app).json()["links"]
    assert f'<a href="{CHAT}">' in get(app, "text/html").text


@pytest.mark.parametrize("accept", [b"*/*", b"text/html"])
def test_with_keys_the_page_is_the_same_for_every_fleet(accept: bytes) -> None:
    bodies = {bytes(FrontPage(needs_keys=True, chat_page=page).answer({b"accept": accept}).body) for page in (CHAT, "")}
    assert len(bodies) == 1
    assert b"8011" not in bodies.pop()


def test_the_page_is_for_get_alone() -> None:
    answer = asyncio.run(call(ingress(), "POST", "/"))
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "/ does not exist here; the API is below /v1")

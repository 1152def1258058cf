"""`GET /` leads to what is there, and tells a client without a key nothing about this fleet."""

import asyncio

import pytest
from httpx import Response

from serve_app.ingress.routes.app import IngressApp
from serve_app.ingress.routes.front_page import FrontPage
from tests.ingress.fake_fronts import call, front, ingress


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


@pytest.mark.parametrize("accept", ["*/*", "text/html"])
def test_the_page_is_the_same_for_every_fleet(accept: str) -> None:
    bodies = {get(ingress(*map(front, names)), accept).text for names in (["tiny"], ["secret-model", "other"])}
    assert len(bodies) == 1


def test_the_page_says_whether_a_key_is_needed() -> None:
    page = FrontPage(needs_keys=True)
    assert b'"needs_key":true' in bytes(page.answer({}).body)
    assert b"Authorization: Bearer KEY" in bytes(page.answer({b"accept": b"text/html"}).body)


def test_the_page_is_for_get_alone() -> None:
    answer = asyncio.run(call(ingress(), "POST", "/"))
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "/ does not exist here; the API is below /v1")

"""Pages of the configured origins may call the API from a browser, and no others."""

import asyncio

from tests.ingress.fake_fronts import call, ingress, post

ORIGIN = "https://app.example.com"
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def test_without_origins_a_preflight_is_a_wrong_method_and_answers_allow_no_page() -> None:
    app = ingress()
    assert asyncio.run(call(app, "OPTIONS", "/v1/completions", headers=PREFLIGHT)).status_code == 405
    assert "access-control-allow-origin" not in post(app, json={"model": "tiny"}, headers={"origin": ORIGIN}).headers


def test_a_page_of_a_configured_origin_may_ask_and_read_the_answer() -> None:
    app = ingress(cors_origins=[ORIGIN])
    allowed = asyncio.run(call(app, "OPTIONS", "/v1/completions", headers=PREFLIGHT))
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    answer = post(app, json={"model": "tiny"}, headers={"origin": ORIGIN})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert {"Retry-After", "Retry-After-Ms"} <= set(answer.headers["access-control-expose-headers"].split(", "))


def test_a_page_of_another_origin_is_refused_its_preflight() -> None:
    app = ingress(cors_origins=[ORIGIN])
    headers = PREFLIGHT | {"origin": "https://evil.example.com"}
    refused = asyncio.run(call(app, "OPTIONS", "/v1/completions", headers=headers))
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


def test_an_error_of_ours_can_be_read_by_the_page_too() -> None:
    answer = post(ingress(cors_origins=["*"]), json={"model": "unknown"}, headers={"origin": ORIGIN})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (404, "*")

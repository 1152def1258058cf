"""These tests check `loadtest.wire.target`: addresses, and the requests to a target before the load."""

import json
import socket
from typing import Any

import pytest

from loadtest.errors import UsageError
from loadtest.wire.target import Target, preflight
from tests.loadtest.scripted import Script, Server


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://h",
        "http://",
        "http://h:99999",
        "http://h/?x=1",
        "http://h\r\nx",
        "http://u:p@h",
        "http://demo..svc:8000",
        f"http://{'a' * 64}.svc",
    ],
)
def test_a_bad_address_is_named(url: str) -> None:
    with pytest.raises(UsageError, match="is not like http://host:8000"):
        Target(url)


def page(value: object, status: str = "200 OK", kind: str = "application/json") -> Script:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\nContent-Type: {kind}\nServer: test\nContent-Length: {len(body)}\nConnection: close\n"
    return lambda peer: peer.answer(head, body)


MODELS = page({"object": "list", "data": [{"id": "tiny"}, {"id": "big"}]})
NO_PAGE = page({"detail": "Not Found"}, "404 Not Found")


def preflight_of(*pages: Script, model: str = "", **named: str) -> tuple[str, dict[str, Any]]:
    server = Server(*pages)
    try:
        return preflight(Target(server.url), model, named)
    finally:
        server.join()


def test_preflight_returns_the_model_and_what_the_target_is() -> None:
    info = {"server": "test", "models": ["tiny", "big"]}
    assert preflight_of(MODELS, page({"version": "0.32.0"})) == ("tiny", {**info, "version": "0.32.0"})
    assert preflight_of(MODELS, NO_PAGE, model="big") == ("big", info)
    name, found = preflight_of(NO_PAGE, NO_PAGE, model="mine")
    assert (name, found["models"], "was not checked to be served" in found["note"]) == ("mine", None, True)


@pytest.mark.parametrize(
    ("answer", "model", "message"),
    [
        (MODELS, "large", "model: 'large' is not served at .*; it serves tiny, big"),
        (NO_PAGE, "", "model: .* answers 404, so the model must be named"),
        (page(b"<html>Hello</html>", kind="text/html; charset=utf-8"), "", "target: .* HTML, not the OpenAI API"),
        (page({"error": "no"}, "401 Unauthorized"), "", "--api-key: .* answers 401: no; give the target's key"),
        (page({"error": "\x1b[2J"}, "401 Unauthorized"), "", r"answers 401: \\x1b\[2J; give the target's key"),
        (page({"data": [{"id": "\x1b[2J"}]}), "large", r"it serves \\x1b\[2J$"),
        (page({"error": {"message": "starting"}}, "503 X"), "", "target: .* answers 503: starting"),
        (page({"data": []}), "", "target: .* lists no model yet"),
        (page([1]), "", "target: .* does not answer as the OpenAI API does"),
        (page({"data": [{"id": "\ud800"}]}), "", "target: .* does not answer as the OpenAI API does"),
        (page({}, "307 X"), "", "target: .* redirects to nowhere"),
    ],
)
def test_preflight_refuses_what_cannot_be_tested(answer: Script, model: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        preflight_of(answer, model=model)


def test_a_list_without_an_envelope_is_a_list() -> None:
    assert preflight_of(page([{"id": "tiny", "object": "model"}]), NO_PAGE)[1]["models"] == ["tiny"]
    with pytest.raises(UsageError, match=r"'large' is not served at .*; it serves tiny"):
        preflight_of(page([{"id": "tiny"}]), model="large")


@pytest.mark.parametrize(("model", "api_key", "refused"), [("mine", "k", False), ("", "k", True), ("mine", "", True)])
def test_a_key_that_may_not_list_models_needs_a_named_one(model: str, api_key: str, refused: bool) -> None:
    pages = [page({"error": {"message": "Missing scopes"}}, "403 Forbidden"), *[NO_PAGE] * (not refused)]
    server = Server(*pages)
    target = Target(server.url, api_key)
    if refused:
        with pytest.raises(UsageError, match=r"--api-key: .* answers 403: Missing scopes; give the target's key"):
            preflight(target, model)
    else:
        assert preflight(target, model)[1]["note"].endswith("answers 403: model 'mine' was not checked to be served")
    server.join()


def test_a_name_that_cannot_be_looked_up_is_told() -> None:
    with pytest.raises(UsageError, match=r"target: http://xn--a:80/v1/models: .*; is the server up, and the address right"):
        preflight(Target("http://xn--a:80"), "m")


def test_preflight_names_a_target_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(UsageError, match=r"target: .*/v1/models: .*; is the server up"):
        preflight(Target(url), "")


def test_serve_app_says_whether_its_engines_are_simulated() -> None:
    ours = {"version": "0.32.0", "serve_app": "0.1.0"}
    assert preflight_of(MODELS, page(ours))[1]["simulated"] == ""
    said = {**ours, "simulated": {"tiny": "a10g-llama-8b, time_scale 1"}}
    assert preflight_of(MODELS, page(said))[1]["simulated"] == "a10g-llama-8b, time_scale 1"


def test_models_of_classes_must_be_served_too_and_the_key_that_names_one_is_in_the_message() -> None:
    assert preflight_of(MODELS, NO_PAGE, special="big")[0] == "tiny"
    with pytest.raises(UsageError, match=r"special: 'large' is not served at .*; it serves tiny, big"):
        preflight_of(MODELS, special="large")
    note = preflight_of(NO_PAGE, NO_PAGE, model="mine", special="big", same="mine")[1]["note"]
    assert note.endswith("answers 404: model 'big', 'mine' was not checked to be served")


def test_an_adapter_is_as_simulated_as_its_base_model() -> None:
    models = page({"data": [{"id": "real", "parent": None}, {"id": "tiny"}, {"id": "tuned", "parent": "tiny"}]})
    said = page({"version": "0.32.0", "serve_app": "0.1.0", "simulated": {"tiny": "a10g"}})
    assert preflight_of(models, said, model="real")[1]["simulated"] == ""
    assert preflight_of(models, said, model="tuned")[1]["simulated"] == "a10g"
    assert preflight_of(models, said, model="real", special="tuned", other="tiny")[1]["simulated"] == "a10g"

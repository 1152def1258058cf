"""A model of the hub is looked for in the cache and at the hub before anything starts."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from serve_app.cli import hub
from serve_app.cli.hub import HubAnswer, look_up
from serve_app.cli.startable import refuse_missing_checkpoint
from serve_app.config import ModelSettings, parse_settings
from serve_app.errors import ConfigError

ANSWERS = {
    "/org/open": (307, ""),
    "/org/gguf": (404, "EntryNotFound"),
    "/org/old": (404, "RevisionNotFound"),
    "/org/none": (401, "RepoNotFound"),
    "/org/gated": (403, "GatedRepo"),
    "/org/gone": (404, "RepoNotFound"),
    "/org/busy": (503, ""),
}


def model(name: str) -> ModelSettings:
    return parse_settings({"models": {"m": {"model": name}}}).models["m"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A hub of this machine, and an empty cache; the paths that it was asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            paths.append(self.path)
            status, code = ANSWERS[self.path.partition("/resolve/")[0]]
            self.send_response(status)
            self.send_header("x-error-code", code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "")
    yield paths
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "state", "said"),
    [
        ("org/open", "found", "it is fetched at the start"),
        ("org/gguf:Q4_K_M", "found", "has org/gguf"),
        ("org/old", "refused", "org/old has no such revision"),
        ("org/none", "refused", "the hub refuses org/none to requests without a token: it is private, gated or misspelt"),
        ("org/gated", "refused", "private, gated or misspelt"),
        ("org/gone", "refused", "the hub has no org/gone"),
        ("org/busy", "unknown", "the hub answers 503 for org/busy"),
    ],
)
def test_the_answer_of_the_hub_is_judged(asked: list[str], name: str, state: str, said: str) -> None:
    answer = look_up(model(name))
    assert (answer.state, said in answer.said) == (state, True)
    assert asked == [f"/{name.partition(':')[0]}/resolve/main/config.json"]


def cached(cache: Path, *names: str) -> Path:
    """Put files of org/none into the cache as the hub's client does."""
    folder = cache / "models--org--none"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


def test_a_model_in_the_cache_is_not_asked_for(asked: list[str], tmp_path: Path) -> None:
    cached(tmp_path, "config.json", "model.safetensors")
    assert look_up(model("org/none")) == HubAnswer("cached", f"org/none is in {tmp_path}")
    assert asked == []


def test_a_configuration_alone_in_the_cache_is_no_model(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = cached(tmp_path, "config.json")
    assert look_up(model("org/none")).state == "refused"
    assert asked == ["/org/none/resolve/main/config.json"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    answer = look_up(model("org/none"))
    said = f"org/none is not whole on this machine: {snapshot} holds no weights, no file that ends in .safetensors, "
    assert (answer.state, answer.said.startswith(said)) == ("refused", True)
    assert answer.said.endswith(", and HF_HUB_OFFLINE is set")


@pytest.mark.parametrize("keys", [{"simulated": {"profile": "a10g-llama-8b"}}, {"engine_args": {"load_format": "dummy"}}])
def test_an_engine_that_reads_no_weights_needs_none_in_the_cache(asked: list[str], keys: dict[str, Any], tmp_path: Path) -> None:
    cached(tmp_path, "config.json")
    settings = parse_settings({"models": {"m": {"model": "org/none"} | keys}})
    assert look_up(settings.models["m"]).state == "cached"
    assert asked == []


@pytest.mark.usefixtures("asked")
def test_weights_are_looked_for_where_the_engine_downloads_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached(tmp_path, "config.json")
    elsewhere = tmp_path / "weights"
    engine_args = {"download_dir": str(elsewhere)}
    settings = parse_settings({"models": {"m": {"model": "org/none", "engine_args": engine_args}}}).models["m"]
    answer = look_up(settings)
    said = f"org/none is not whole on this machine: {elsewhere}/models--org--none/snapshots/main holds no weights, "
    assert (answer.state, answer.said.startswith(said)) == ("refused", True)
    snapshot = cached(elsewhere, "model.safetensors")
    said = f"org/none is in {tmp_path}, its weights in {elsewhere}"
    assert look_up(settings) == refuse_missing_checkpoint(settings) == HubAnswer("cached", said)
    (snapshot / "model.safetensors").unlink()
    assert look_up(settings).state == "refused"


def test_the_load_format_says_which_files_are_weights(asked: list[str], tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "config.json", "model-rank-0-part-0.safetensors")
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    for load_format, state in (("auto", "refused"), ("sharded_state", "cached")):
        engine_args = {"load_format": load_format}
        settings = parse_settings({"models": {"m": {"model": "org/none", "engine_args": engine_args}}})
        assert look_up(settings.models["m"]).state == state
    assert len(asked) == 1


def test_offline_no_hub_is_asked(asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert look_up(model("org/open")) == HubAnswer(
        "refused",
        f"org/open is not in {tmp_path}, and HF_HUB_OFFLINE is set",
        "unset HF_HUB_OFFLINE, or give the path of a folder",
    )
    assert asked == []


@pytest.mark.usefixtures("asked")
def test_without_a_network_a_start_is_refused_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        with pytest.raises(ConfigError) as refused:
            refuse_missing_checkpoint(model("org/open"))
    assert str(refused.value) == (
        f"models.m.model: org/open is not on this machine, and {endpoint} cannot be reached: Connection refused; "
        "give a folder, or set HF_ENDPOINT to a mirror"
    )


@pytest.mark.usefixtures("asked")
def test_a_hub_that_stays_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "LIMIT_S", 0.05)
    never = threading.Event()
    monkeypatch.setattr(hub, "_answer_of", lambda *_: never.wait(30))
    answer = look_up(model("org/open"))
    assert (answer.state, "has not answered within 0.05 s" in answer.said) == ("unknown", True)
    refuse_missing_checkpoint(model("org/open"))
    never.set()

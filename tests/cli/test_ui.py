"""`serve-app ui` and the pages beside `serve-app up` say why there are no pages."""

import io
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from serve_app.cli import ui
from serve_app.cli.main import app
from serve_app.config import Settings, parse_settings
from serve_app.errors import ConfigError

ENDED = SimpleNamespace(wait=lambda: 0, terminate=lambda: None, communicate=lambda timeout=None: None)
"""Of the pages' process, what `pages` uses."""


def settings(port: int) -> Settings:
    return parse_settings({"models": {"a": {"model": "some/model"}}, "ui": {"port": port}})


def said(port: int) -> str:
    out = io.StringIO()
    with ui.pages(settings(port), Console(file=out, width=200)):
        pass
    return out.getvalue()


def test_a_taken_port_is_one_line_and_the_service_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "is_installed", lambda: True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert (
            said(port) == f"no chat page: cannot listen on 127.0.0.1:{port}: Address already in use; set ui.port to a free port\n"
        )


def test_without_gradio_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "is_installed", lambda: False)
    assert said(8011) == "no chat page: Gradio is not installed; pip install 'serve-app[ui]'\n"
    with pytest.raises(ConfigError, match="Gradio is not installed"):
        ui.ui("http://127.0.0.1:8010", "127.0.0.1", 8011, ends_with_input=False)


def test_a_url_that_is_none_is_named() -> None:
    result = CliRunner().invoke(app, ["ui", "--url", "127.0.0.1:8010"])
    assert (
        str(result.exception) == "--url: is '127.0.0.1:8010'; give the address of the service, for example http://127.0.0.1:8010"
    )


def test_the_pages_and_the_ingress_cannot_share_a_port() -> None:
    with pytest.raises(ConfigError, match=r"ui\.port: is 8010, and so is ingress\.port; choose another, for example 8011"):
        settings(8010)


def test_a_demo_offers_to_kill_engines_only_where_no_other_machine_reaches_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "is_installed", lambda: True)
    monkeypatch.setattr(ui, "refuse_taken_port", lambda *_: None)
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> SimpleNamespace:
        started.append(command)
        return ENDED

    monkeypatch.setattr("subprocess.Popen", start)
    for host, demo in [("127.0.0.1", True), ("127.0.0.1", False), ("0.0.0.0", True)]:
        out = io.StringIO()
        where = {"models": {"a": {"model": "some/model"}}, "ui": {"host": host, "port": 8011}}
        with ui.pages(parse_settings(where), Console(file=out, width=200), demo=demo):
            pass
        assert ("--kills" in started[-1]) is (demo and host == "127.0.0.1")
        assert ("does not offer to kill an engine: other machines may reach 0.0.0.0" in out.getvalue()) is (host == "0.0.0.0")


def test_a_demo_of_a_file_without_pages_says_that_it_has_no_effect() -> None:
    out = io.StringIO()
    with ui.pages(parse_settings({"models": {"a": {"model": "some/model"}}}), Console(file=out, width=200), demo=True):
        pass
    assert out.getvalue() == "--demo has no effect: this file asks for no pages; add `ui: {}` to it\n"


def test_a_demo_is_refused_on_a_cluster(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("models: {a: {model: some/model}}")
    result = CliRunner().invoke(app, ["up", "-f", str(file), "--demo", "--address", "127.0.0.1:6379"])
    assert str(result.exception).startswith("--demo: kills engines, and a cluster's belong to others too")

"""`serve-app ui` and the pages beside `serve-app up` say why there are no pages."""

import io
import socket

import pytest
from rich.console import Console
from typer.testing import CliRunner

from serve_app.cli import ui
from serve_app.cli.main import app
from serve_app.config import Settings, parse_settings
from serve_app.errors import ConfigError


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

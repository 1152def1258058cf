"""The script of `helm test` accepts right answers, and refuses each kind of wrong one."""

import importlib.util
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.chart.render import CHART, render
from tests.serving import serving

SPEC = importlib.util.spec_from_file_location("ask", CHART / "files" / "ask.py")
assert SPEC is not None
assert SPEC.loader is not None
ask: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ask)

KEY = "sk-0123456789abcdef"


def chunk(content: str, finish: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": content}, "finish_reason": finish}]})


class FakeIngress(ThreadingHTTPServer):
    """Answers like an ingress; what it says can be replaced."""

    models: tuple[str, ...] = ("m",)
    key: str = KEY
    chat: tuple[str, ...] = (": waiting", chunk("Par"), chunk("is", "stop"), "data: [DONE]")
    generate: tuple[str, ...] = ('{"text": ["The sky is b"]}', '{"text": ["The sky is blue"]}')


class _Handler(BaseHTTPRequestHandler):
    server: FakeIngress

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer("\n\n".join(self.server.chat if "chat" in self.path else self.server.generate) + "\n")

    def _answer(self, text: str) -> None:
        if self.server.key and self.headers["authorization"] != f"Bearer {self.server.key}":
            return self.send_error(401)
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def ingress() -> Iterator[FakeIngress]:
    with serving(FakeIngress(("127.0.0.1", 0), _Handler)) as server:
        yield server


def asked(ingress: FakeIngress, keys: Path | None = None) -> int:
    arguments = [f"http://127.0.0.1:{ingress.server_port}", "m", "--timeout-s=0"]
    return int(ask.main([*arguments, *([f"--keys-file={keys}"] if keys else [])]))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"sha256:{'0' * 64}\n{KEY}\n")
    return path


def test_right_answers_pass(ingress: FakeIngress, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(ingress, keys) == 0
    out = capsys.readouterr().out
    assert "'Paris'" in out
    assert "'The sky is blue'" in out
    assert "without a key: 401" in out


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("models", ("other",), "has ['other'], not 'm'"),
        ("chat", (chunk("Par"),), "not with [DONE]"),
        ("chat", (chunk("", "stop"), "data: [DONE]"), "no text"),
        ("chat", (chunk("Par"), "data: [DONE]"), "no finish_reason"),
        ("generate", ('{"error": {"message": "no"}}',), "/generate ends with"),
        ("generate", ('{"text": ["The sky is"]}',), "/generate ends with"),
        ("key", "sk-another-0123456789", "/v1/models: 401"),
        ("key", "", "answers 200, not 401"),
    ],
)
def test_wrong_answers_fail_and_are_named(
    ingress: FakeIngress, keys: Path, capsys: pytest.CaptureFixture[str], attribute: str, value: Any, said: str
) -> None:
    setattr(ingress, attribute, value)
    assert asked(ingress, keys) == 1
    assert said in capsys.readouterr().err


def test_a_file_of_digests_only_says_what_to_do(ingress: FakeIngress, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys.write_text(f"sha256:{'0' * 64}\n")
    assert asked(ingress, keys) == 1
    assert "test.apiKeySecret" in capsys.readouterr().err


def test_nobody_there_is_said_after_the_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeIngress(("127.0.0.1", 0), _Handler) as server:
        port = server.server_port
    assert ask.main([f"http://127.0.0.1:{port}", "m", "--timeout-s=0"]) == 1
    assert "no answer within 0 s" in capsys.readouterr().err


def test_the_pod_runs_this_script_with_the_first_model_and_the_keys() -> None:
    r = render()
    assert r.of("ConfigMap")["test"]["data"]["ask.py"].strip() == (CHART / "files" / "ask.py").read_text().strip()
    container = r.of("Pod")["test"]["spec"]["containers"][0]
    assert container["args"][:2] == ["http://demo:80", "smollm2-135m-instruct"]
    assert container["args"][-1] == "--keys-file=/etc/serve-app/api-keys/keys"

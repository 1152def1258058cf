"""`make observe` reports what is missing before it starts anything."""

import contextlib
import signal
import socket
import sys
from pathlib import Path

import pytest

from tools import observe


def test_a_taken_port_is_one_sentence_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["observe", "--folder", str(tmp_path), "--port", str(port)])
        assert observe.main() == 2
    said = f"error: cannot listen on 127.0.0.1:{port}: Address already in use; set PROMETHEUS_PORT to a free port\n"
    assert capsys.readouterr() == ("", said)


def test_ctrl_c_says_in_one_line_what_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Running:
        def wait(self) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["observe", "--folder", str(tmp_path), "--port", "1"])
    monkeypatch.setattr(observe, "refuse_taken_port", lambda *_: None)
    monkeypatch.setattr(observe, "prometheus", lambda *_: contextlib.nullcontext(Running()))
    monkeypatch.setattr("shutil.which", lambda _: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert observe.main() == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().out.splitlines()[-1] == f"stopped: Prometheus; what was recorded stays in {tmp_path}"

"""These tests make a whole run over TLS with a private authority: the checks before it, the load, and the scrapes beside it."""

import asyncio
import contextlib
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from loadtest.errors import UsageError
from loadtest.proof.truth.server import running
from loadtest.proof.truth.settings import Law
from loadtest.records import Row, ServerSample, read_lines
from loadtest.wire.target import CA_VARIABLE, trust
from tests.loadtest.scripted import certificate_for_loopback
from tests.loadtest.whole_runs import WITHIN_S

SCENARIO = """
name: tls
arrival: {law: constant, rate: 10}
requests: [{input_tokens: {mean: 8}, output_tokens: {mean: 4}}]
duration_s: 2
warmup_s: 0.5
"""


@contextlib.contextmanager
def behind_tls(url: str, certificate: Path) -> Iterator[str]:
    """A proxy that speaks TLS to its clients and passes on what they say."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    loop = asyncio.new_event_loop()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        await asyncio.gather(pipe(reader, inner[1]), pipe(inner[0], writer))

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@pytest.mark.parametrize("way", ["--ca-file", CA_VARIABLE])
def test_a_run_trusts_the_authority_that_it_is_given(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tls.yaml").write_text(SCENARIO)
    certificate = certificate_for_loopback(tmp_path)
    options = ["--ca-file", str(certificate)] if way == "--ca-file" else []
    if not options:
        monkeypatch.setenv(CA_VARIABLE, str(certificate))
    law = Law.model_validate({"ttft": {"law": "constant", "s": 0.01}})
    with running(law, log=tmp_path / "log.jsonl") as url, behind_tls(url, certificate) as target:
        command = ["run", "tls.yaml", "--no-report", "--target", target, "--out", "out", *options]
        ended = subprocess.run(
            [sys.executable, "-m", "loadtest.cli", *command], cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S
        )
    rows = list(read_lines(tmp_path / "out" / "rows.jsonl", Row))
    assert ([row.state for row in rows], "error:" in ended.stderr) == (["ok"] * 20, False)
    assert {s.error for s in read_lines(tmp_path / "out" / "server.jsonl", ServerSample)} == {""}


def test_a_file_without_a_certificate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.pem").touch()
    with pytest.raises(UsageError, match=r"--ca-file: .*empty.pem: .*; give certificates as PEM"):
        trust(tmp_path / "empty.pem")
    monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "none.pem"))
    with pytest.raises(UsageError, match=r"SSL_CERT_FILE: .*none.pem: No such file"):
        trust(None)

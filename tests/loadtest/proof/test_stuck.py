"""These tests use targets that do not answer: each wait ends, and reports what it waited for."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.errors import UsageError
from loadtest.wire import client as client_module
from loadtest.wire import target as target_module
from loadtest.wire.client import Client
from loadtest.wire.target import Target, preflight
from tests.loadtest.scripted import Peer, Server, certificate_for_loopback

SOON_S = 0.5


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CONNECT_WITHIN_S", SOON_S)
    monkeypatch.setattr(target_module, "ANSWER_WITHIN_S", SOON_S)
    monkeypatch.setattr(target_module, "MAX_PAGE_BYTES", 1_000_000)


@contextlib.contextmanager
def full_backlog() -> Iterator[str]:
    """A listener that accepts no connection, and whose queue is full: the kernel answers no further SYN."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("num", [1, 300])
def test_a_warm_up_against_a_target_that_takes_no_connection_ends(num: int) -> None:
    with full_backlog() as address:
        client = Client(Target(f"http://{address}"), worker=0, epoch=time.perf_counter(), id_prefix="x-")
        with pytest.raises(UsageError, match=r"no connection to it can be opened now: it accepted none in 0.5 s"):
            client.warm(num)


def test_a_warm_up_against_a_target_that_never_shakes_hands_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # its queue takes connections; no process speaks TLS
        target = Target(f"https://127.0.0.1:{listener.getsockname()[1]}")
        client = Client(target, worker=0, epoch=time.perf_counter(), id_prefix="x-")
        with pytest.raises(UsageError, match=r"it accepted none in 0.5 s"):
            client.warm(3)


def drip(peer: Peer) -> None:
    """A head that grows a byte at a time and never ends."""
    peer.read_request()
    gone = threading.Event()
    with contextlib.suppress(OSError):
        peer.conn.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        for _ in range(200):
            gone.wait(SOON_S / 20)
            peer.conn.sendall(b"x")


def endless(peer: Peer) -> None:
    """A body that never ends."""
    peer.answer("HTTP/1.1 200 OK\nContent-Type: application/json\n")
    with contextlib.suppress(OSError):
        while True:
            peer.conn.sendall(b" " * 10_000)


@pytest.mark.parametrize(
    ("script", "said"), [(drip, "no whole answer within 0.5 s"), (endless, "the answer did not end in time, or within 0 MiB")]
)
def test_a_list_of_models_that_never_ends_is_given_up(script: object, said: str) -> None:
    server = Server(script)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"target: .*/v1/models: {said}; is the server up"):
        preflight(Target(server.url), "")


def test_a_certificate_that_cannot_be_checked_says_how_it_could(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_for_loopback(tmp_path))
    server = Server(lambda _: None, tls=context)
    with pytest.raises(UsageError, match="give the file of its authority with --ca-file"):
        preflight(Target(server.url.replace("http:", "https:")), "")
    server.join()

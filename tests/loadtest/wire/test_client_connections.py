"""These tests check which connection a request uses, and the effect of a close at the wrong moment. T17 of the self-tests."""

import hashlib
import socket
import ssl
import threading
import time
from pathlib import Path

import gevent
import pytest

from loadtest.wire.client import NOTE_RESENT, Client
from loadtest.wire.target import Target
from tests.loadtest.scripted import (
    CHUNKED,
    DONE,
    WHOLE,
    Peer,
    Server,
    ask,
    asked,
    certificate_for_loopback,
    chunk,
    client_of,
    event,
    good,
)


def test_a_connection_is_used_again_and_text_is_dropped_when_not_wanted() -> None:
    def script(peer: Peer) -> None:
        good(peer)
        peer.answer(
            "HTTP/1.1 100 Continue\n\nHTTP/1.1 200 OK\nContent-Type: application/json\n" + f"Content-Length: {len(WHOLE)}\n",
            WHOLE,
        )

    with client_of(script) as client:
        rows = [client.ask(asked(), due_s=0.0), client.ask(asked(stream=False, keep_text=False), due_s=0.0)]
    assert [row.state for row in rows] == ["ok", "ok"]
    assert (rows[1].text, rows[1].text_sha256) == ("", hashlib.sha256(b"hi").hexdigest())
    assert (rows[1].prompt_tokens, rows[1].output_tokens, [n for _, n in rows[1].chunks]) == (3, 2, [2])
    assert rows[1].first_s == rows[1].last_s == rows[1].end_s


def test_warm_connections_are_used_by_many_greenlets_at_once() -> None:
    barrier = threading.Barrier(4)

    def script(peer: Peer) -> None:
        peer.read_request()
        barrier.wait(30)  # all four are under way
        peer.send(CHUNKED, chunk(event("a") + DONE), b"0\r\n\r\n")

    with client_of(*[script] * 4) as client:
        assert client.warm(4) == 4
        jobs = [gevent.spawn(client.ask, asked(id=i), due_s=0.0) for i in range(4)]
        gevent.joinall(jobs, timeout=30)
        assert [(job.value.id, job.value.state) for job in jobs] == [(i, "ok") for i in range(4)]


def test_an_idle_connection_that_the_server_closed_is_not_used() -> None:
    closed = threading.Event()

    def closing(peer: Peer) -> None:
        good(peer)
        peer.conn.shutdown(socket.SHUT_RDWR)
        closed.set()

    with client_of(closing, good) as client:
        client.ask(asked(), due_s=0.0)
        assert closed.wait(30)
        row = client.ask(asked(), due_s=0.0)
    assert (row.state, row.reason) == ("ok", "")


def crossing(peer: Peer) -> None:
    """Answers once; of the next request it reads all and closes, as when the close had crossed it."""
    good(peer)
    peer.read_request()


def silent(peer: Peer) -> None:
    peer.read_request()


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a close depends on the machine; the tests that need a fast close say so."""
    monkeypatch.setattr("loadtest.wire.client.RACE_S", 30.0)


@pytest.mark.usefixtures("slow_machine")
def test_a_close_that_crosses_the_request_is_repaired_once_and_noted() -> None:
    with client_of(crossing, good) as client:
        assert client.ask(asked(), due_s=0.0).reason == ""
        row = client.ask(asked(), due_s=0.0)
    assert (row.state, row.reason, row.text) == ("ok", NOTE_RESENT, "ab")


def test_a_close_that_comes_too_late_for_a_race_is_the_targets_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.wire.client.RACE_S", 0.0)
    with client_of(crossing) as client:
        client.ask(asked(), due_s=0.0)
        row = client.ask(asked(), due_s=0.0)
    assert (row.state, row.reason) == ("truncated", "the connection ended before any answer")


@pytest.mark.usefixtures("slow_machine")
def test_the_repair_itself_is_not_repaired() -> None:
    with client_of(crossing, silent) as client:
        client.ask(asked(), due_s=0.0)
        row = client.ask(asked(), due_s=0.0)
    assert (row.state, row.reason) == ("truncated", f"{NOTE_RESENT}; the connection ended before any answer")


@pytest.mark.usefixtures("slow_machine")
def test_nothing_is_resent_on_a_fresh_connection_or_after_a_byte_came() -> None:
    row = ask(silent)
    assert (row.state, row.reason) == ("truncated", "the connection ended before any answer")

    def script(peer: Peer) -> None:
        good(peer)
        peer.read_request()
        peer.conn.sendall(b"H")

    with client_of(script) as client:
        client.ask(asked(), due_s=0.0)
        row = client.ask(asked(), due_s=0.0)
    assert (row.state, row.reason, row.status) == ("truncated", "the connection ended inside the answer", 0)


def test_a_connection_that_is_to_be_closed_is_closed() -> None:
    closed = threading.Event()

    def script(peer: Peer) -> None:
        peer.answer(f"HTTP/1.1 200 OK\nConnection: close\nContent-Length: {len(WHOLE)}\n", WHOLE)
        assert peer.gone()
        closed.set()

    with client_of(script) as client:
        assert client.ask(asked(stream=False), due_s=0.0).state == "ok"
        assert closed.wait(30)  # before the client closes its pool


def test_data_after_the_answer_costs_the_connection_and_nothing_else() -> None:
    extra = b"0\r\n\r\nHTTP/1.1 500 Whoever asked\r\nContent-Length: 0\r\n\r\n"
    with client_of(lambda peer: peer.answer(CHUNKED, chunk(event("a") + DONE), extra), good) as client:
        rows = [client.ask(asked(), due_s=0.0) for _ in range(2)]
    assert [(row.state, row.status, row.text) for row in rows] == [("ok", 200, "a"), ("ok", 200, "ab")]


def twice(peer: Peer) -> None:
    good(peer)
    good(peer)


def test_tls_is_verified_and_its_connections_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate := certificate_for_loopback(tmp_path))
    server = Server(silent, twice, tls=context)
    target = Target(server.url.replace("http:", "https:"))
    client = Client(target, worker=0, epoch=time.perf_counter(), id_prefix="x-")
    row = client.ask(asked(), due_s=0.0)
    assert (row.state, "certificate verify failed" in row.reason) == ("connect_error", True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    client = Client(target, worker=0, epoch=time.perf_counter(), id_prefix="x-")
    assert client.warm(1) == 1
    rows = [client.ask(asked(), due_s=0.0) for _ in range(2)]
    assert [(row.state, row.text) for row in rows] == [("ok", "ab"), ("ok", "ab")]
    client.close()
    server.join()

"""Simulated engines of different processes reach each other over TCP, and notice that the other one is dead or does not answer."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from serve_app.replica.side_channel import SideChannel, reserve
from serve_app.simulated.exchange import ANSWER_S, Answer, Ask
from serve_app.simulated.tcp_exchange import TcpExchange

HOST = "127.0.0.1"
PORTS = range(23800, 23864)
WAIT_S = 20.0
"""The longest wait for what a thread does."""


class FakeSource:
    """Keeps one request."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.released = threading.Event()

    def answer(self, ask: Ask) -> Answer | None:
        self.asked.append(ask)
        return Answer(1000, 0.25, 0.5) if ask.request_id == "r@0" else None

    def release(self, request_id: str) -> None:
        assert request_id == "r@0"
        self.released.set()


class FakeReading:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.answers: list[Answer | None] = []
        self.is_answered, self.is_lost = threading.Event(), threading.Event()

    def answered(self, answer: Answer | None) -> None:
        self.answers.append(answer)
        self.is_answered.set()

    def lost(self) -> None:
        self.is_lost.set()

    def wait(self) -> list[Answer | None]:
        assert self.is_answered.wait(WAIT_S)
        return self.answers


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    """Reserve a port as a replica's supervisor does."""
    found = reserve(HOST, PORTS, "key")
    with found.sock:
        yield found


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


def ask(port: int, request_id: str = "r@0", num_blocks: int = 3) -> Ask:
    return Ask(HOST, port, "a", request_id, num_blocks, 0.5)


def test_a_source_answers_on_the_reserved_port_and_learns_when_the_read_is_over(channel: SideChannel, source: FakeSource) -> None:
    exchange, reading = TcpExchange(HOST, channel.port), FakeReading()
    with contextlib.closing(_Served(exchange, source)):
        finish = exchange.ask(ask(channel.port), reading)
        assert reading.wait() == [Answer(1000, 0.25, 0.5)]
        assert source.asked == [ask(channel.port)]
        assert not source.released.is_set()
        finish()
        assert source.released.wait(WAIT_S)


def test_a_source_that_does_not_keep_the_request_says_so(channel: SideChannel, source: FakeSource) -> None:
    exchange, reading = TcpExchange(HOST, channel.port), FakeReading()
    with contextlib.closing(_Served(exchange, source)):
        exchange.ask(ask(channel.port, "unknown@0"), reading)
        assert reading.wait() == [None]


def test_a_source_whose_target_dies_does_not_count_the_request_as_read(channel: SideChannel, source: FakeSource) -> None:
    exchange, reading = TcpExchange(HOST, channel.port), FakeReading()
    with contextlib.closing(_Served(exchange, source)):
        with socket.create_connection((HOST, channel.port)) as dying:
            dying.sendall(b'{"host":"h","port":1,"engine_id":"a","request_id":"r@0","num_blocks":3,"wait_s":0}\n')
            assert dying.recv(100).endswith(b"}\n")
        exchange.ask(ask(channel.port), reading)  # other requests go on
        reading.wait()
        assert not source.released.is_set()


def test_a_source_that_dies_during_a_read_is_noticed(channel: SideChannel, source: FakeSource) -> None:
    exchange, reading = TcpExchange(HOST, channel.port), FakeReading()
    served = _Served(exchange, source)
    exchange.ask(ask(channel.port), reading)
    reading.wait()
    served.close()
    assert reading.is_lost.wait(WAIT_S)
    again = FakeReading()
    exchange.ask(ask(channel.port), again)
    assert again.wait() == [None]


def test_a_source_that_does_not_answer_is_waited_for_a_second(channel: SideChannel) -> None:
    reading = FakeReading()
    with socket.create_server((HOST, channel.port)):  # takes connections, and reads nothing
        began = time.monotonic()
        TcpExchange(HOST, channel.port).ask(ask(channel.port), reading)
        assert not reading.is_answered.is_set()  # the engine's step goes on
        assert reading.wait() == [None]
        assert time.monotonic() - began >= 0.9 * ANSWER_S


@pytest.mark.parametrize("sent", [b"\n", b"{}\n", b"\xff" * 9000, b'{"host":"h","port":1,"engine_id":"","request_id":"r@0"}\n'])
def test_what_is_no_question_gets_no_answer(sent: bytes, channel: SideChannel, source: FakeSource) -> None:
    exchange, reading = TcpExchange(HOST, channel.port), FakeReading()
    with contextlib.closing(_Served(exchange, source)):
        with socket.create_connection((HOST, channel.port)) as sock:
            sock.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        exchange.ask(ask(channel.port), reading)
        assert reading.wait() == [Answer(1000, 0.25, 0.5)]


def test_a_port_that_another_engine_has_is_refused(channel: SideChannel, source: FakeSource) -> None:
    exchange = TcpExchange(HOST, channel.port)
    with contextlib.closing(_Served(exchange, source)), pytest.raises(OSError, match="in use"):
        exchange.serve("b", source)


class _Served:
    def __init__(self, exchange: TcpExchange, source: FakeSource) -> None:
        self.close = exchange.serve("a", source)

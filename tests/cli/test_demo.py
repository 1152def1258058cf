"""These tests cover the parts of `serve-app demo` that need no fleet: outcomes, the summary, and the choice of the engine to kill."""

import contextlib
import json
import os
import queue
import signal
import socketserver
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import astuple
from http.client import parse_headers
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement
from rich.console import Console

from serve_app.cli import demo
from serve_app.cli.demo import BREAK_AFTER_TOKENS, _Victim
from serve_app.cli.demo_answers import DemoAnswer, Summary
from serve_app.cli.demo_client import DemoClient
from serve_app.config import EXAMPLE
from serve_app.errors import ClusterFailed
from tests.doubles.fleet import MODEL, settings


def data(**event: Any) -> str:
    return f"data: {json.dumps(event)}"


def piece(text: str | None, finish_reason: str | None = None) -> str:
    return data(choices=[{"delta": {"content": text}, "finish_reason": finish_reason}])


WHOLE = [piece(""), piece("Par"), piece("is", "stop"), data(choices=[], usage={"completion_tokens": 2}), "data: [DONE]"]
ERROR = data(error={"message": "no replica is left"})


def answer(lines: list[str], **fields: Any) -> DemoAnswer:
    taken = DemoAnswer(**fields)
    for line in lines:
        taken.take(line)
    return taken


def test_an_answer_is_put_together_from_its_events() -> None:
    taken = DemoAnswer()
    assert [taken.take(line) for line in ["", ": a comment", *WHOLE]] == ["", "", "", "Par", "is", "", ""]
    assert taken == DemoAnswer("Paris", 2, finish_reason="stop", done=True)


@pytest.mark.parametrize(
    ("ended", "outcome", "problem"),
    [
        (answer(WHOLE), "complete", ""),
        (answer(WHOLE[:2]), "truncated", "the stream ended without a finish reason"),
        (answer(WHOLE[:4]), "truncated", "the stream ended without a finish reason"),
        (answer([*WHOLE[:2], WHOLE[-1]]), "truncated", "the stream ended without a finish reason"),
        (answer(WHOLE[:2], lost="ReadError: reset"), "truncated", "ReadError: reset"),
        (answer([*WHOLE[:2], ERROR, WHOLE[-1]]), "failed", "no replica is left"),
        (DemoAnswer(error="503: busy"), "failed", "503: busy"),
        (DemoAnswer(lost="ConnectError: refused"), "failed", "ConnectError: refused"),
    ],
)
def test_an_answer_has_one_outcome(ended: DemoAnswer, outcome: str, problem: str) -> None:
    assert (ended.outcome, ended.problem) == (outcome, problem)


def test_the_summary_counts_every_answer_and_times_those_that_began() -> None:
    answers = [
        *(answer(WHOLE, ttft_s=ttft_s) for ttft_s in (0.1, 0.2, 0.3)),
        answer(WHOLE[:2], ttft_s=0.4),
        DemoAnswer(error="503"),
    ]
    summary = Summary.of(answers, elapsed_s=3.0)
    assert astuple(summary) == pytest.approx((5, 2.0, 0.25, 0.397, 1, 1))
    assert not summary.good


def test_only_answers_that_are_all_complete_are_good() -> None:
    assert Summary.of([answer(WHOLE)], elapsed_s=1.0).good
    assert not Summary.of([], elapsed_s=1.0).good
    assert Summary.of([DemoAnswer(error="503")], elapsed_s=1.0) == Summary(1, 0.0, None, None, failed=1, truncated=0)


@contextlib.contextmanager
def client_of(raw: str) -> Iterator[DemoClient]:
    """A client of a server that gives these bytes to every request, then closes."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(raw.encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield DemoClient(settings(ingress={"port": server.server_address[1]}))
        server.shutdown()


def http(body: str, *, status: str = "200 OK") -> str:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}"


def streamed(lines: list[str], *, whole: bool = True) -> str:
    """Return a stream as an ingress sends it, an event in each chunk; without its last chunk it is cut."""
    events = [f"{line}\n\n" for line in lines]
    chunks = "".join(f"{len(event.encode()):x}\r\n{event}\r\n" for event in events)
    return f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunks}" + ("0\r\n\r\n" if whole else "")


def test_a_stream_is_timed_and_given_out_as_it_comes() -> None:
    pieces: list[str] = []

    with client_of(streamed(WHOLE)) as client:
        whole = client.chat("?", max_tokens=2, on_text=pieces.append)
    assert (whole.text, whole.outcome, pieces) == ("Paris", "complete", ["Par", "is"])
    assert whole.ttft_s is not None


def test_characters_that_unicode_counts_as_line_ends_stay_in_the_text() -> None:
    event = 'data: {"choices": [{"delta": {"content": "a\u2028b\u0085c é"}, "finish_reason": "stop"}]}'
    with client_of(streamed([event, WHOLE[-1]])) as client:
        whole = client.chat("?", max_tokens=2)
    assert (whole.text, whole.outcome) == ("a\u2028b\u0085c é", "complete")


def test_a_refusal_and_a_cut_connection_are_in_the_answer() -> None:
    with client_of(http("busy", status="503 Service Unavailable")) as client:
        assert client.chat("?", max_tokens=2) == DemoAnswer(error="503: busy")
    with client_of(streamed(WHOLE[:2], whole=False)) as client:
        cut = client.chat("?", max_tokens=2)
    assert (cut.text, cut.outcome, bool(cut.lost)) == ("Par", "truncated", True)


NUM_STREAMS = 2


@contextlib.contextmanager
def client_of_stalled_streams(closed: queue.Queue[bool]) -> Iterator[DemoClient]:
    """A client of a server whose answers begin and then stall. Once `NUM_STREAMS` have begun, the server presses Ctrl-C.

    ``closed`` gets an item for each stream: whether the client closed it. After 3 s the server does.
    """
    begun = threading.Barrier(NUM_STREAMS, action=lambda: os.kill(os.getpid(), signal.SIGINT))

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.rfile.read(int(parse_headers(self.rfile)["content-length"]))
            self.wfile.write(streamed(WHOLE[:2], whole=False).encode())
            with contextlib.suppress(threading.BrokenBarrierError):
                begun.wait(timeout=3)
            self.connection.settimeout(3)
            try:
                closed.put(self.rfile.read(1) == b"")
            except TimeoutError:
                closed.put(False)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield DemoClient(settings(ingress={"port": server.server_address[1]}))
        server.shutdown()


def test_ctrl_c_during_the_load_closes_the_answers_under_way_and_asks_for_no_more() -> None:
    closed = queue.Queue[bool]()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with client_of_stalled_streams(closed) as client, pytest.raises(KeyboardInterrupt):
            client.load("?", num_streams=NUM_STREAMS, seconds=3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [closed.get(timeout=30) for _ in range(NUM_STREAMS)] == [True] * NUM_STREAMS
    assert closed.empty()


def held(**by_replica: int) -> str:
    """Return /metrics of an ingress with another model beside ours."""
    rows = [f'serve_app_replica_held{{model="{MODEL}",replica="{name}"}} {n}' for name, n in by_replica.items()]
    return http("\n".join([*rows, 'serve_app_replica_held{model="other",replica="z"} 9', ""]))


def test_no_urllib3_is_allowed_that_cannot_end_a_stream_from_another_thread() -> None:
    """`HTTPResponse.shutdown` came with 2.3."""
    asked = tomllib.loads(Path(__file__, "../../../pyproject.toml").resolve().read_text())["project"]["dependencies"]
    (urllib3,) = [found for found in map(Requirement, asked) if found.name == "urllib3"]
    assert ("2.2.3" in urllib3.specifier, "2.3.0" in urllib3.specifier) == (False, True)


def test_replicas_are_waited_for_until_the_limit() -> None:
    with client_of(held(a=0)) as client:
        client.wait_for_replicas(limit_s=0)
        client.num_replicas = 2
        with pytest.raises(ClusterFailed, match="1 of 2 replicas after 0 s"):
            client.wait_for_replicas(limit_s=0)


def test_an_ingress_that_is_gone_is_told_in_one_line() -> None:
    with client_of("") as client, pytest.raises(ClusterFailed, match="the ingress does not answer: ConnectionError"):
        client.wait_for_replicas(limit_s=0)


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, which it does not in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)])
def test_a_signal_stops_all_and_one_line_says_what(
    signals: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped: list[str] = []

    @contextlib.contextmanager
    def part(name: str) -> Iterator[str]:
        try:
            yield ""
        finally:
            stopped.append(name)

    def interrupted(*_: object) -> bool:
        try:
            os.kill(os.getpid(), signals[0])
        finally:
            for number in signals[1:]:  # while it stops
                os.kill(os.getpid(), number)
        return True

    monkeypatch.setattr(demo, "console", Console(file=sys.stdout, highlight=False))
    monkeypatch.setattr(demo, "local_cluster", lambda *_: part("Ray"))
    monkeypatch.setattr(demo, "running", lambda *_: part("fleet"))
    monkeypatch.setattr(demo, "_show", interrupted)
    for name in ("refuse_missing_vllm", "refuse_hopeless_start", "_fetch"):
        monkeypatch.setattr(demo, name, lambda *_: None)
    with pytest.raises(typer.Exit) as exited:
        demo.demo(EXAMPLE)
    assert (exited.value.exit_code, stopped) == (130, ["fleet", "Ray"])
    said = "stopped early: the ingress, the engines and Ray; nothing is left running"
    assert capsys.readouterr().out.splitlines()[-1] == said


@pytest.fixture
def engines() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes that wait, one per replica."""
    command = [sys.executable, "-c", "input()"]
    processes = {name: subprocess.Popen(command, stdin=subprocess.PIPE) for name in ("a", "b")}
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


def test_the_engine_that_computes_the_stream_is_killed_once(engines: dict[str, subprocess.Popen[bytes]]) -> None:
    with client_of(held(a=0, b=1)) as client:
        victim = _Victim(client, {name: process.pid for name, process in engines.items()})
        for _ in range(BREAK_AFTER_TOKENS - 1):
            victim.on_text("x")
        assert victim.killed_at is None
        victim.on_text("x")
        assert (victim.killed_at is not None, victim.pause_s) == (True, None)
        victim.on_text("x")
        assert victim.pause_s is not None
    assert engines["b"].wait(timeout=30) == -signal.SIGKILL
    assert engines["a"].poll() is None

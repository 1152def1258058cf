"""These tests inject faults into real processes that the test starts, and into connections through a real relay.

No test sleeps. Its children do, in code of their own: a fault needs a process that is there until it is stopped or killed.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import psutil
import pytest

from loadtest.control.faults import FaultRunner, below, check_faults, relay_needed
from loadtest.control.runner import run
from loadtest.errors import UsageError
from loadtest.plan.scenario import Fault, parse_scenario
from loadtest.records import RunEvent
from loadtest.wire.relay import Relay
from loadtest.wire.target import Target
from tests.loadtest.whole_runs import a_scenario

LIMIT_S = 60.0
SLEEP = "import time; time.sleep(600)"


class Children:
    """Starts sleeping processes below this one, each with a mark in its command line."""

    def __init__(self) -> None:
        self.mark = uuid4().hex
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, mark: str = "") -> subprocess.Popen[bytes]:
        self.started.append(subprocess.Popen([sys.executable, "-c", SLEEP, mark or self.mark]))
        return self.started[-1]


@pytest.fixture
def children() -> Iterator[Children]:
    children = Children()
    yield children
    for child in children.started:
        child.kill()
        child.wait()


class Faults:
    """A runner whose events the test waits for."""

    def __init__(self, *faults: Fault, relay: Relay | None = None) -> None:
        self.events: queue.Queue[RunEvent] = queue.Queue()
        begin = time.monotonic()
        self.runner = FaultRunner(faults, lambda: time.monotonic() - begin, self.events.put, relay=relay)
        self.runner.start()

    def next(self, kind: str) -> str:
        event = self.events.get(timeout=LIMIT_S)
        assert event.kind == kind
        return event.text


def fault(action: str, **fields: Any) -> Fault:
    return Fault.model_validate({"at_s": 0, "action": action, "for_s": 600, **fields})


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def is_stopped(child: subprocess.Popen[bytes]) -> bool:
    return psutil.Process(child.pid).status() == psutil.STATUS_STOPPED


def test_a_killed_process_is_the_one_that_fits(children: Children) -> None:
    victim, other = children.start(), children.start("another")
    faults = Faults(fault("kill", process=children.mark, below_pid=os.getpid(), name="engine"))
    assert faults.next("fault") == f"engine: killed process {victim.pid}"
    assert victim.wait(LIMIT_S) == -signal.SIGKILL
    faults.runner.stop()
    assert (other.poll(), faults.events.empty(), faults.runner.problems) == (None, True, [])


def test_a_stopped_process_goes_on_after_its_time(children: Children) -> None:
    child = children.start()
    faults = Faults(fault("stop", process=children.mark, below_pid=os.getpid(), for_s=0.2))
    assert "stopped" in faults.next("fault")
    assert "continued process" in faults.next("fault-end")
    wait_for(lambda: not is_stopped(child))
    faults.runner.stop()


def test_a_stopped_process_goes_on_when_the_run_ends(children: Children) -> None:
    child = children.start()
    faults = Faults(fault("stop", process=children.mark, below_pid=os.getpid()))
    faults.next("fault")
    wait_for(lambda: is_stopped(child))
    faults.runner.stop()
    assert "continued process" in faults.next("fault-end")
    wait_for(lambda: not is_stopped(child))


GENERATOR = """
import signal, sys, time
from loadtest.control.faults import FaultRunner
from loadtest.plan.scenario import Fault
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that SIGINT is ignored
mark, root = sys.argv[1], int(sys.argv[2])
fault = Fault(at_s=0, action="stop", process=mark, below_pid=root, for_s=600)
FaultRunner([fault], lambda: 0.0, lambda event: print(event.kind, flush=True)).start()
time.sleep(600)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_process_goes_on_when_the_generator_dies(children: Children, sent: signal.Signals) -> None:
    child = children.start()
    command = [
        sys.executable,
        "-c",
        GENERATOR,
        children.mark,
        str(os.getpid()),
    ]  # has the mark too, but a process never fits itself
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as generator:
        assert generator.stdout is not None
        assert generator.stdout.readline() == "fault\n"
        wait_for(lambda: is_stopped(child))
        generator.send_signal(sent)
    wait_for(lambda: not is_stopped(child))


def test_nothing_is_touched_unless_exactly_one_process_fits(children: Children) -> None:
    first, second = children.start(), children.start()
    two = Faults(fault("kill", process=children.mark, below_pid=os.getpid()))
    assert f"{first.pid}, {second.pid}" in two.next("note")
    none = Faults(fault("kill", process="no such process", below_pid=os.getpid()))
    assert "fitting: none" in none.next("note")
    elsewhere = Faults(fault("kill", process=children.mark, below_pid=first.pid))
    assert "fitting: none" in elsewhere.next("note")
    for faults in (two, none, elsewhere):
        faults.runner.stop()
        assert len(faults.runner.problems) == 1
    assert (first.poll(), second.poll()) == (None, None)


def test_a_root_that_ended_meanwhile_is_told(children: Children) -> None:
    child = children.start()
    child.kill()
    child.wait()
    assert "not running any more" in Faults(fault("kill", process="x", below_pid=child.pid)).next("note")


def test_the_output_of_a_command_is_in_its_event() -> None:
    faults = Faults(fault("command", command=[sys.executable, "-c", "print('rolled\\nout')"]))
    faults.next("fault")
    assert faults.next("fault-end") == "command: exit status 0: rolled out"
    faults.runner.stop()
    assert faults.runner.problems == []


def test_a_command_that_fails_is_a_problem_of_the_run() -> None:
    faults = Faults(fault("command", command=[sys.executable, "-c", "raise SystemExit('no such pod')"], name="roll"))
    assert [faults.next("fault")[:4], faults.next("fault-end")] == ["roll", "roll: exit status 1: no such pod"]
    faults.next("note")
    assert "exit status 1: no such pod" in faults.runner.problems[0]


def test_a_running_command_is_killed_when_the_run_ends(children: Children) -> None:
    faults = Faults(fault("command", command=[sys.executable, "-c", SLEEP, children.mark]))
    faults.next("fault")
    faults.runner.stop()
    assert faults.next("fault-end").startswith(f"command: exit status {-signal.SIGKILL}")
    assert not [p for p in psutil.Process().children() if children.mark in p.cmdline()]


def test_faults_whose_time_has_not_come_never_happen(children: Children) -> None:
    child = children.start()
    faults = Faults(fault("kill", at_s=600, process=children.mark, below_pid=os.getpid()))
    faults.runner.stop()
    assert (child.poll(), faults.events.empty(), faults.runner.problems) == (None, True, [])
    (told,) = faults.runner.not_begun
    assert told.startswith("kill at 600 s: the run ended before its time, after ")


@pytest.mark.parametrize(
    ("fields", "where", "problem"),
    [
        ({"action": "kill", "below_pid": 1}, "faults.0.process", "needs a part"),
        ({"action": "kill", "process": "x"}, "faults.0.below_pid", "process id"),
        ({"action": "kill", "process": "x", "below_pid": 2**22 + 1}, "faults.0.below_pid", "is running"),
        ({"action": "command"}, "faults.0.command", "needs a program"),
        ({"action": "command", "command": ["no-such-program-here"]}, "faults.0.command", "'no-such-program-here'"),
        (
            {"action": "command", "command": ["true"], "at_s": 60},
            "faults.0.at_s",
            "60 is not before duration_s and drain_s together, 60, .*; lower at_s",
        ),
    ],
)
def test_faults_that_cannot_happen_are_refused_before_the_run(fields: dict[str, Any], where: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        check_faults([fault(**fields)], 60)
    assert caught.value.where == where


def test_a_root_fills_the_places_that_a_scenario_left_open() -> None:
    faults = [fault("kill", process="x"), fault("stop", process="y", below_pid=7)]
    assert [f.below_pid for f in below(faults, 5)] == [5, 7]
    check_faults(below(faults[:1], os.getpid()), 60)


def test_only_a_cut_needs_a_relay() -> None:
    def scenario(*faults: dict[str, Any]) -> bool:
        return relay_needed(parse_scenario({"name": "x", "arrival": {"law": "constant", "rate": 1}, "faults": list(faults)}))

    assert not scenario()
    assert not scenario({"at_s": 1, "action": "kill"})
    assert scenario({"at_s": 1, "action": "kill"}, {"at_s": 1, "action": "cut-link"})


class Echo:
    """A server that sends every byte back, and ends when the client has."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                return


@pytest.fixture
def relay() -> Iterator[Relay]:
    echo = Echo()
    relay = Relay(echo.url)
    yield relay
    relay.close()
    echo.close()


def connected(relay: Relay) -> socket.socket:
    host, _, port = relay.url.removeprefix("http://").removesuffix("/v1").partition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


def answer(sock: socket.socket, data: bytes) -> bytes:
    """Return what came back of the data: all, or nothing when the connection was cut."""
    try:
        sock.sendall(data)
        received = b""
        while len(received) < len(data) and (piece := sock.recv(65536)):
            received += piece
        return received
    except ConnectionError:
        return b""


def answer_of_new(relay: Relay, data: bytes) -> bytes:
    """Return the answer on a connection of its own, which may be cut before its connect returns."""
    try:
        with connected(relay) as sock:
            return answer(sock, data)
    except ConnectionResetError:
        return b""


def test_a_relay_passes_every_byte_on_and_the_end(relay: Relay) -> None:
    data = os.urandom(5_000_000)
    received = []

    def read(sock: socket.socket) -> None:
        while piece := sock.recv(65536):
            received.append(piece)

    with connected(relay) as sock:
        reader = threading.Thread(target=read, args=(sock,))
        reader.start()
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        reader.join(LIMIT_S)
    assert b"".join(received) == data


def test_a_cut_resets_all_connections_and_new_ones_until_it_ends(relay: Relay) -> None:
    socks = [connected(relay) for _ in range(3)]
    assert [answer(sock, b"hello") for sock in socks] == [b"hello"] * 3
    faults = Faults(fault("cut-link", name="link"), relay=relay)
    assert faults.next("fault") == "link: cut"
    for sock in socks:
        with sock, pytest.raises(ConnectionResetError):
            sock.recv(1)
    assert answer_of_new(relay, b"hello") == b""
    faults.runner.stop()
    assert faults.next("fault-end") == "link"
    relay.cut(0)

    wait_for(lambda: answer_of_new(relay, b"hello") == b"hello")


def test_a_relay_to_a_dead_target_resets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    relay = Relay(f"http://127.0.0.1:{port}")
    assert answer_of_new(relay, b"hello") == b""
    relay.close()


def test_a_cut_without_a_relay_is_a_problem_of_the_run() -> None:
    assert "does not go through a relay" in Faults(fault("cut-link")).next("note")


def test_a_relay_to_https_is_refused() -> None:
    with pytest.raises(UsageError, match="http://"):
        Relay("https://127.0.0.1:1")


class Named(BaseHTTPRequestHandler):
    """Answers 404 to all, and keeps which Host each POST named."""

    hosts: ClassVar[set[str | None]] = set()

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.hosts.add(self.headers["Host"])
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.apart
def test_requests_through_the_relay_name_the_target_as_their_host(tmp_path: Path) -> None:
    faults = [{"at_s": 0.5, "action": "cut-link", "for_s": 0.1}]
    scenario = parse_scenario(a_scenario(faults=faults, model="any", duration_s=1, warmup_s=0))
    with ThreadingHTTPServer(("127.0.0.1", 0), Named) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"localhost:{server.server_port}"
        run(scenario, Target(f"http://{host}"), tmp_path / "out", quiet=True, report=False)
        server.shutdown()
    assert Named.hosts == {host}

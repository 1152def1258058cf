"""These tests run the monitor on its own process, with a real timer and a fake one."""

import gc
import threading
import time
from collections.abc import Callable

import gevent
import pytest

from loadtest.control.monitor import Monitor, Ticker
from loadtest.judge.columns import RowColumns, ScheduleColumns
from loadtest.judge.health import TICK_S, gates
from loadtest.plan.scenario import parse_scenario
from loadtest.records import HealthSample, Manifest
from tests.loadtest.scripted import CHUNKED, DONE, Peer, asked, chunk, client_of, event


class Script:
    """A ticker that runs each given action once and returns the given delays; then it ends the monitor's loop."""

    def __init__(self, *ticks: tuple[Callable[[], object], list[float]]) -> None:
        self._ticks = list(ticks)
        self.states: list[str] = []

    def start(self) -> None:
        self.states.append("started")

    def wait(self) -> list[float]:
        if not self._ticks:
            raise StopIteration
        work, late_s = self._ticks.pop(0)
        work()
        return late_s

    def close(self) -> None:
        self.states.append("closed")


def spin(duration_s: float) -> None:
    until = time.perf_counter() + duration_s
    while time.perf_counter() < until:
        pass


def test_the_monitor_sees_late_reads_and_the_garbage_collector() -> None:
    epoch = time.perf_counter()
    ticker = Script((lambda: spin(0.02), [0.06, 0.05]), (gc.collect, [0.0000049]), (lambda: None, [0.001234]))
    monitor = Monitor(3, epoch=epoch, ticker=ticker)
    with pytest.raises(StopIteration):
        monitor.run()
    assert gc.isenabled()
    assert ticker.states == ["started", "closed"]
    sample = monitor.sample(in_flight=4, num_sent=10, num_rows=6)
    assert (sample.worker, sample.in_flight, sample.num_sent, sample.num_rows) == (3, 4, 10, 6)
    assert (sample.lag_max_s, sample.read_late_ms) == (0.06, [60.0, 50.0, 0.0, 1.23])
    assert sample.gc_s > 0
    assert sample.cpu > 0
    assert 0 < sample.t_s <= time.perf_counter() - epoch
    again = monitor.sample(in_flight=0, num_sent=10, num_rows=10)
    assert (again.lag_max_s, again.gc_s, again.read_late_ms) == (0.0, 0.0, [])


def test_each_tick_is_in_one_sample() -> None:
    samples: list[HealthSample] = []
    ticker = Script(
        (lambda: None, [0.001]), (lambda: samples.append(taken()), [0.002]), (lambda: samples.append(taken()), [0.003])
    )
    monitor = Monitor(0, epoch=time.perf_counter(), ticker=ticker)

    def taken() -> HealthSample:
        return monitor.sample(in_flight=0, num_sent=0, num_rows=0)

    with pytest.raises(StopIteration):
        monitor.run()
    assert [sample.read_late_ms for sample in [*samples, taken()]] == [[1.0], [2.0], [3.0]]


def test_a_loop_that_is_busy_reads_its_timer_late_and_no_tick_is_lost() -> None:
    """The only times that are asserted are lower bounds, which a busy machine cannot break."""
    ticker, late_s = Ticker(), list[float]()

    def read() -> None:
        while True:
            late_s.extend(ticker.wait())

    ticker.start()
    began = time.perf_counter()
    reader = gevent.spawn(read)
    gevent.sleep(3 * TICK_S)
    spin(20 * TICK_S)  # in this greenlet: no other can run
    num_ticks = (time.perf_counter() - began) / TICK_S
    deadline = time.monotonic() + 30
    while len(late_s) < num_ticks - 1 and time.monotonic() < deadline:
        gevent.sleep(TICK_S)
    reader.kill()
    ticker.close()
    assert len(late_s) >= num_ticks - 1
    assert max(late_s) >= 18 * TICK_S
    assert sum(late >= 10 * TICK_S for late in late_s) >= 8  # each tick that went by counts, not only the first one


def test_what_a_reader_comes_late_to_is_in_its_row_and_fails_the_gate() -> None:
    """The request leaves in time; then the loop is busy for half a second, in which the first token comes."""
    asking, busy, answered = threading.Event(), threading.Event(), threading.Event()
    sent_at: list[float] = []

    def script(peer: Peer) -> None:
        peer.read_request()
        asking.set()
        assert busy.wait(30)
        peer.send(CHUNKED, chunk(event("a") + DONE), b"0\r\n\r\n")
        sent_at.append(time.perf_counter())
        answered.set()

    with client_of(script) as client:
        monitor = Monitor(3, epoch=client.epoch, ticker=Ticker())
        watching = gevent.spawn(monitor.run)
        job = gevent.spawn(client.ask, asked(), due_s=0.0)
        while not asking.is_set():
            gevent.sleep(0.001)
        busy.set()
        assert answered.wait(30)  # this blocks the loop as well, so that nothing is read
        spin(0.5)
        row = job.get(timeout=30)
        sample = monitor.sample(in_flight=0, num_sent=1, num_rows=1)
        watching.kill()
    assert row.first_s is not None
    late_s = client.epoch + row.first_s - sent_at[0]
    assert late_s >= 0.5
    assert sample.lag_max_s >= 0.45
    scenario = parse_scenario({"name": "made", "arrival": {"law": "constant", "rate": 1}, "duration_s": 10})
    manifest = Manifest("finished", {}, "", 1, "", "", 1.0, [])
    found = {gate.name: gate for gate in gates([sample], RowColumns.of([row]), ScheduleColumns.of([]), scenario, manifest)}
    assert not found["read lag p99"].ok
    assert found["read lag p99"].limit <= 0.1

"""The dispatcher sends a worker's share of the schedule, open or closed loop, on Locust. `loadtest.control.master` is its peer.

    master                                        worker (also the one process of a local run)
    test starts: plan with its share ---------->  builds the first bodies, opens connections
                 <------------------------------  ready
    all are ready: epoch --------------------->   sends each request at its due time
                 <------------------------------  a numbered batch of rows and a health sample, each second
    interrupted, a worker lost, disk full: stop > gives up what is unfinished
                 <------------------------------  end: how many batches and rows there were

All messages are custom messages of Locust. A worker has one user, the dispatcher; Locust's shape only starts and stops it.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gevent
import msgspec
from gevent.event import Event
from gevent.pool import Group
from locust.exception import RPCError

from loadtest.control.monitor import Monitor, Ticker
from loadtest.errors import UsageError
from loadtest.plan.laws import Burst, Closed
from loadtest.plan.request_class import RECORDED
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.workload import Said, answer_messages, body_of, fingerprint, path_of
from loadtest.recorder import Batch, End, as_lines
from loadtest.records import Row, ScheduledRequest
from loadtest.wire.client import Asked, Client, Heard
from loadtest.wire.target import Target

logger = logging.getLogger(__name__)

REPORT_S = 1.0
AHEAD_NUM, AHEAD_BYTES = 2000, 64 * 1024 * 1024
"""Limits of the bodies that are built ahead of their due times. While the dispatcher builds bodies it cannot send."""
AHEAD_MARGIN_S = 0.005
LAST_TRIES = 5
CLOCK_S = 0.050
"""Largest apparent difference between the start of a worker on another machine and the master's epoch. NTP keeps a network's clocks
within 10 ms."""


class WorkerPlan(msgspec.Struct):
    """The master's message to one worker. Workers may run on other machines and do not see the run's folder."""

    worker: int
    num_workers: int
    target: str
    model: str
    id_prefix: str
    scenario: dict[str, Any]
    part: list[ScheduledRequest]
    drained_s: float
    """When the drain ends."""
    host: str = ""
    """Host header of the requests; default: the address of ``target``. The two differ if ``target`` is a relay."""
    workload: str = ""
    """`loadtest.plan.workload.fingerprint` of the scenario, computed on the master's machine."""


class Epoch(msgspec.Struct):
    """The start of the run, by the master's clocks."""

    said_unix_s: float
    unix_s: float
    perf_s: float
    boot_id: str

    def here(self) -> float:
        """Return the epoch as a ``time.perf_counter()`` value of this process; exact on the master's own machine."""
        return self.perf_s if self.boot_id == boot_id() else time.perf_counter() + self.unix_s - time.time()

    def seen_late_s(self) -> float:
        """Return the apparent delay of the announcement by this machine's clock: difference of the clocks plus the message's travel."""
        return 0.0 if self.boot_id == boot_id() else time.time() - self.said_unix_s


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class WorkerLoad:
    """One worker's share of one run. ``drive`` blocks until each request has a row and the master has the rows."""

    def __init__(self, plan: WorkerPlan, *, api_key: str, send: Callable[[str, Any], None], fire: Callable[..., None]) -> None:
        self.worker = plan.worker
        self._plan = plan
        self._scenario = parse_scenario(plan.scenario, context=RECORDED)
        if plan.workload and fingerprint(self._scenario) != plan.workload:
            files = ", ".join(str(cls.prompts) for cls in self._scenario.requests if cls.prompts is not None)
            read = ", ".join(filter(None, [files, self._scenario.tokenizer])) or "the scenario"
            raise UsageError(
                "workload", f"{read}: differs here from the file on the master's machine; copy the master's file here"
            )
        self._target = Target(plan.target, api_key, plan.host)
        self._send = send
        self._fire = fire
        self._classes = {cls.name: cls for cls in self._scenario.requests}
        self._to_build: Iterator[ScheduledRequest] = iter([r for r in plan.part if r.after is None])
        self._later = {r.after: r for r in plan.part if r.after is not None}
        """By the id of a turn, the turn that follows it."""
        self._built: deque[tuple[ScheduledRequest, Asked]] = deque()
        self._built_bytes = 0
        self._in_flight: dict[int, tuple[ScheduledRequest, float]] = {}
        self._group = Group()
        self._started = Event()
        self._stopped = Event()
        self._stop_reason, self._stop_s = "", 0.0
        self._driving = False
        self._lines: list[bytes] = []
        self._outbox: deque[Batch] = deque()
        self._num_sent = self._num_rows = self._num_batches = 0
        self._client = Client(self._target, worker=plan.worker, epoch=0.0, id_prefix=plan.id_prefix)

    def make_ready(self) -> None:
        """Do the work that would delay the first requests: build bodies, open connections."""
        self._build_ahead()
        self._client.warm(self._num_connections())

    def start(self, epoch: float) -> None:
        self._epoch = self._client.epoch = epoch
        self._started.set()

    def stop(self, reason: str, at_s: float) -> None:
        """Send nothing more and give up unfinished requests."""
        self._stop_reason, self._stop_s = reason, at_s
        self._stopped.set()
        self._started.set()

    def close(self) -> None:
        self._client.close()

    def drive(self) -> None:
        if self._driving:  # Locust moved a lost worker's user here
            return
        self._driving = True
        self._started.wait()
        if self._stopped.is_set():
            return self._say_end()
        self._monitor = Monitor(self._plan.worker, epoch=self._epoch, ticker=Ticker())
        helpers = [gevent.spawn(self._monitor.run), gevent.spawn(self._report)]
        try:
            with closing(self._client):
                work = gevent.spawn(self._work)
                gevent.wait([work, self._stopped], count=1)
                if self._stopped.is_set():
                    work.kill()
                    self._group.kill()
                    self._give_up()
                work.get()  # raises the exception that ended it
        finally:
            for helper in helpers:
                helper.kill()
            self._hand_over(last=True)
            self._say_end()

    def _work(self) -> None:
        arrival = self._scenario.arrival
        if isinstance(arrival, Closed):
            share, rest = divmod(arrival.concurrency, self._plan.num_workers)
            gevent.sleep(max(0.0, -self._now()))
            for _ in range(share + (self._plan.worker < rest)):
                self._group.spawn(self._closed_loop)
        else:
            self._open_loop()
        if not self._group.join(timeout=max(0.0, self._plan.drained_s + 1.0 - self._now())):
            self._group.kill()  # each greenlet still returns its row, as a timeout

    def _num_connections(self) -> int:
        """Return a number of connections such that the requests of the first second need not connect."""
        arrival = self._scenario.arrival
        if isinstance(arrival, Closed):
            return arrival.concurrency // self._plan.num_workers
        return sum(1 for r in self._plan.part if isinstance(arrival, Burst) or (r.due_s is not None and r.due_s < 1.0))

    def _open_loop(self) -> None:
        while self._built or self._build_one():
            request, asked = self._built[0]  # stays in the queue while it waits, so that a stop finds it
            assert request.due_s is not None
            due_s = request.due_s
            self._build_ahead(until_s=due_s - AHEAD_MARGIN_S)
            gevent.sleep(max(0.0, due_s - self._now()))
            self._pop_built()
            self._in_flight[request.id] = (request, due_s)
            self._group.spawn(self._converse, request, asked, due_s)

    def _closed_loop(self) -> None:
        while not self._stopped.is_set() and (self._built or self._build_one()):
            due_s = self._now()
            if due_s >= self._scenario.duration_s:
                return self._give_up_rest(math.inf, "the duration was over before a client was free")
            request, asked = self._pop_built()
            self._in_flight[request.id] = (request, due_s)
            self._ask(request, asked, due_s)

    def _converse(self, request: ScheduledRequest, asked: Asked, due_s: float) -> None:
        """Send the request and then the later turns of its conversation. Each turn gets a row, also if the conversation ends early."""
        before: list[Said] = []
        why = "the run ended before its turn"
        try:
            while True:
                heard: list[Heard] = []
                row = self._ask(request, asked, due_s, hear=heard.append)
                if row.state != "ok":
                    why = f"the answer before it: {row.state}"
                    return
                if (later := self._later.get(request.id)) is None:
                    return
                parsed, over_s = heard.pop()
                before.append((request, answer_messages(parsed)))
                due_s = round(over_s + later.think_s, 6)
                if due_s >= self._scenario.duration_s:
                    return
                gevent.sleep(max(0.0, due_s - self._now() - AHEAD_MARGIN_S))
                asked = self._asked(later, before, due_s)
                gevent.sleep(max(0.0, due_s - self._now()))
                request = later
                self._in_flight[request.id] = (request, due_s)
        finally:
            self._leave_out_after(request, why)

    def _leave_out_after(self, request: ScheduledRequest, why: str) -> None:
        """Give a row to the turns that will not be sent. They are due after the end of the arrivals, where no figure counts them."""
        due_s = max(self._scenario.duration_s, self._now())
        while (later := self._later.pop(request.id, None)) is not None:
            if not self._stop_reason:
                self._give_up_one(later, due_s, why)
            request = later

    def _ask(self, request: ScheduledRequest, asked: Asked, due_s: float, *, hear: Callable[[Heard], None] | None = None) -> Row:
        self._num_sent += 1
        row = self._client.ask(asked, due_s=due_s, hear=hear)
        if self._stop_reason and row.state == "timeout":
            row.state, row.reason = "cancelled", self._stop_reason
        self._take(request, row)
        return row

    def _take(self, request: ScheduledRequest, row: Row) -> None:
        self._in_flight.pop(request.id, None)
        self._lines.append(as_lines([row]))  # now, not all of a second's rows at once
        self._num_rows += 1
        # For Locust's own tables and charts, which round; the kit's figures do not use them.
        failed = None if row.state in ("ok", "cancelled") else RuntimeError(f"{row.state} {row.status or ''}".strip())
        event = {"name": request.cls, "exception": failed, "context": {"id": row.id}}
        if row.end_s is not None:
            size = row.output_tokens or 0
            self._fire(request_type="E2E", response_time=(row.end_s - row.due_s) * 1e3, response_length=size, **event)
        if row.first_s is not None:
            self._fire(request_type="TTFT", response_time=(row.first_s - row.due_s) * 1e3, response_length=0, **event)

    def _give_up(self) -> None:
        """Give a row to requests that were begun but not sent, and to requests that were due before the stop."""
        for request, due_s in list(self._in_flight.values()):
            self._give_up_one(request, due_s, self._stop_reason)
        self._give_up_rest(self._stop_s, self._stop_reason)

    def _give_up_rest(self, until_s: float, reason: str) -> None:
        """Give a row to the remaining requests due before ``until_s``; in a closed loop to all of them, or to none after a stop."""
        rest = [request for request, _ in self._built] + list(self._to_build)
        self._built.clear()
        for number, request in enumerate(rest):
            due_s = request.due_s if request.due_s is not None else self._now()
            if due_s >= until_s:
                return
            self._give_up_one(request, due_s, reason)
            if number % 100 == 99:
                gevent.sleep(0)

    def _give_up_one(self, request: ScheduledRequest, due_s: float, reason: str) -> None:
        self._take(request, Row(id=request.id, worker=self._plan.worker, due_s=due_s, state="never_sent", reason=reason))

    def _pop_built(self) -> tuple[ScheduledRequest, Asked]:
        item = self._built.popleft()
        self._built_bytes -= len(item[1].body)
        return item

    def _build_ahead(self, until_s: float | None = None) -> None:
        """Build bodies until ``until_s``, until enough are built, or until no request is left."""
        while len(self._built) < AHEAD_NUM and self._built_bytes < AHEAD_BYTES:
            if (until_s is not None and self._now() > until_s) or not self._build_one():
                return
            gevent.sleep(0)

    def _build_one(self) -> bool:
        request = next(self._to_build, None)
        if request is None:
            return False
        asked = self._asked(request, (), request.due_s)
        self._built.append((request, asked))
        self._built_bytes += len(asked.body)
        return True

    def _asked(self, request: ScheduledRequest, before: Sequence[Said], due_s: float | None) -> Asked:
        """Return the request to send; ``before`` has the earlier turns."""
        cls = self._classes[request.cls]
        return Asked(
            request,
            path_of(cls),
            msgspec.json.encode(body_of(self._scenario, request, model=self._plan.model, before=before)),
            self._scenario.timeout_s if due_s is None else min(self._scenario.timeout_s, self._plan.drained_s - due_s),
            cls.stream,
            cancel_after_s=cls.cancel_after_s,
            keep_text=self._scenario.keep_text,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._epoch

    def _report(self) -> None:
        gevent.sleep(max(0.0, -self._now()))
        self._monitor.sample(in_flight=0, num_sent=0, num_rows=0)  # a sample of the time before the start, to be discarded
        while True:
            gevent.sleep(REPORT_S - self._now() % REPORT_S)
            self._hand_over()

    def _hand_over(self, *, last: bool = False) -> None:
        sample = self._monitor.sample(in_flight=len(self._in_flight), num_sent=self._num_sent, num_rows=self._num_rows)
        lines, self._lines = self._lines, []
        self._outbox.append(Batch(self._plan.worker, self._num_batches, len(lines), b"".join(lines), as_lines([sample])))
        self._num_batches += 1
        for _ in range(LAST_TRIES if last else 1):
            try:
                while self._outbox:
                    self._send("lt-rows", msgspec.structs.asdict(self._outbox[0]))
                    self._outbox.popleft()
            except RPCError as exc:  # after Locust's own retries
                logger.error("%d batches of rows wait for the master: %s", len(self._outbox), exc)

    def _say_end(self) -> None:
        self._send("lt-end", msgspec.structs.asdict(End(self._plan.worker, self._num_batches, self._num_rows)))


def install_worker(environment: Any, api_key: str) -> Callable[[], None]:
    """Make this process accept plans; return the task of its only user."""
    loads: list[WorkerLoad] = []
    planned = Event()

    def on_plan(msg: Any, **_: Any) -> None:
        planned.clear()  # each start of a test has its own plan
        send, fire = environment.runner.send_message, environment.events.request.fire
        try:
            plan = msgspec.json.decode(msg.data, type=WorkerPlan)
            load = WorkerLoad(plan, api_key=api_key, send=send, fire=fire)
            loads[:] = [load]
            planned.set()
            load.make_ready()
        except Exception as exc:  # the root of this worker; the master must not wait for a failed worker
            logger.exception("the plan cannot be followed")
            send("lt-failed", f"a worker cannot start: {type(exc).__name__}: {exc}")
            return
        if loads[-1] is load:  # else the next test has already begun
            send("lt-ready", plan.worker)

    def on_epoch(msg: Any, **_: Any) -> None:
        epoch = Epoch(**msg.data)
        late_s = epoch.seen_late_s()
        if abs(late_s) > CLOCK_S:
            off = f"{late_s * 1e3:+.0f} ms off the master's, or its network as slow"
            environment.runner.send_message("lt-failed", f"the clock of worker {loads[-1].worker} is {off}: keep both by NTP")
        else:
            loads[-1].start(epoch.here())

    def on_stop(msg: Any, **_: Any) -> None:
        if loads:
            loads[-1].stop(**msg.data)

    def forget(**_: Any) -> None:
        planned.clear()
        if loads:
            loads[-1].close()

    def drive() -> None:
        planned.wait()
        loads[-1].drive()

    environment.runner.register_message("lt-plan", on_plan, concurrent=True)
    environment.runner.register_message("lt-epoch", on_epoch)
    environment.runner.register_message("lt-stop", on_stop)
    environment.events.test_stop.add_listener(forget)
    return drive

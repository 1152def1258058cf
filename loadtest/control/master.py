"""Locust's master (or a local run's only process) plans shares, sets the epoch, writes the records, and decides when the run is over.

Only this process writes the rows. A worker that is lost, joins late or hands over less than it reports ends the run as invalid.
The messages are those of `loadtest.control.dispatch`.
"""

import logging
import time
from pathlib import Path
from typing import Any, Literal, Protocol

import gevent
import msgspec

from loadtest.control.dispatch import Epoch, WorkerPlan, boot_id
from loadtest.errors import ExitCode, LoadtestError
from loadtest.judge.health import STOPPED
from loadtest.plan.laws import Closed
from loadtest.plan.request_class import RECORDED
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import read_schedule
from loadtest.recorder import Batch, BatchLedger, End, Recorder, write_manifest
from loadtest.records import Manifest, RunEvent, id_prefix, read_manifest
from loadtest.wire.target import Target

logger = logging.getLogger(__name__)

LEAD_S = 1.0
"""Time from the epoch's announcement to the epoch."""
END_S = 10.0
"""How long the master waits for the last rows, after the drain or after it has stopped the workers."""
READY_S = 120.0


class Hooks(Protocol):
    """The owner of the run's folder, as the master calls it."""

    def open_run(self) -> Path:
        """Return the folder, with its manifest and schedule, of the test that starts."""

    def on_start(self, epoch_unix_s: float) -> None: ...

    def close_run(self, out: Path) -> ExitCode:
        """Return the exit status of the process, now that all records are on disk."""


class Master:
    """The master's state; it handles Locust's events and the workers' messages."""

    def __init__(self, environment: Any, hooks: Hooks) -> None:
        self._environment = environment
        self._runner = environment.runner
        self._hooks = hooks
        self._running = self._refused = False
        self._abandoned = ""
        self._run: _Running
        listeners = {"lt-ready": self._on_ready, "lt-failed": self._on_failed, "lt-rows": self._on_rows, "lt-end": self._on_end}
        for name, listener in listeners.items():
            self._runner.register_message(name, listener)
        environment.events.test_start.add_listener(self._begin)
        environment.events.test_stopping.add_listener(self._wind_up)
        environment.events.test_stop.add_listener(self._finish)
        environment.events.worker_connect.add_listener(self._on_connect)

    @property
    def num_workers(self) -> int:
        return int(self._runner.worker_count)

    def over(self) -> bool:
        """Return whether the test is over, as planned or not; called once a second while it runs."""
        if not self._running:
            return self._refused  # before the start it is not over
        run = self._run
        if self.num_workers < run.num_workers and not run.ledger.all_ended():
            self.lose(f"{run.num_workers - self.num_workers} of {run.num_workers} workers were lost", kind="worker-lost")
        elif run.epoch is None and time.perf_counter() - run.begun_at > READY_S:
            self.lose(f"{len(run.ready)} of {run.num_workers} workers were ready after {READY_S:g} s")
        elif run.now() > run.drained_s + END_S:
            self.lose(f"the workers did not end within {END_S:g} s after the drain")
        return bool(run.interrupted) or run.ledger.all_ended()

    def interrupt(self, reason: str) -> None:
        """End the run soon; the rows of sent requests are kept."""
        if self._running and not self._run.interrupted:
            self._run.interrupted = reason
            logger.warning("the run ends: %s", reason)

    def abandon(self, reason: str) -> None:
        """End the run, or do not begin it: no process waits for its result."""
        self._abandoned = reason
        self.interrupt(reason)

    def lost(self, problem: str) -> None:
        """Note that the owner saw a worker's process end: no more rows will come from it."""
        if self._running:
            self._run.num_lost += 1
        self.lose(problem, kind="worker-lost")

    def lose(self, problem: str, *, kind: Literal["worker-lost", "note"] = "note") -> None:
        """End the run soon; the problem makes it invalid."""
        if self._running and not self._run.interrupted:
            self._run.problems.append(problem)
            self._run.note(kind, problem)
            self.interrupt(problem)

    def _begin(self, **_: Any) -> None:
        # Locust continues after an error in a listener. So the status is a failure until a run has started and been judged.
        self._environment.process_exit_code = ExitCode.INVALID
        self._refused = True
        if self._abandoned:
            logger.critical("not started: %s", self._abandoned)
            return
        try:
            out = self._hooks.open_run()
            schedule = read_schedule(out / "schedule.jsonl")
            clients = list(self._runner.clients) if hasattr(self._runner, "clients") else ["local"]
            self._run = _Running(out, read_manifest(out), clients)
        except LoadtestError as exc:
            logger.critical("%s", exc)
            self._environment.process_exit_code = exc.exit_code
            return
        self._running, self._refused = True, False
        manifest, arrival = self._run.manifest, self._run.scenario.arrival
        concurrency = arrival.concurrency if isinstance(arrival, Closed) else 0
        for worker, client_id in enumerate(clients):
            plan = WorkerPlan(
                worker=worker,
                num_workers=len(clients),
                target=self._environment.host,
                model=manifest.model,
                id_prefix=id_prefix(manifest),
                scenario=manifest.scenario,
                part=schedule.part(worker, len(clients), concurrency=concurrency),
                drained_s=self._run.drained_s,
                host=Target(manifest.target).authority,
                workload=schedule.requests[0].workload,
            )
            self._runner.send_message("lt-plan", msgspec.json.encode(plan), client_id)

    def _on_ready(self, msg: Any, **_: Any) -> None:
        if not self._running:  # a late event must not write the manifest again
            return
        run = self._run
        run.ready.add(msg.data)
        if len(run.ready) < run.num_workers:
            return
        try:
            epoch = run.start()
        except OSError as exc:
            self.lose(f"the manifest cannot be written: {exc.strerror}")
        else:
            self._runner.send_message("lt-epoch", msgspec.structs.asdict(epoch))
            self._hooks.on_start(epoch.unix_s)

    def _on_failed(self, msg: Any, **_: Any) -> None:
        self.lost(msg.data)

    def _on_rows(self, msg: Any, **_: Any) -> None:
        if not self._running:
            return
        run, batch = self._run, Batch(**msg.data)
        run.ledger.add(batch)
        if run.disk_full:
            return
        try:
            run.recorder.add(batch)
        except OSError as exc:
            run.disk_full = True
            self.lose(f"the records cannot be written: {exc.strerror}")

    def _on_end(self, msg: Any, **_: Any) -> None:
        if self._running:
            self._run.ledger.end(End(**msg.data))

    def _on_connect(self, client_id: str, **_: Any) -> None:
        if self._running and client_id not in self._run.clients:
            self.lose(f"a worker joined after the start: {client_id}")

    def _wind_up(self, **_: Any) -> None:
        """Handle Locust's stop of the users. If they are still sending, this is an interruption: let them hand over their rows."""
        if not self._running or self._run.ledger.all_ended():
            return
        self.interrupt("stopped by hand")
        self._run.ended_s = self._run.now()
        self._runner.send_message("lt-stop", {"reason": STOPPED, "at_s": self._run.ended_s})
        until, run = time.perf_counter() + END_S, self._run
        while time.perf_counter() < until and run.ledger.num_ended() < min(self.num_workers, run.num_workers - run.num_lost):
            gevent.sleep(0.05)

    def _finish(self, **_: Any) -> None:
        self._refused = False
        if not self._running:
            return
        self._running = False
        try:
            self._run.finish()
        except OSError as exc:
            came = f"{self._run.ledger.num_rows()} rows of {self._run.manifest.num_scheduled} requests had arrived"
            logger.critical("the manifest cannot be written, and the records may be lost: %s; %s", exc.strerror, came)
            return
        try:
            self._environment.process_exit_code = self._hooks.close_run(self._run.out)
        except LoadtestError as exc:
            logger.critical("%s", exc)


class _Running:
    """The master's state of one run."""

    def __init__(self, out: Path, manifest: Manifest, clients: list[str]) -> None:
        self.out = out
        self.manifest = manifest
        self.clients = clients
        self.num_workers = len(clients)
        self.scenario = parse_scenario(manifest.scenario, context=RECORDED)
        self.drained_s = self.scenario.duration_s + self.scenario.drain_s
        self.ledger = BatchLedger(len(clients))
        self.recorder = Recorder(out)
        self.begun_at = time.perf_counter()
        self.epoch: float | None = None
        self.ready: set[int] = set()
        self.num_lost = 0
        self.disk_full = False
        self.problems: list[str] = []
        self.interrupted = ""
        self.ended_s: float | None = None

    def now(self) -> float:
        """Return the seconds from the epoch; a negative number before there is an epoch."""
        return -1.0 if self.epoch is None else time.perf_counter() - self.epoch

    def start(self) -> Epoch:
        unix_s = time.time()
        epoch = Epoch(unix_s, unix_s + LEAD_S, perf_s=time.perf_counter() + LEAD_S, boot_id=boot_id())
        self.epoch = epoch.perf_s
        self.manifest = msgspec.structs.replace(self.manifest, epoch_unix_s=epoch.unix_s, workers=self.num_workers)
        write_manifest(self.out, self.manifest)
        self.note("phase", "start")
        return epoch

    def note(self, kind: Any, text: str) -> None:
        try:
            self.recorder.event(RunEvent(t_s=self.now(), kind=kind, text=text))
        except OSError as exc:
            logger.error("an event cannot be written: %s", exc.strerror)

    def finish(self) -> None:
        ended_s = self.ended_s if self.ended_s is not None else self.now()
        drift_s = 0.0 if self.epoch is None else time.time() - self.manifest.epoch_unix_s - self.now()
        self.note("interrupted" if self.interrupted else "phase", self.interrupted or "end")
        sealed = {**self.manifest.sealed, **self.recorder.sealed()}
        self.recorder.close()
        manifest = msgspec.structs.replace(
            self.manifest,
            state="interrupted" if self.interrupted else "finished",
            ended_s=ended_s,
            clock_drift_s=round(drift_s, 6),
            problems=[*self.problems, *self.ledger.problems()],
            sealed=sealed,
        )
        write_manifest(self.out, manifest)

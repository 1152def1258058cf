"""These checks (T6-T8, T14) test that each request is sent once and accounted for, and that a sick generator reports itself."""

import os
import select
import socket
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from loadtest.audit.audit import audit
from loadtest.audit.server_log import ServerLog
from loadtest.errors import ExitCode
from loadtest.judge.stats import Floats, arrival_tests
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
from loadtest.proof.selftest.bench import Bench, Observed, Point, beside_the_load, fault, judged, poisson
from loadtest.records import HealthSample, read_lines

RATIO = 12.5
"""CPU time of the worker per token of a stream, over `bare_chunk_s`: 12.1 to 13.4 without other processes (41 us), and 11 with
them, because a read then has several tokens."""


def t6_arrivals(bench: Bench) -> Iterator[Point]:
    """One schedule is delivered whole by any number of workers.

    1 and 3 workers: the server saw each scheduled id once; the gaps pass the health gate, and the tests of a Poisson process at 0.1 %
    (gaps, dispersion, correlation). So do the schedules of 20 seeds at 1 %, but for one at most. Arrivals made as GuideLLM does, the same
    in each process, must fail them.
    """
    rate, duration_s = 50, 6 if bench.quick else 30
    hashes = set()
    for workers in (1, 3):
        observed = bench.run({}, poisson(rate, duration_s, workers=workers))
        hashes.add(observed.manifest.schedule_sha256)
        seen_ids = sorted(request_id for request_id, _ in observed.told)
        scheduled = list(range(observed.manifest.num_scheduled))
        seen = f"{len(set(seen_ids))} ids of {len(scheduled)}, {len(seen_ids) - len(set(seen_ids))} twice"
        yield judged(f"{workers} workers: ids", seen, "each once", seen_ids == scheduled)
        sent = np.sort([row.sent_s for row in observed.rows if row.sent_s is not None])
        gate = next(gate for gate in observed.summary.gates if gate.name == "delivered arrivals")
        p = least_p(sent * rate)
        seen = f"distance {gate.value:.3f} (gate {gate.limit:.3f}), least p {p:.3f}"
        yield judged(f"{workers} workers: arrivals", seen, "gate ok, p > 0.001", gate.ok and p > 0.001, timing=True)
    yield judged("schedule of 1 and 3 workers", f"{len(hashes)} hashes", "1", len(hashes) == 1)
    num = sum(least_p(due_s(poisson(rate, 30, seed=seed)) * rate) < 0.01 / 3 for seed in range(20))
    yield judged("schedules of 20 seeds", f"{num} rejected", "<= 1", num <= 1)
    one = np.cumsum(np.random.Generator(np.random.Philox(1)).exponential(3 / rate, 200))
    p = least_p(np.sort(np.concatenate([one, one, one])) * rate)
    yield judged("three processes of one seed", f"least p {p:.1e}", "p < 0.001", p < 0.001)


def due_s(scenario: dict[str, Any]) -> Floats:
    return np.array([request.due_s for request in make_schedule(parse_scenario(scenario)).requests], dtype=np.float64)


def least_p(passed: Floats) -> float:
    tests = arrival_tests(passed)
    return min(tests.gaps_p, tests.dispersion_p, tests.lag1_p)


def t7_audit(bench: Bench) -> Iterator[Point]:
    """The audit finds each fault of the server, and nothing else.

    1 % each (quick: about 1.4 %) of dropped connections, duplicates, truncated streams and error events: counts as the law has them.
    """
    num, every = (300, 70) if bench.quick else (2000, 100)
    kinds = {"drop": every, "duplicate": every + 1, "truncate": every + 2, "error-event": every + 3}
    failures = [{"kind": kind, "every": each, "after_tokens": 2} for kind, each in kinds.items()]
    # A new connection per request: a request that is dropped on a reused connection is rightly sent again.
    settings = {"ttft": {"law": "constant", "s": 0.05}, "answers_per_connection": 1, "failures": failures}
    observed = bench.run(settings, poisson(60, num / 60, output_tokens=5))
    injected = Counter(
        next((kind for kind, each in kinds.items() if number % each == 0), "") for number in range(1, len(observed.rows) + 1)
    )
    result = audit(observed.folder, server_log=ServerLog([observed.log]))
    expected = {"truncated": injected["drop"] + injected["truncate"], "server-duplicate": injected["duplicate"]}
    yield judged("findings", str(result.counts), str(expected), result.counts == expected)
    yield judged(
        "error events",
        str(result.states["error"]),
        str(injected["error-event"]),
        result.states["error"] == injected["error-event"],
    )
    yield judged("complete", str(result.states["complete"]), str(injected[""]), result.states["complete"] == injected[""])


KILL_WORKER = """
import psutil, sys
next(p for p in psutil.Process(int(sys.argv[1])).children() if "--worker" in p.cmdline()).kill()
"""


RESTART_MASTER = """
import psutil, subprocess, sys
master = next(p for p in psutil.Process(int(sys.argv[1])).children() if "--expect-workers" in p.cmdline())
command, environment = master.cmdline(), master.environ()
master.kill()
subprocess.Popen(command, env=environment, stdin=subprocess.PIPE).wait()
"""


def t7_killed(bench: Bench, case: str) -> Iterator[Point]:
    """A generator that loses a process ends with exit status 3.

    SIGKILL to one of two workers, or to their master, in mid-run; or the master is started again at once, by the same command: then, too,
    no request is sent twice by the server's log, and no row is there twice.
    """
    script = {"worker": KILL_WORKER, "master, started again": RESTART_MASTER}.get(case, "")
    command = fault(2, "command", command=[sys.executable, "-c", script, str(os.getpid())])
    kill = command if script else fault(2, "kill", "--expect-workers")
    observed = bench.once({}, poisson(30, 20, workers=2, faults=[kill]))
    yield sick(f"SIGKILL of a {case}", observed, "generator complete")
    told, rows = (Counter(ids) for ids in ([number for number, _ in observed.told], [row.id for row in observed.rows]))
    num_twice = sum(count > 1 for counted in (told, rows) for count in counted.values())
    yield judged(f"{case}: sent twice", f"{num_twice} of {len(told)} requests", "0 of some", num_twice == 0 < len(told))


def sick(case: str, observed: Observed, gate: str) -> Point:
    failed = observed.failed_gates
    why = failed.get(gate) or ", ".join(failed) or "all gates ok"
    seen = f"exit status {observed.code}; {textwrap.shorten(why, 120, placeholder=' ...')}"
    return judged(case, seen, f"exit status 3 by {gate}", observed.code is ExitCode.INVALID and gate in failed)


HOG = """
import os, psutil, sys, time
worker = next(p for p in psutil.Process(int(sys.argv[1])).children() if "--headless" in p.cmdline())
worker.nice(19)
for process in (worker, psutil.Process()):
    process.cpu_affinity(process.cpu_affinity()[:1])
for _ in range(3):
    if os.fork() == 0:
        os.setsid()  # the kernel first divides a core between sessions
until = time.monotonic() + 2
while time.monotonic() < until:
    pass
"""


BESIDE = {
    # New lists, because the collector ignores lists from before the run.
    "GC storm": (
        "garbage collection",
        "import gc\nwhile True:\n    heap = [[] for _ in range(200_000)]\n    gc.collect()\n    sleep(0.02)",
    ),
    # The time that another thread has to wait for the interpreter.
    "late reads": ("read lag p99", "import sys\nsys.setswitchinterval(0.03)\nwhile True:\n    pass"),
}
"""For each case, the gate that must fail and the code that a thread of the worker runs all the time."""


def t8_sick(bench: Bench, case: str) -> Iterator[Point]:
    """A sick generator says so.

    SIGSTOP for 300 ms; eight processes that keep its core busy for 2 s; a thread that makes garbage and collects it; one that keeps the
    interpreter for 30 ms at a time, so that answers are read late; twice the requests per second that its CPU can make by what 1000/s
    cost: exit status 3, and the gate that is meant for it is among those that failed.
    """
    if case in BESIDE:
        gate, loop = BESIDE[case]
        with beside_the_load(bench.new_folder(), loop):
            yield sick(case, bench.once({}, poisson(20, 3, output_tokens=16)), gate)
        return
    if case == "overload":
        rate = 2 / cpu_s_per(bench.once({}, poisson(1000, 3)), "requests")
        yield sick(f"{rate:.0f} requests/s", bench.once({}, poisson(rate, 1, timeout_s=5)), "lag p50")
        return
    hog = fault(2, "command", command=[sys.executable, "-c", HOG, str(os.getpid())])
    injected, gate = (hog, "lag p99") if case == "CPU hog" else (fault(2, "stop", "locustfile", for_s=0.3), "loop stalls")
    yield sick(case, bench.once({}, poisson(80, 5, output_tokens=64, faults=[injected])), gate)


def cpu_s_per(observed: Observed, what: str) -> float:
    """Return the worker's CPU time per request or per token."""
    samples = list(read_lines(observed.folder / "health.jsonl", HealthSample))
    ends = [0.0, *(sample.t_s for sample in samples)]
    used = sum(sample.cpu * (end - begin) for sample, begin, end in zip(samples, ends, ends[1:], strict=False))
    return used / (len(observed.rows) if what == "requests" else sum(row.output_tokens or 0 for row in observed.rows))


def t8_healthy(bench: Bench, case: str) -> Iterator[Point]:
    """A healthy generator is never called sick.

    Three runs (quick: one) on this machine as it is.
    """
    observed = bench.once({}, poisson(40, 4 if bench.quick else 10, output_tokens=16))
    failed = "; ".join(observed.failed_gates.values())
    yield judged(f"{case} run", f"{failed or 'valid'}; {observed.lateness()}", "valid", not failed, timing=True)


def t14_throughput(bench: Bench) -> Iterator[Point]:
    """One worker takes 80 requests/s of 128 streamed tokens.

    The run is valid, all answers are complete, and the CPU of the worker stays below 85 % of a core at its p95. (full) A token costs
    at most 20 % more CPU, beside sending and receiving its bytes, than when `RATIO` was measured.
    """
    observed = bench.run({}, poisson(80, 8 if bench.quick else 20, output_tokens=128))
    num_ok, num = len(observed.pairs), len(observed.rows)
    yield judged("complete", f"{num_ok} of {num}", "all", num_ok == num)
    cpu = next(gate for gate in observed.summary.gates if gate.name == "CPU p95")
    cost_s = cpu_s_per(observed, "tokens")
    throughput = observed.summary.throughput
    tokens_per_s = throughput.output_tokens if throughput else 0.0
    seen = f"{cpu.value:.0%}; {tokens_per_s:.0f} tokens/s, {cost_s * 1e6:.1f} us CPU a token; {observed.lateness()}"
    yield judged("CPU", seen, f"< {cpu.limit:.0%}", cpu.ok, timing=True)
    if not bench.quick:
        ratio = cost_s / bare_chunk_s()
        seen = f"{ratio:.1f} times sending and receiving it"
        yield judged("cost of a token", seen, f"<= {RATIO} + 20 %", ratio <= 1.2 * RATIO, timing=True)


def bare_chunk_s() -> float:
    """Return the CPU time to send, await and receive an event of one token on this machine now, without the kit's code."""
    event, view, took = b"x" * 150, memoryview(bytearray(4096)), []
    near, far = socket.socketpair()
    with near, far, select.epoll() as poller:
        poller.register(far, select.EPOLLIN)
        for _ in range(5):
            begin = time.process_time()
            for _ in range(4000):
                near.send(event)
                poller.poll(0)
                far.recv_into(view)
            took.append((time.process_time() - begin) / 4000)
    return min(took)

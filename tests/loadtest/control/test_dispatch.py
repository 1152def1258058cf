"""A worker's share of a run: what a stop leaves, and conversations.

The first in a process of its own, because the dispatcher comes with Locust, which patches it.
"""

import json
import subprocess
import sys
from pathlib import Path

from loadtest.audit.audit import audit
from loadtest.errors import ExitCode
from loadtest.plan.schedule import read_schedule
from loadtest.proof.selftest.bench import ABOUT_TIME, Bench, poisson
from loadtest.report.report import write_report
from tests.loadtest.whole_runs import a_scenario

# A stop that is heard while the first request waits for its due time, and says a later time, as it does when the loop is late.
STOPPED = """
import json, sys, time
import gevent, msgspec
from loadtest.control.dispatch import Load, Plan
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
scenario = parse_scenario(json.loads(sys.argv[1]))
part = make_schedule(scenario).requests
said = []
plan = Plan(0, 1, "http://127.0.0.1:1", "truth", "x-", scenario.model_dump(mode="json"), part, 10.0)
load = Load(plan, api_key="", send=lambda name, data: said.append((name, data)), fire=lambda **_: None)
driver = gevent.spawn(load.drive)
load.start(time.perf_counter() + 5.0)
for _ in range(100):
    gevent.sleep(0)
load.stop("enough", at_s=part[0].due_s + 0.5)
driver.get(timeout=10)
rows = [json.loads(line) for name, data in said if name == "lt-rows" for line in data["rows"].splitlines()]
print(json.dumps([[(row["id"], row["state"], row["reason"]) for row in rows], said[-1]]))
"""


def test_a_stop_finds_the_request_that_waits_for_its_due_time() -> None:
    scenario = a_scenario(arrival={"law": "constant", "rate": 1}, duration_s=3, warmup_s=0)
    command = [sys.executable, "-c", STOPPED, json.dumps(scenario)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    rows, last = json.loads(done.stdout)
    assert rows == [[0, "never_sent", "enough"]]
    assert last == ["lt-end", {"worker": 0, "num_batches": 1, "num_rows": 1}]


def test_a_conversation_ends_with_the_answer_that_fails_and_each_turn_has_a_row(tmp_path: Path) -> None:
    law = {"ttft": {"law": "constant", "s": 0.01}, "failures": [{"kind": "status", "every": 4}]}
    talk = {"endpoint": "chat", "prompt": "text", "conversation": {"turns": {"mean": 3}, "think_s": {"mean": 0.1}}}
    observed = Bench(tmp_path, quick=True).once(law, poisson(10, 3, requests=[talk], keep_text=False))
    assert observed.failed_gates.keys() <= ABOUT_TIME
    requests = read_schedule(observed.folder / "schedule.jsonl").requests
    rows = {row.id: row for row in observed.rows}
    assert sorted(rows) == [request.id for request in requests]
    assert not any(row.text for row in observed.rows)
    for request in requests:
        row, before = rows[request.id], rows[request.id if request.after is None else request.after]
        if before.state != "ok" and before is not row:
            assert (row.state, row.due_s >= 3) == ("never_sent", True)
    assert any(row.reason == "the answer before it: http_error" for row in observed.rows)
    assert audit(observed.folder).counts == {}
    if observed.code is not ExitCode.INVALID:
        assert [turn.number for turn in observed.summary.turns] == [1, 2, 3]
        assert any("later turns of conversations were not sent" in threat for threat in observed.summary.threats)
        assert "<h2>Conversations</h2>" in write_report(observed.folder).read_text()

"""A worker's share of a run: what a stop leaves. In a process of its own, because the dispatcher comes with Locust, which patches it."""

import json
import subprocess
import sys

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

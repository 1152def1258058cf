"""A worker's share of a run, in this process: what a stop leaves."""

import time
from typing import Any

import gevent
import msgspec

from loadtest.dispatch import Load, Plan
from loadtest.recorder import End
from loadtest.records import Row
from loadtest.scenario import parse_scenario
from loadtest.schedule import make_schedule
from tests.loadtest.whole_runs import a_scenario


def test_a_stop_finds_the_request_that_waits_for_its_due_time() -> None:
    scenario = parse_scenario(a_scenario(arrival={"law": "constant", "rate": 1}, duration_s=3, warmup_s=0))
    part = make_schedule(scenario).requests
    plan = Plan(0, 1, "http://127.0.0.1:1", "truth", "x-", scenario.model_dump(mode="json"), part, 10.0)
    said: list[tuple[str, Any]] = []
    load = Load(plan, api_key="", send=lambda name, data: said.append((name, data)), fire=lambda **_: None)
    driver = gevent.spawn(load.drive)
    load.start(time.perf_counter() + 5.0)
    for _ in range(100):
        gevent.sleep(0)  # until the first request waits
    load.stop("enough", at_s=(part[0].due_s or 0.0) + 0.5)  # as a stop says that is heard while the loop is late
    driver.get(timeout=10)
    rows = [msgspec.json.decode(line, type=Row) for name, data in said if name == "lt-rows" for line in data["rows"].splitlines()]
    assert [(row.id, row.state, row.reason) for row in rows] == [(part[0].id, "never_sent", "enough")]
    assert said[-1] == ("lt-end", msgspec.structs.asdict(End(0, 1, 1)))

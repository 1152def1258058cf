"""These tests check a worker's share of a run: its rest at a stop, conversations, and the model of each class.

Those that drive a `WorkerLoad` do so in a process of its own, because the dispatcher comes with Locust, which patches it.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loadtest.audit.audit import audit
from loadtest.control.runner import prepare
from loadtest.errors import ExitCode, UsageError
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import read_schedule
from loadtest.plan.workload import fingerprint
from loadtest.proof.selftest.bench import ABOUT_TIME, Bench, poisson
from loadtest.records import read_manifest
from loadtest.report.figures import read_run
from loadtest.report.report import write_report
from loadtest.wire.target import Target
from tests.loadtest.scripted import DONE, SSE, Peer, Server
from tests.loadtest.whole_runs import a_scenario

# A stop that is heard while the first request waits for its due time, and says a later time, as it does when the loop is late.
STOPPED = """
import json, sys, time
import gevent, msgspec
from loadtest.control.dispatch import WorkerLoad, WorkerPlan
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
scenario = parse_scenario(json.loads(sys.argv[1]))
part = make_schedule(scenario).requests
said = []
plan = WorkerPlan(0, 1, "http://127.0.0.1:1", "truth", "x-", scenario.model_dump(mode="json"), part, 10.0)
load = WorkerLoad(plan, api_key="", send=lambda name, data: said.append((name, data)), fire=lambda **_: None)
driver = gevent.spawn(load.drive)
load.start(time.perf_counter() + 5.0)
for _ in range(100):
    gevent.sleep(0)
load.stop("enough", at_s=part[0].due_s + 0.5)
driver.get(timeout=10)
rows = [json.loads(line) for name, data in said if name == "lt-rows" for line in data["rows"].splitlines()]
print(json.dumps([[(row["id"], row["state"], row["reason"]) for row in rows], said[-1]]))
"""
# The first conversation of the scenario, its first turn due at once.
TALK = """
import json, sys, time
import gevent, msgspec
from loadtest.control.dispatch import WorkerLoad, WorkerPlan
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
scenario = parse_scenario(json.loads(sys.argv[1]))
made = make_schedule(scenario).requests
part = [msgspec.structs.replace(made[0], due_s=0.0)]
for request in made:
    if request.after == part[-1].id:
        part.append(request)
said = []
plan = WorkerPlan(0, 1, sys.argv[2], "m", "x-", scenario.model_dump(mode="json"), part, 60.0)
load = WorkerLoad(plan, api_key="", send=lambda name, data: said.append((name, data)), fire=lambda **_: None)
load.make_ready()
driver = gevent.spawn(load.drive)
load.start(time.perf_counter())
driver.get(timeout=60)
print(json.dumps([json.loads(line) for name, data in said if name == "lt-rows" for line in data["rows"].splitlines()]))
"""
# A worker that is given the master's plan and reads its own files.
PLANNED = """
import json, sys
from loadtest.control.dispatch import WorkerLoad, WorkerPlan
from loadtest.plan.request_class import RECORDED
from loadtest.plan.scenario import parse_scenario
scenario = parse_scenario(json.loads(sys.argv[1]), context=RECORDED)
plan = WorkerPlan(0, 1, "http://127.0.0.1:1", "m", "x-", scenario.model_dump(mode="json"), [], 10.0, workload=sys.argv[2])
WorkerLoad(plan, api_key="", send=print, fire=print)
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
    talk = {"endpoint": "chat", "prompt": "text", "output_tokens": {"mean": 8}}
    talk |= {"conversation": {"turns": {"mean": 3}, "think_s": {"mean": 0.1}}}
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
    unsaid = {row.id for row in observed.rows if row.state == "never_sent" and row.due_s >= 3}
    drawn = {item.request.id for item in read_run(observed.folder).items}
    assert unsaid
    assert not drawn & unsaid
    assert drawn | unsaid == {*rows}
    if observed.code is not ExitCode.INVALID:
        assert [turn.number for turn in observed.summary.turns] == [1, 2, 3]
        why = "later turns of conversations were not sent, the first because: (the answer before it|the run ended)"
        assert any(re.search(why, threat) for threat in observed.summary.threats)
        assert "<h2>Conversations</h2>" in write_report(observed.folder).read_text()


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def events(*deltas: dict[str, Any], finish: str) -> bytes:
    """The whole stream of a chat."""
    choices = [{"index": 0, "delta": delta} for delta in deltas] + [{"index": 0, "delta": {}, "finish_reason": finish}]
    return b"".join(b"data: " + json.dumps({"id": "chat", "choices": [choice]}).encode() + b"\n\n" for choice in choices) + DONE


def piece(index: int, arguments: str, **first: Any) -> dict[str, Any]:
    """A delta with a piece of a call; id and name come with its first one."""
    name = {"name": first.pop("name")} if first else {}
    return {"tool_calls": [{"index": index, **first, "function": {**name, "arguments": arguments}}]}


def whole(message: dict[str, Any], finish: str) -> bytes:
    return json.dumps({"id": "chat", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}).encode()


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


STREAMED = [
    events(
        {"role": "assistant", "content": ""},
        {"reasoning": "two cities"},
        {"content": "Let me look."},
        piece(0, "", id="paris", type="function", name="get_weather"),
        piece(0, '{"city": '),
        piece(0, '"Paris"}'),
        piece(1, '{"city": "Rome"}', id="rome", type="function", name="get_weather"),
        finish="tool_calls",
    ),
    events(piece(0, '{"city": "Os', id="oslo", type="function", name="get_weather"), finish="length"),
    events({"reasoning": "done"}, {"content": "Sunny."}, finish="stop"),
]
CALLS = [call("paris", '{"city": "Paris"}'), call("rome", '{"city": "Rome"}')]
WHOLE = [
    whole({"role": "assistant", "reasoning": "two cities", "content": "Let me look.", "tool_calls": CALLS}, "tool_calls"),
    whole({"role": "assistant", "content": None, "tool_calls": [call("oslo", '{"city": "Os')]}, "length"),
    whole({"role": "assistant", "reasoning": "done", "content": "Sunny."}, "stop"),
]


@pytest.mark.parametrize("stream", [True, False])
def test_the_next_turn_holds_the_calls_of_the_answer_as_calls_with_a_result_each_and_no_reasoning(stream: bool) -> None:
    asked: list[dict[str, Any]] = []

    def script(peer: Peer) -> None:
        for answer in STREAMED if stream else WHOLE:
            asked.append(json.loads(peer.read_request()[2]))
            head = SSE if stream else "HTTP/1.1 200 OK\nContent-Type: application/json\n"
            peer.send(head + f"Content-Length: {len(answer)}\n", answer)

    talk = {"turns": {"mean": 3}, "think_s": {"dist": "constant", "mean": 0}}
    agents = {
        "endpoint": "chat",
        "prompt": "text",
        "stream": stream,
        "tools": [TOOL],
        "conversation": talk,
        "input_tokens": {"mean": 4},
    }
    scenario = a_scenario(arrival={"law": "constant", "rate": 1}, duration_s=30, requests=[agents], keep_text=False)
    server = Server(script)
    command = [sys.executable, "-c", TALK, json.dumps(scenario), server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    server.join()
    rows = json.loads(done.stdout)
    assert [(row["state"], row["finish_reason"], "text" in row) for row in rows] == [
        ("ok", "tool_calls", False),
        ("ok", "length", False),
        ("ok", "stop", False),
    ]
    assert [sum(tokens for _, tokens in row["chunks"]) for row in rows] == ([6, 1, 2] if stream else [1, 1, 1])
    assert [(body["tools"], body["model"]) for body in asked] == [([TOOL], "m")] * 3
    users = [message for message in asked[2]["messages"] if message["role"] == "user"]
    assert [len(user["content"].split()) for user in users] == [4, 4, 4]
    answered = {"role": "assistant", "content": "Let me look.", "tool_calls": CALLS}
    results = [{"role": "tool", "tool_call_id": name, "content": '{"result": "ok"}'} for name in ("paris", "rome")]
    assert asked[0]["messages"] == users[:1]
    assert asked[1]["messages"] == [users[0], answered, *results, users[1]]
    nothing = {"role": "assistant", "content": ""}  # the call was cut off: no client could run it
    assert asked[2]["messages"] == [*asked[1]["messages"], nothing, users[2]]


def test_the_next_turn_waits_for_the_end_of_the_http_answer() -> None:
    """A server that never ends the body after [DONE]: the client gives the answer up after its timeout, and counts the pause from then."""
    answer = events({"content": "hi"}, finish="stop")

    def never_ends(peer: Peer) -> None:
        peer.answer(SSE + f"Content-Length: {len(answer) + 1}\n", answer)
        assert peer.gone()

    talk = {"turns": {"mean": 2}, "think_s": {"dist": "constant", "mean": 0}}
    chat = {"endpoint": "chat", "prompt": "text", "conversation": talk}
    scenario = a_scenario(arrival={"law": "constant", "rate": 1}, duration_s=30, requests=[chat], timeout_s=2)
    server = Server(never_ends, lambda peer: peer.answer(SSE + f"Content-Length: {len(answer)}\n", answer))
    command = [sys.executable, "-c", TALK, json.dumps(scenario), server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    server.join()
    first, second = json.loads(done.stdout)
    assert (first["state"], second["state"]) == ("ok", "ok")
    assert first["end_s"] < 2 <= second["due_s"]


@pytest.mark.parametrize(
    ("here", "problem"),
    [
        ('"one"', ""),
        ('"two"', "differs here from the file on the master's machine; copy the master's file here"),
        (None, "prompts.json: cannot be read: No such file or directory"),
    ],
)
def test_a_worker_whose_prompts_are_not_the_masters_does_not_start(tmp_path: Path, here: str | None, problem: str) -> None:
    file = tmp_path / "prompts.json"
    file.write_text('{"prompt": "one"}')
    values = a_scenario(requests=[{"endpoint": "chat", "prompt": "text", "prompts": str(file)}])
    scenario = parse_scenario(values)
    told = fingerprint(scenario)
    file.unlink()
    if here is not None:
        file.write_text(here)
    command = [sys.executable, "-c", PLANNED, json.dumps(scenario.model_dump(mode="json")), told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0, problem in done.stderr) == (not problem, True), done.stderr


def test_each_class_asks_its_own_model(tmp_path: Path) -> None:
    law = {"adapters": ["tuned"], "ttft": {"law": "constant", "s": 0.01}}
    classes: list[dict[str, Any]] = [{"name": "plain", "weight": 3}, {"name": "special", "model": "tuned"}]
    lengths = {"input_tokens": {"mean": 8}, "output_tokens": {"mean": 1}}
    observed = Bench(tmp_path, quick=True).once(law, poisson(30, 3, requests=[{**cls, **lengths} for cls in classes]))
    assert observed.failed_gates.keys() <= ABOUT_TIME
    requests = read_schedule(observed.folder / "schedule.jsonl").requests
    of_class = {"plain": "truth", "special": "tuned"}
    assert {number: entry.model for number, entry in observed.told} == {r.id: of_class[r.cls] for r in requests}
    num = Counter(request.cls for request in requests)
    assert 0.15 < num["special"] / num.total() < 0.35  # some 90 requests, a quarter of them: the standard deviation is 0.05
    assert audit(observed.folder).counts == {}


def test_a_model_that_the_target_does_not_serve_is_refused_before_the_run(tmp_path: Path) -> None:
    classes = [{"name": "plain"}, {"name": "special", "model": "other"}]
    scenario = parse_scenario(poisson(1, 5, requests=classes))
    with Bench(tmp_path, quick=True).serving({"adapters": ["tuned"]}) as (folder, url):
        with pytest.raises(UsageError, match=r"requests\.1\.model: 'other' is not served at .*; it serves truth, tuned"):
            prepare(scenario, Target(url), folder / "run", command=())
        assert not (folder / "run").exists()
        every = parse_scenario(poisson(1, 5, requests=[{"model": "tuned"}]))
        prepare(every, Target(url), folder / "run", command=())
    assert read_manifest(folder / "run").model == "tuned"

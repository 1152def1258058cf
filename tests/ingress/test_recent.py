"""An ingress shows the ways of its latest requests: which replicas they had, in order, and why they went there and left."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from serve_app.core.events import LinkEnd
from serve_app.core.request import RequestState, Resume
from serve_app.core.tenants import Caller
from serve_app.core.trail import MOVED, Route
from serve_app.errors import NoFreePlace, QueueFull
from serve_app.ingress.books.recent import MAX_HOPS, MAX_ID_CHARS, MAX_TENANTS, MAX_WAYS, RecentRequests
from serve_app.ingress.exchange.exchange import Exchange
from tests.doubles.fleet import MODEL, in_loop, until
from tests.ingress.test_ledger import KEY, SECRET_TEXT, serving

NOW = 110.0
_TIMES = itertools.count(1)


def part(*hops: tuple[str, str], arrived_at: float = 100.5, end: str = "", tokens: int = 0) -> RequestState:
    """An engine request that was at these replicas, each with the end of its attempt; "" while it runs."""
    request = RequestState("r", prompt_tokens=5, max_tokens=50, resume=Resume.CONTINUE, arrived_at=arrived_at)
    trail = request.trail
    for number, (replica, left) in enumerate(hops):
        trail.started(replica, "load", Route(0, 0, 0.0), 101.0 + number)
        if left and left != MOVED:
            trail.lost(left)
    trail.end = end
    request.emitted_ids.extend(range(tokens))
    return request


def exchange(name: str, *parts: RequestState, tenant: str | None = None) -> Exchange:
    """A request that arrived at the second 100, after all that were made before."""
    caller = None
    if tenant is not None:
        caller = cast(Caller, SimpleNamespace(tenant=SimpleNamespace(name=tenant), key=SimpleNamespace(id=f"{tenant}-1")))
    made = Exchange("/v1/completions", caller)
    made.id, made.model, made.arrived_at, made.time = name, "m", 100.0, float(next(_TIMES))
    for each in parts:
        made.requests.add(each, "answer")
    return made


def ended(recent: RecentRequests, *exchanges: Exchange) -> None:
    for each in exchanges:
        each.status, each.answered = 200, True
        recent.end(each, each.end())


def ways(recent: RecentRequests, kind: str, running: Sequence[Exchange] = (), tenant: str | None = None) -> list[dict[str, Any]]:
    shown = recent.shown(reversed(running), tenant, NOW)
    return list(msgspec.json.decode(msgspec.json.encode(shown))[kind])


def test_a_request_whose_replica_died_has_both_replicas_and_the_cause() -> None:
    recent = RecentRequests(lambda model, replica: f"{replica} of {model} was killed")
    moved = exchange("mine", part(("a", "engine_died"), ("b", ""), tokens=7))
    (way,) = ways(recent, "moved", [moved])
    assert way.pop("time") == moved.time
    assert way == {
        "id": "mine",
        "tenant": None,
        "key": None,
        "model": "m",
        "state": "running",
        "reason": "",
        "queued_s": 0.5,
        "total_s": 10.0,
        "output_tokens": 7,
        "hops": [
            {"replica": "a", "reason": "load", "start_s": 1.0, "left": "a of m was killed"},
            {"replica": "b", "reason": "load", "start_s": 2.0, "left": ""},
        ],
    }


def test_each_end_of_a_link_has_its_own_words_where_no_cause_is_known() -> None:
    for end in LinkEnd:
        (way,) = ways(RecentRequests(), "others", [exchange("r", part(("a", end.name.lower())))])
        assert (way["state"], way["hops"][0]["left"]) == ("queued", end.value)


def test_a_move_off_a_living_replica_has_the_reason_of_its_decision() -> None:
    request = part(("a", MOVED))
    request.trail.moves_on("drain", 102.0)
    request.trail.started("b", "load", Route(0, 0, 0.0), 103.0)
    request.trail.started("c", "load", Route(0, 0, 0.0), 104.0)
    (way,) = ways(RecentRequests(), "moved", [exchange("r", request)])
    assert [hop["left"] for hop in way["hops"]] == ["the replica drains", "moved", ""]


@pytest.mark.parametrize(
    ("parts", "state"),
    [
        ((), "arriving"),
        ((part(),), "queued"),
        ((part(("a", "")), part()), "running"),
        ((part(("a", "length"), end="length"),), "running"),  # the rest of its answer is on the way
    ],
)
def test_a_request_that_runs_has_its_state(parts: Sequence[RequestState], state: str) -> None:
    assert [way["state"] for way in ways(RecentRequests(), "others", [exchange("r", *parts)])] == [state]


def test_of_several_engine_requests_the_hops_are_of_the_one_that_moved() -> None:
    (way,) = ways(RecentRequests(), "moved", [exchange("r", part(("a", "")), part(("b", "broke_off"), ("a", "")))])
    assert [hop["replica"] for hop in way["hops"]] == ["b", "a"]


def test_running_and_ended_requests_stand_together_the_newest_first_and_moved_ones_apart() -> None:
    recent = RecentRequests()
    first, moved, running = exchange("1", part(("a", ""))), exchange("2", part(("a", "broke_off"), ("b", ""))), exchange("3")
    ended(recent, first, moved)
    assert [(way["id"], way["state"]) for way in ways(recent, "others", [running])] == [("3", "arriving"), ("1", "complete")]
    assert [(way["id"], way["state"]) for way in ways(recent, "moved", [running])] == [("2", "complete")]


def test_a_refused_request_has_its_reason_and_a_line_without_a_place_is_left_out() -> None:
    recent = RecentRequests()
    for name, error in (("full", QueueFull(waiting=1, limit=1, retry_after_s=5.0)), ("line", NoFreePlace(1, retry_after_s=1.0))):
        refused = exchange(name)
        refused.fail(error)
        recent.end(refused, refused.end())
    ended(recent, exchange("tokenized"))
    assert [(way["id"], way["state"], way["reason"]) for way in ways(recent, "others")] == [("full", "rejected", "queue_full")]


def test_the_ways_are_bounded_in_number_and_length() -> None:
    recent = RecentRequests()
    hops = [(f"replica-{number}", "broke_off") for number in range(MAX_HOPS + 3)]
    for number in range(3 * MAX_WAYS):
        ended(recent, exchange(f"{number}" + "x" * 100, part(*hops)), exchange(f"{number}", part(("a", ""))))
    running = [exchange(f"running {number}", part(("a", ""))) for number in range(3 * MAX_WAYS)]
    moved, others = ways(recent, "moved", running), ways(recent, "others", running)
    assert (len(moved), {len(way["hops"]) for way in moved}, {len(way["id"]) for way in moved}) == (
        MAX_WAYS,
        {MAX_HOPS},
        {MAX_ID_CHARS},
    )
    assert [way["id"] for way in others] == [f"running {number}" for number in reversed(range(2 * MAX_WAYS, 3 * MAX_WAYS))]
    assert moved[0]["hops"][-1]["replica"] == hops[-1][0]


def test_each_tenant_has_its_own_ways_which_another_ones_requests_do_not_displace() -> None:
    recent = RecentRequests()
    ended(recent, exchange("of red", part(("a", "")), tenant="red"))
    ended(recent, *(exchange("of blue", part(("a", "")), tenant="blue") for _ in range(3 * MAX_WAYS)))
    running = [exchange("runs for blue", tenant="blue")]
    assert [(way["id"], way["key"]) for way in ways(recent, "others", running, "red")] == [("of red", "red-1")]
    assert {way["id"] for way in ways(recent, "others", running, "blue")} == {"of blue", "runs for blue"}
    for number in range(MAX_TENANTS):
        ended(recent, exchange("r", part(("a", "")), tenant=f"t{number}"))
    assert ways(recent, "others", tenant="red") == []
    assert len(ways(recent, "others", tenant=f"t{MAX_TENANTS - 1}")) == 1


@pytest.mark.engine
@in_loop
async def test_the_way_of_a_stream_is_shown_while_it_runs_and_after(model: Path, tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {KEY}"}

    async with serving(model, tmp_path) as ingress, asyncio.TaskGroup() as tasks:

        async def way() -> Any:
            answer = await ingress.http.get("/fleet/requests", headers=headers)
            assert SECRET_TEXT not in answer.text
            assert KEY not in answer.text
            ((shown,), ()) = answer.json()["moved"], answer.json()["others"]
            return shown["id"], shown["model"], shown["state"], [(hop["replica"], hop["left"]) for hop in shown["hops"]]

        await ingress.join("a", "b")
        answer = tasks.create_task(ingress.post(request_id="moved", max_tokens=4, stream=True))
        await until(lambda: any(replica.engine.running for replica in ingress.replicas.values()))
        first = ingress.holder()
        other = {"a": "b", "b": "a"}[first]
        ingress.replicas[first].engine.step(2)
        await until(lambda: ingress.front.client.fleet.tally.output_tokens == 2)
        ingress.replicas[first].stop_listening()
        await until(lambda: ingress.replicas[other].engine.running)
        hops = [(first, "the connection to it broke off"), (other, "")]
        assert await way() == ("moved", MODEL, "running", hops)
        ingress.replicas[other].engine.step(2)
        await answer
        assert await way() == ("moved", MODEL, "complete", hops)

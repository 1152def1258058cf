"""Requests go to replicas that have their prompts cached, in the fleet as a whole."""

from collections import Counter
from dataclasses import replace

import pytest

from serve_app.core.affinity import CONTINUED_AT_START, CONTINUED_OVER, PrefixAffinity
from serve_app.core.events import HeartbeatArrived, LinkEnd, LinkLost, LinkOpened, RequestArrived, RequestsAborted
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import AbortAttempts, StartAttempt
from serve_app.core.load import EngineLoad
from serve_app.core.prefix_index import Prefix
from serve_app.core.request import Resume
from serve_app.core.routing import Reason
from tests.core.helpers import Output, outputs, run

BLOCK = 10


def asked(request_id: str, words: str, *, max_tokens: int = 10, session: int | None = None) -> RequestArrived:
    """Each word is a block of the prompt."""
    said = words.split()
    hashes = [hash_of(" ".join(said[: n + 1])) for n in range(len(said))]
    prompt_tokens = BLOCK * len(said) + 1
    return RequestArrived(request_id, prompt_tokens, max_tokens, Resume.CONTINUE, request_id, Prefix(hashes, BLOCK, session))


def hash_of(words: str) -> int:
    return int.from_bytes(words.encode().ljust(8)[-8:]) * 7919 + len(words)


def fleet_by_prefix(*replica_ids: str, max_load: float = 1.5, kv_tokens: int = 0, continued: float = 0.0) -> FleetState:
    """Return a fleet that has learnt that there are no conversations; ``continued``: the share of requests that continue another."""
    fleet = FleetState(FleetSettings(model="m"), PrefixAffinity(max_load, continued))
    for replica_id in replica_ids:
        fleet.handle(LinkOpened(replica_id, 100, kv_tokens=kv_tokens), now=0.0)
    return fleet


def ask(fleet: FleetState, request_id: str, words: str, **more: int) -> tuple[str, str, int]:
    """Return the request's replica, the reason, and the prompt tokens expected in the replica's cache."""
    (start,) = run(fleet, asked(request_id, words, **more))
    assert isinstance(start, StartAttempt)
    trail = fleet.requests[request_id].trail
    return start.replica_id, trail.reasons[-1], trail.expected_hit_tokens


def finish(fleet: FleetState, request_id: str) -> None:
    request = fleet.requests[request_id]
    assert request.replica_id is not None
    run(fleet, outputs(request.replica_id, Output(request.attempt_id, [1], "stop")))


def talk(fleet: FleetState, number: int, turns: int = 2) -> list[str]:
    """Run a conversation alone; return the replicas of its turns."""
    went = []
    for turn in range(turns):
        went.append(ask(fleet, f"t{number}-{turn}", " ".join(f"w{number}-{n}" for n in range(turn + 1)))[0])
        finish(fleet, f"t{number}-{turn}")
    return went


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    fleet = fleet_by_prefix("a", "b")
    assert ask(fleet, "r0", "system one") == ("a", Reason.LOAD, 0)
    assert ask(fleet, "r1", "other two", max_tokens=1) == ("b", Reason.LOAD, 0)
    assert ask(fleet, "r2", "system one more") == ("a", Reason.PREFIX, 20)
    assert ask(fleet, "r3", "other two more") == ("b", Reason.PREFIX, 20)


def test_a_wholly_cached_prompt_leaves_one_token_to_compute() -> None:
    fleet = fleet_by_prefix("a")
    ask(fleet, "r0", "one two")
    again = asked("r1", "one two")
    run(fleet, RequestArrived("r1", 20, 1, Resume.CONTINUE, "r1", again.prefix))
    assert fleet.requests["r1"].trail.expected_hit_tokens == 19


def test_a_short_common_beginning_does_not_draw_requests_together() -> None:
    fleet = fleet_by_prefix("a", "b", "c", "d")
    where = [ask(fleet, f"r{n}", f"system q{n} long long long")[0] for n in range(8)]
    assert Counter(where) == dict.fromkeys("abcd", 2)


def test_a_hot_prefix_spreads_and_no_replica_gets_more_than_the_bound() -> None:
    fleet = fleet_by_prefix(*"abcdefgh")
    for number in range(80):
        ask(fleet, f"r{number}", "hot hot hot hot")
        loads = [r.outstanding_tokens for r in fleet.replicas.values()]
        assert max(loads) <= 1.5 * (sum(loads) / 8 + 51) + 51
    num_used = sum(len(r.held) > 0 for r in fleet.replicas.values())
    assert num_used >= 5, "8 replicas / 1.5"
    assert fleet.routed[Reason.SPREAD] == num_used - 1, "once for each replica that did not have it"


@pytest.mark.parametrize("num_replicas", [2, 3, 16])
def test_a_hot_prefix_does_not_stay_at_the_one_replica_that_had_it_first(num_replicas: int) -> None:
    fleet = fleet_by_prefix(*(f"r{n}" for n in range(num_replicas)), max_load=2.0)
    for number in range(20 * num_replicas):
        ask(fleet, f"q{number}", "hot hot hot hot")
    loads = sorted(replica.outstanding_tokens for replica in fleet.replicas.values())
    mean_of_others = sum(loads[:-1]) / (num_replicas - 1)
    assert loads[-1] <= 2.0 * (mean_of_others + 2 * 51)


def test_a_replica_without_room_in_its_cache_gets_nothing_for_what_it_has_cached() -> None:
    fleet = fleet_by_prefix("a", "b", kv_tokens=100)
    ask(fleet, "r0", "one two three")
    run(fleet, HeartbeatArrived("a", EngineLoad(1, 1, 0, 0.8), draining=False))
    assert ask(fleet, "r1", "one two three four")[:2] == ("b", Reason.SPREAD)


def test_a_drained_or_lost_replica_gets_nothing_and_a_lost_one_has_nothing_cached() -> None:
    fleet = fleet_by_prefix("a", "b", "c")
    ask(fleet, "r0", "one two")
    run(fleet, HeartbeatArrived("a", EngineLoad(1, 1, 0, 0.0), draining=True))
    assert ask(fleet, "r1", "one two three")[:2] == ("b", Reason.SPREAD)
    run(fleet, LinkLost("b", LinkEnd.BROKE_OFF), LinkLost("a", LinkEnd.BROKE_OFF), RequestsAborted(["r0", "r1"]))
    run(fleet, LinkOpened("b", 100))
    where, _, hit_tokens = ask(fleet, "r2", "one two three")
    assert (where, hit_tokens) in (("b", 0), ("c", 30))


def test_what_does_not_fit_into_the_cache_any_more_is_not_expected_there() -> None:
    fleet = fleet_by_prefix("a", kv_tokens=40)
    for request_id, words in (("r0", "one two"), ("r1", "three four five")):
        ask(fleet, request_id, words)
        finish(fleet, request_id)
    assert ask(fleet, "r2", "one two x") == ("a", Reason.PREFIX, 10), "its end was given up, its beginning was not"


def test_what_the_hosts_memory_still_holds_is_expected_there() -> None:
    fleet = fleet_by_prefix("a", kv_tokens=40)
    fleet.replicas["a"].host_kv_tokens = 60
    for request_id, words in (("r0", "one two"), ("r1", "three four five")):
        ask(fleet, request_id, words)
        finish(fleet, request_id)
    assert ask(fleet, "r2", "one two x") == ("a", Reason.PREFIX, 20)


def test_a_request_that_continues_elsewhere_goes_by_load() -> None:
    fleet = fleet_by_prefix("a", "b", "c")
    ask(fleet, "r0", "one two", max_tokens=100)
    run(fleet, LinkLost("a", LinkEnd.BROKE_OFF))
    assert fleet.requests["r0"].trail.reasons == [Reason.LOAD, Reason.LOAD]


def test_ingresses_that_never_spoke_send_each_turn_of_a_conversation_to_the_same_replica() -> None:
    fleets = [fleet_by_prefix(*"abcdefgh") for _ in range(3)]
    for fleet in fleets:
        for number in range(CONTINUED_OVER):
            talk(fleet, number)
    for number in range(1000, 1050):
        words = [f"c{number}-{turn}" for turn in range(4)]
        where = set()
        for turn in range(4):
            where.add(ask(fleets[turn % 3], f"r{number}-{turn}", " ".join(words[: turn + 1]))[0])
            finish(fleets[turn % 3], f"r{number}-{turn}")
        assert len(where) == 1


def test_an_ingress_that_has_just_started_sends_a_turn_where_the_others_sent_the_ones_before() -> None:
    old, new = (fleet_by_prefix(*"abcdefgh", continued=CONTINUED_AT_START) for _ in range(2))
    for number in range(20):
        went = ask(old, f"r{number}", f"c{number}")
        finish(old, f"r{number}")
        assert ask(new, f"r{number}", f"c{number} more")[:2] == went[:2]
        finish(new, f"r{number}")


def test_a_new_ingress_learns_that_there_are_no_conversations() -> None:
    fleet = fleet_by_prefix("a", "b", continued=CONTINUED_AT_START, max_load=10.0)
    reasons = [ask(fleet, f"r{n}", f"w{n} x y")[1] for n in range(165)]
    assert reasons == [Reason.HASH] * 161 + [Reason.LOAD] * 4, "0.5 * 0.99 ** 161 < 0.1"


def test_without_conversations_new_prompts_go_by_load() -> None:
    fleet = fleet_by_prefix("a", "b")
    assert {ask(fleet, f"r{n}", f"w{n} x y")[1] for n in range(200)} == {Reason.LOAD}


def test_choices_of_one_prompt_are_no_conversation() -> None:
    fleet = fleet_by_prefix("a", "b")
    for number in range(2 * CONTINUED_OVER):  # twice each, as n=2 asks
        ask(fleet, f"r{number}", f"w{number // 2} x y")
        finish(fleet, f"r{number}")
    assert ask(fleet, "new", "z x y")[1] == Reason.LOAD


def test_a_prompt_that_is_asked_again_does_not_take_its_conversation_away() -> None:
    fleet = fleet_by_prefix(*"abcdefgh")
    for number in range(CONTINUED_OVER):
        talk(fleet, number)
    where = set()
    for number, words in enumerate(["one", "one two", "one two", "one two three", "one two three four"]):
        where.add(ask(fleet, f"r{number}", words)[0])
        finish(fleet, f"r{number}")
    assert len(where) == 1


def test_replicas_that_drain_are_not_among_those_that_are_tried() -> None:
    fleet = fleet_by_prefix(*"abcde", max_load=10.0)
    for number, replica_id in enumerate("abcd"):
        fleet.handle(HeartbeatArrived(replica_id, EngineLoad(1, 0, 0, 0.0), draining=False), now=0.0)
        ask(fleet, f"busy{number}", f"busy{number} x")
    index = fleet._routing.index  # type: ignore[attr-defined]
    prefix = asked("r", "one two three").prefix
    for replica_id in "abcd":
        index.add(replica_id, prefix, 0)
    for replica_id in "abc":
        fleet.handle(HeartbeatArrived(replica_id, EngineLoad(1, 0, 0, 0.0), draining=True), now=1.0)
    assert ask(fleet, "r", "one two three more")[:2] == ("d", Reason.PREFIX)


@pytest.mark.parametrize("session", [1, 2, 3, 4])
def test_a_session_goes_to_one_place_at_every_ingress_whatever_it_asks(session: int) -> None:
    fleets = [fleet_by_prefix(*"abcdefgh") for _ in range(3)]
    where = set()
    for number in range(6):
        replica_id, reason, _ = ask(fleets[number % 3], f"r{number}", f"system w{number}", session=session)
        finish(fleets[number % 3], f"r{number}")
        where.add(replica_id)
        assert reason == Reason.SESSION
    assert len(where) == 1


def test_sessions_are_shared_out_evenly() -> None:
    fleet = fleet_by_prefix(*"abcdefgh", max_load=10.0)
    for number in range(800):
        ask(fleet, f"r{number}", "", session=number * 0x9E3779B97F4A7C15 % 2**64)
        finish(fleet, f"r{number}")
    went = Counter[str]()
    for number in range(800):
        went[ask(fleet, f"s{number}", "", session=number * 0x9E3779B97F4A7C15 % 2**64)[0]] += 1
        finish(fleet, f"s{number}")
    assert min(went.values()) > 50
    assert max(went.values()) < 200


@pytest.mark.parametrize(("running", "left"), [(1, {"n0@0", "n1@0"}), (1000, {"n0@0", "n1@0", "q0@0", "q1@0"})])
def test_a_new_replica_takes_over_what_has_little_cached_and_of_the_rest_what_is_too_much(running: int, left: set[str]) -> None:
    fleet = fleet_by_prefix("a", max_load=10.0)
    for number in range(2):
        ask(fleet, f"before{number}", f"c{number} d{number}", max_tokens=1)
        finish(fleet, f"before{number}")
        ask(fleet, f"runs{number}", f"r{number} s{number}", max_tokens=running)
    for number in range(2):
        assert ask(fleet, f"q{number}", f"c{number} d{number}", max_tokens=1)[2] == 20
        assert ask(fleet, f"n{number}", f"e{number} f{number}", max_tokens=1)[2] == 0
    run(fleet, HeartbeatArrived("a", EngineLoad(1, 2, 4, 0.5), draining=False))
    instructions = run(fleet, LinkOpened("b", 100))
    aborted = [i for instruction in instructions if isinstance(instruction, AbortAttempts) for i in instruction.attempt_ids]
    assert set(aborted) == left


@pytest.mark.parametrize("by_prefix", [True, False])
@pytest.mark.parametrize("engines_preempt", [True, False])
def test_requests_that_give_way_do_not_hide_that_a_replica_is_full_of_others(engines_preempt: bool, by_prefix: bool) -> None:
    routing = PrefixAffinity(2.0, 0.0) if by_prefix else None
    fleet = FleetState(FleetSettings(model="m", engines_preempt=engines_preempt), routing)
    fleet.handle(LinkOpened("b", 100), now=0.0)

    def late(request_id: str) -> RequestArrived:  # interactive requests go before those of batch priority
        return replace(asked(request_id, request_id, max_tokens=500), priority="batch")

    for number in range(20):
        run(fleet, late(f"l{number}"))
    fleet.handle(LinkOpened("a", 100), now=0.0)
    where = Counter(ask(fleet, f"q{number}", "hot hot hot hot")[0] for number in range(12))
    if engines_preempt:
        assert where["b"] >= 4, "at most two thirds at the one that has the prompt"
    else:
        assert where["b"] == 0, "there, they would wait behind all others"
    (start,) = run(fleet, late("l20"))
    assert isinstance(start, StartAttempt)
    assert start.replica_id == "a", "it would only wait longer behind its like"
    fleet.validate()
    for request_id in [*fleet.requests]:
        finish(fleet, request_id)
    fleet.validate()
    assert all(replica.yielding_tokens == 0 for replica in fleet.replicas.values())

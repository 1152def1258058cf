"""Long prompts go where they slow few answers, and answers move with their KV where that saves more than it costs."""

from collections import Counter
from dataclasses import replace

import pytest

from serve_app.core.affinity import PrefixAffinity
from serve_app.core.apart import MAX_MOVES, MIN_GAIN, MIN_STAY_S, MOVES_PER_S, WINDOW_S
from serve_app.core.events import HeartbeatArrived, RequestArrived, Ticked
from serve_app.core.fleet import FleetState
from serve_app.core.hand_over import HANDED_OVER
from serve_app.core.instructions import HandOverAttempt, StartAttempt
from serve_app.core.load import EngineLoad
from serve_app.core.prefix_index import Prefix
from serve_app.core.request import Resume
from tests.core.apart_fleet import COSTS, LONG, SHORT, answers, at, first_token, fleet_apart, leaving, linked
from tests.core.helpers import Output, arrived, outputs, run


def uneven() -> FleetState:
    """Return a fleet of which "a" makes one long answer, and "b" and "c" two short ones each, which are fewer tokens."""
    fleet = fleet_apart("a", "b", "c")
    assert answers(fleet, "0", max_tokens=5000) == ["a"]
    assert Counter(answers(fleet, *"1234")) == {"b": 2, "c": 2}
    return fleet


def hand_over(fleet: FleetState, name: str, *, now: float = 0.0) -> None:
    """Let the replica hand the request over."""
    request = fleet.requests[name]
    last = Output(request.attempt_id, [], "length", stop_reason=HANDED_OVER, kv_transfer_params={"blocks": [1]})
    run(fleet, outputs(at(fleet, name), last), now=now)


def beat(replica_id: str, kv_usage: float) -> HeartbeatArrived:
    return HeartbeatArrived(replica_id, EngineLoad(1, 1, 0, kv_usage), draining=False)


def leave_full_engines(fleet: FleetState, now: float) -> list[str]:
    """Return the requests that leave, if the cache of the first request's engine is nearly full, and the others are half full."""
    full = at(fleet, next(iter(fleet.requests)))
    run(fleet, *(beat(replica_id, 0.95 if replica_id == full else 0.5) for replica_id in fleet.replicas), now=now)
    return leaving(run(fleet, Ticked(), now=now))


def test_a_long_prompt_goes_where_few_answers_are_and_those_leave_before_it_starts() -> None:
    fleet = uneven()
    *asked, started = run(fleet, arrived("long", prompt_tokens=LONG))
    assert isinstance(started, StartAttempt)
    assert (started.replica_id, fleet.routed["prompt"]) == ("a", 1)
    assert asked == [HandOverAttempt("a", "0@0")]
    assert dict(fleet.hand_overs.asked) == {"prompts": 1}
    (move,) = fleet.requests["0"].trail.moves
    read_s = fleet.hand_overs.costs.seconds(SHORT + 1)
    assert (move.cause, move.read_s) == ("prompts", read_s)
    assert move.saves_s > MIN_GAIN * read_s
    assert fleet.requests["long"].trail.routes[0].saves_s > 0


@pytest.mark.parametrize("num_behind", [1, 2])
def test_answers_also_leave_replicas_that_have_less_to_do_than_one_whose_answers_cannot_move(num_behind: int) -> None:
    fleet = fleet_apart("a", costs=replace(COSTS, output_token_s=2e-3))
    for number in range(40):
        run(fleet, arrived(f"stays-{number}", Resume.REPLAY, prompt_tokens=SHORT, max_tokens=500))
        first_token(fleet, f"stays-{number}")
    behind = "bcdef"[:num_behind]
    run(fleet, *map(linked, behind))
    assert set(answers(fleet, *map(str, range(20 * num_behind)))) == set(behind)
    run(fleet, *map(linked, "uvwxyz"))
    asked = {at(fleet, name) for number in range(num_behind) for name in leaving(run(fleet, Ticked(), now=1.0 + number / 4))}
    assert asked == set(behind)


def test_the_next_long_prompts_go_there_too_until_another_replica_costs_less() -> None:
    fleet = fleet_apart("a", "b")
    run(fleet, arrived("long-0", prompt_tokens=LONG))
    assert set(answers(fleet, *map(str, range(50)), max_tokens=100)) == {"b"}
    for number in range(1, 4):
        run(fleet, arrived(f"long-{number}", prompt_tokens=LONG))
    places = [at(fleet, f"long-{number}") for number in range(4)]
    assert places == ["a", "a", "b", "a"], "at b, fifty answers have to make way; so the first prompt waits, not the second"


@pytest.mark.parametrize("unmeasured", [False, True])
def test_short_prompts_and_prompts_of_unknown_cost_go_by_load_and_nothing_moves(unmeasured: bool) -> None:
    fleet = fleet_apart("a", "b", costs=None if unmeasured else COSTS)
    answers(fleet, *"1234")
    assert leaving(run(fleet, arrived("r", prompt_tokens=LONG if unmeasured else SHORT))) == []
    assert dict(fleet.routed) == {"load": 5}


def test_a_long_prompt_of_which_most_is_cached_goes_to_its_cache() -> None:
    fleet = fleet_apart("a", "b", routing=PrefixAffinity())
    points = list(range(1, LONG // 16))

    def turn(name: str) -> RequestArrived:
        return replace(arrived(name, prompt_tokens=LONG, max_tokens=500), prefix=Prefix(points, 16))

    run(fleet, turn("first"))
    where = at(fleet, "first")
    first_token(fleet, "first")
    answers(fleet, *"12345")
    run(fleet, Ticked(), now=WINDOW_S + 1)
    assert leaving(run(fleet, turn("second"), now=WINDOW_S + 1)) == []
    assert (at(fleet, "second"), fleet.routed["prompt"]) == (where, 0)


def test_short_requests_keep_off_a_replica_that_got_long_prompts_until_none_come() -> None:
    fleet = fleet_apart("a", "b")
    run(fleet, arrived("long", prompt_tokens=LONG))
    (busy,) = {at(fleet, "long")}
    first_token(fleet, "long")
    assert busy not in answers(fleet, *"12345")
    run(fleet, Ticked(), now=WINDOW_S + 0.1)
    assert fleet.replicas[busy].long_tokens == 0
    assert busy in answers(fleet, *"67", now=WINDOW_S + 0.1)


def test_the_answer_to_a_long_prompt_moves_if_more_such_prompts_come_to_its_replica() -> None:
    fleet = fleet_apart("a", "b")
    run(fleet, arrived("long-1", prompt_tokens=LONG))
    answers(fleet, *map(str, range(50)), max_tokens=100)
    run(fleet, arrived("long-2", prompt_tokens=LONG))
    assert at(fleet, "long-1") == at(fleet, "long-2")
    instructions = first_token(fleet, "long-1")
    assert leaving(instructions) == ["long-1"], "its first token has come, and the next prompt would stop it"


def test_the_answer_to_a_long_prompt_stays_if_its_replica_has_no_other() -> None:
    fleet = fleet_apart("a")
    run(fleet, arrived("long", prompt_tokens=LONG))
    assert leaving(first_token(fleet, "long")) == []


@pytest.mark.parametrize("resume", [Resume.REPLAY, Resume.NEVER, Resume.RESTART])
def test_an_answer_that_cannot_take_its_kv_along_stays(resume: Resume) -> None:
    fleet = fleet_apart("a", "b")
    run(fleet, arrived("r", resume, prompt_tokens=SHORT, max_tokens=500))
    first_token(fleet, "r")
    answers(fleet, "other")
    assert "r" not in leaving(run(fleet, arrived("long", prompt_tokens=LONG)))


def test_a_moved_answer_stays_for_some_seconds() -> None:
    fleet = fleet_apart("a", "b")
    answers(fleet, "1", prompt=3000)
    run(fleet, Ticked(), now=WINDOW_S + 1)
    assert leave_full_engines(fleet, 12.0) == ["1"]
    hand_over(fleet, "1", now=12.0)
    first_token(fleet, "1", now=12.1)
    assert leave_full_engines(fleet, 12.0 + MIN_STAY_S - 0.1) == []
    assert leave_full_engines(fleet, 12.0 + MIN_STAY_S + 0.1) == ["1"]


def test_answers_move_within_the_budget_and_no_faster() -> None:
    fleet = fleet_apart(*"abcdefghijklmnopqrst")
    names = [str(number) for number in range(20 * 3)]
    answers(fleet, *names)
    asked = 0
    for number in range(30):
        asked += len(leaving(run(fleet, arrived(f"long-{number}", prompt_tokens=LONG))))
    assert asked <= MAX_MOVES
    assert fleet.hand_overs.asked.total() == MAX_MOVES
    run(fleet, Ticked(), now=0.5)
    assert fleet.hand_overs.asked.total() <= MAX_MOVES + MOVES_PER_S * 0.5


def test_slow_reads_keep_answers_where_they_are() -> None:
    fleet = uneven()
    for number in range(20):
        fleet.hand_overs.costs.learn(SHORT, 3.0, number)
    assert leaving(run(fleet, arrived("long", prompt_tokens=LONG))) == []


def test_answers_go_to_a_new_replica_where_large_batches_are_slow() -> None:
    for token_s, moves in ((1e-6, False), (2e-3, True)):
        fleet = fleet_apart("a", costs=replace(COSTS, output_token_s=token_s))
        answers(fleet, *map(str, range(20)))
        run(fleet, linked("b"))
        asked = leaving(run(fleet, Ticked(), now=1.0))
        assert bool(asked) is moves
        assert fleet.hand_overs.asked["balance"] == len(asked) <= 4, "the target first shows that it can read"


def test_a_replica_keeps_its_part_of_the_answers_however_many_others_there_are() -> None:
    fleet = fleet_apart("a", costs=replace(COSTS, output_token_s=2e-3))
    answers(fleet, *map(str, range(20)))
    run(fleet, *map(linked, "bcdefghi"))
    for number, replica_id in enumerate("bcdefghi"):
        run(fleet, HeartbeatArrived(replica_id, EngineLoad(1, 10 + (number == 0), 0, 0.1), draining=False))
    asked = leaving(run(fleet, Ticked(), now=1.0))
    assert 1 <= len(asked) <= 9


def test_answers_that_come_take_room_in_the_cache() -> None:
    fleet = fleet_apart("a")
    answers(fleet, *"12345678", prompt=9000)
    run(fleet, linked("b"))
    run(fleet, beat("a", 0.95), beat("b", 0.69), now=1.0)
    assert len(leaving(run(fleet, Ticked(), now=1.0))) == 2, "with three, b would be nearly full, too"


def test_a_full_cache_is_seen_though_others_have_more_answers() -> None:
    fleet = fleet_apart("a", "b")
    answers(fleet, "1", prompt=3000)
    run(fleet, Ticked(), now=WINDOW_S + 1)
    run(fleet, linked("c"), now=WINDOW_S + 1)
    answers(fleet, *"23456789", now=WINDOW_S + 1)
    run(fleet, beat("a", 0.97), beat("b", 0.3), beat("c", 0.3), now=13.0)
    assert "1" in leaving(run(fleet, Ticked(), now=13.0))


def test_first_tokens_of_short_prompts_move_nothing() -> None:
    fleet = fleet_apart("a", "b")
    for number in range(16):
        run(fleet, arrived(str(number), prompt_tokens=SHORT, max_tokens=500))
    for replica_id in "ba":
        for name in [name for name, request in fleet.requests.items() if request.replica_id == replica_id]:
            assert leaving(first_token(fleet, name)) == []


def test_an_answer_leaves_an_engine_whose_cache_is_nearly_full_unless_all_are() -> None:
    fleet = fleet_apart("a", "b")
    assert answers(fleet, "1", prompt=3000) == ["a"]
    run(fleet, Ticked(), now=WINDOW_S + 1)
    for in_b, moved in ((0.95, []), (0.5, ["1"])):
        run(fleet, beat("a", 0.95), beat("b", in_b), now=12.0)
        assert leaving(run(fleet, Ticked(), now=12.0)) == moved


def test_nothing_moves_to_a_replica_that_reads_no_kv_of_the_source() -> None:
    fleet = fleet_apart("a")
    answers(fleet, *"12")
    run(fleet, linked("b", kv_transfer="other"), linked("c", kv_transfer=""))
    instructions = run(fleet, arrived("long", prompt_tokens=LONG))
    assert leaving(instructions) == []
    assert at(fleet, "long") in "bc"

"""Long prompts go to the replicas of one pool, and their answers move to the other; each pool does the other's work where it has to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from serve_app.core.affinity import PrefixAffinity
from serve_app.core.apart import MAX_MOVES
from serve_app.core.events import HeartbeatArrived, LinkEnd, LinkLost, PoolsPlanned, StepCostsMeasured, Ticked
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_report import describe
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.hand_over import HANDED_OVER
from serve_app.core.instructions import StartAttempt
from serve_app.core.load import EngineLoad
from serve_app.core.pool_sizes import PoolSizes
from serve_app.core.prefix_index import Prefix
from serve_app.core.request import Resume
from serve_app.core.routing import RoutingPolicy
from tests.core.apart_fleet import COSTS, LONG, SHORT, answers, at, first_token, leaving, linked
from tests.core.helpers import Output, arrived, outputs, run

ONE_AND_MORE = PoolSizes(1, 3, 1, 9)


def pooled(
    replica_ids: Sequence[str],
    sizes: PoolSizes = ONE_AND_MORE,
    *,
    is_measured: bool = True,
    routing: RoutingPolicy | None = None,
) -> FleetState:
    fleet = FleetState(FleetSettings(model="tiny", heartbeat_timeout_s=1000.0, ttft_s=5.0, pools=sizes), routing)
    run(fleet, *map(linked, replica_ids))
    if is_measured:
        run(fleet, StepCostsMeasured(COSTS))
    return fleet


def draining(replica_id: str, *, left_s: float = 1000.0) -> HeartbeatArrived:
    return HeartbeatArrived(replica_id, EngineLoad(1, 0, 0, 0.0), draining=True, drain_left_s=left_s)


def long_prompts(fleet: FleetState, *names: str, now: float = 0.0) -> list[str]:
    """Let long prompts arrive; return their replicas."""
    for name in names:
        run(fleet, arrived(name, prompt_tokens=LONG, max_tokens=500), now=now)
    return [at(fleet, name) for name in names]


@pytest.mark.parametrize(
    ("num_replicas", "share", "num_prefill"),
    [
        (0, None, 0),
        (1, 0.9, 0),
        (2, None, 1),
        (4, None, 2),
        (6, None, 2),
        (6, 0.5, 3),
        (6, 0.9, 3),
        (6, 0.0, 2),
        (12, 0.1, 3),
        (3, None, 2),
    ],
)
def test_the_bounds_decide_before_the_share_and_two_replicas_have_both_roles(
    num_replicas: int, share: float | None, num_prefill: int
) -> None:
    assert PoolSizes(2, 3, 1, 9).num_prefill(num_replicas, share) == num_prefill


def test_a_pool_of_which_replicas_are_missing_misses_no_more_than_its_part() -> None:
    assert [PoolSizes(2, 2, 4, 4).num_prefill(n) for n in range(1, 7)] == [0, 1, 1, 1, 2, 2]


def test_long_prompts_go_to_one_pool_and_short_ones_to_the_other() -> None:
    fleet = pooled("abcd", PoolSizes(2, 2, 1, 9))
    assert Counter(long_prompts(fleet, "l1", "l2", "l3", "l4")) == {"a": 2, "b": 2}
    assert set(answers(fleet, *map(str, range(8)))) == {"c", "d"}
    assert dict(fleet.routed) == {"prompt": 4, "load": 8}
    assert describe(fleet)["prefill"] == ["a", "b"]


def test_an_answer_moves_with_its_kv_after_its_first_token_to_the_replica_with_the_fewest_requests() -> None:
    fleet = pooled("abc")
    answers(fleet, "1")
    busy = at(fleet, "1")
    long_prompts(fleet, "long")
    assert leaving(first_token(fleet, "long")) == ["long"]
    last = Output("long@0", [], "length", stop_reason=HANDED_OVER, kv_transfer_params={"blocks": [1]})
    (started,) = [each for each in run(fleet, outputs("a", last)) if isinstance(each, StartAttempt)]
    assert started.kv == {"blocks": [1]}
    assert {started.replica_id} == {"b", "c"} - {busy}
    assert dict(fleet.hand_overs.asked) == {"role": 1}


def test_an_answer_that_ends_before_its_kv_was_read_stays() -> None:
    fleet = pooled("ab")
    run(fleet, arrived("long", prompt_tokens=LONG, max_tokens=2))
    assert leaving(first_token(fleet, "long")) == []


@pytest.mark.parametrize("resume", [Resume.REPLAY, Resume.NEVER, Resume.RESTART])
def test_an_answer_that_cannot_take_its_kv_along_stays(resume: Resume) -> None:
    fleet = pooled("ab")
    run(fleet, arrived("long", resume, prompt_tokens=LONG, max_tokens=500))
    assert leaving(first_token(fleet, "long")) == []


def test_before_anything_is_measured_requests_go_where_answers_are_made() -> None:
    fleet = pooled("abc", is_measured=False)
    assert set(long_prompts(fleet, "l1", "l2", "l3")) == {"b", "c"}


def test_a_prompt_of_which_most_is_cached_where_answers_are_made_goes_there() -> None:
    fleet = pooled("abc", routing=PrefixAffinity())
    turn = replace(arrived("first", prompt_tokens=LONG, max_tokens=500), prefix=Prefix(list(range(1, LONG // 16)), 16))
    run(fleet, turn)
    assert at(fleet, "first") == "a"
    first_token(fleet, "first")
    run(fleet, outputs("a", Output("first@0", [], "length", stop_reason=HANDED_OVER, kv_transfer_params={"blocks": [1]})))
    where = at(fleet, "first")
    assert where in "bc"
    run(fleet, replace(turn, request_id="second", fingerprint="second"))
    assert at(fleet, "second") == where


def test_a_prompt_that_would_wait_too_long_goes_to_the_other_pool() -> None:
    fleet = pooled("abc")
    places = long_prompts(fleet, *(f"l{number}" for number in range(5)))
    assert places[:3] == ["a"] * 3, "8,000 tokens take 2.4 s, and the third one waits 4.8 s"
    assert set(places[3:]) == {"b", "c"}


@pytest.mark.parametrize("end", list(LinkEnd))
def test_the_next_replica_takes_the_role_of_one_that_is_lost_and_its_answers_leave(end: LinkEnd) -> None:
    fleet = pooled("abc")
    answers(fleet, *"1234")
    moving = [name for name in "1234" if at(fleet, name) == "b"]
    assert moving
    run(fleet, LinkLost("a", end))
    assert long_prompts(fleet, "long") == ["b"]
    assert {*leaving(run(fleet, Ticked(), now=1.0)), *(r for r in fleet.requests if fleet.requests[r].is_leaving)} == set(moving)


@pytest.mark.parametrize(("gone", "left"), [("bc", "a"), ("ab", "c")])
def test_the_last_replica_does_both(gone: str, left: str) -> None:
    fleet = pooled("abc")
    run(fleet, *map(draining, gone))
    assert long_prompts(fleet, "long") == [left]
    assert answers(fleet, "1", "2") == [left, left]
    assert leaving(first_token(fleet, "long")) == []


def test_without_room_in_one_pool_the_other_does_its_work() -> None:
    fleet = pooled("ab")
    where = answers(fleet, *map(str, range(70)))
    assert where == ["b"] * 64 + ["a"] * 6, "b takes 64 requests"
    assert long_prompts(fleet, "long") == ["a"]


def test_a_drained_answer_goes_where_answers_are_made_though_it_is_long() -> None:
    fleet = pooled("abcd")
    run(fleet, arrived("r", prompt_tokens=LONG, max_tokens=5000))
    first_token(fleet, "r")
    run(fleet, outputs("a", Output("r@0", [], "length", stop_reason=HANDED_OVER, kv_transfer_params={"blocks": [1]})))
    first_token(fleet, "r", now=0.5)
    source = at(fleet, "r")
    run(fleet, draining(source, left_s=2.0), now=1.0)
    assert leaving(run(fleet, Ticked(), now=2.9)) == ["r"]
    (target,) = [each.replica_id for each in fleet.replicas.values() if "r" in each.coming]
    assert target in set("bcd") - {source}


def test_the_autoscalers_share_changes_roles_within_the_bounds_and_answers_leave_within_the_budget() -> None:
    fleet = pooled("abcdefgh", PoolSizes(1, 3, 1, 9))
    answers(fleet, *map(str, range(140)))
    run(fleet, PoolsPlanned(0.25))
    assert set(long_prompts(fleet, "l1", "l2", "l3")) == {"a", "b"}
    run(fleet, PoolsPlanned(0.9))
    assert set(long_prompts(fleet, "l4", "l5", "l6", "l7")) >= {"c"}
    run(fleet, Ticked(), now=0.1)
    assert 0 < fleet.hand_overs.asked.total() <= MAX_MOVES
    fleet.validate()


def test_a_replica_without_kv_to_move_has_no_role() -> None:
    fleet = pooled("bc")
    run(fleet, linked("a", kv_transfer=""))
    assert long_prompts(fleet, "long") == ["b"]


def test_prompts_that_wait_leave_for_an_idle_replica_of_their_pool() -> None:
    fleet = pooled("bcd", PoolSizes(2, 2, 1, 9))
    run(fleet, draining("c"))
    run(fleet, draining("d"))
    assert long_prompts(fleet, "l1", "l2", "l3") == ["b"] * 3
    run(fleet, HeartbeatArrived("b", EngineLoad(1, 1, 2, 0.1), draining=False))
    run(fleet, linked("a"))
    assert Counter(at(fleet, name) for name in ("l1", "l2", "l3"))["a"] >= 1


def test_short_requests_that_wait_leave_only_for_a_new_replica_of_their_pool() -> None:
    fleet = pooled("bc")
    for name in ("s1", "s2", "s3"):
        run(fleet, arrived(name, prompt_tokens=SHORT, max_tokens=500))
    run(fleet, HeartbeatArrived("c", EngineLoad(1, 1, 2, 0.1), draining=False))
    run(fleet, linked("d"))
    first = Counter(at(fleet, name) for name in ("s1", "s2", "s3"))
    assert first["d"] >= 1, "d makes answers"
    fleet = pooled("bc", PoolSizes(2, 3, 1, 9))
    for name in ("s1", "s2", "s3"):
        run(fleet, arrived(name, prompt_tokens=SHORT, max_tokens=500))
    run(fleet, HeartbeatArrived("c", EngineLoad(1, 1, 2, 0.1), draining=False))
    attempts = [fleet.requests[name].attempt_id for name in ("s1", "s2", "s3")]
    run(fleet, linked("a"))
    assert describe(fleet)["prefill"] == ["a", "b"]
    assert [fleet.requests[name].attempt_id for name in ("s1", "s2", "s3")] == attempts


@pytest.mark.parametrize(("usage", "target"), [(0.2, "b"), (0.85, "c"), (0.95, "c")])
def test_an_answer_moves_only_to_a_replica_with_room_for_its_kv(usage: float, target: str) -> None:
    fleet = pooled("abc")
    answers(fleet, "1")
    assert at(fleet, "1") == "b"
    answers(fleet, "2", "3")
    run(fleet, HeartbeatArrived("b", EngineLoad(1, 1, 0, usage), draining=False))
    run(fleet, HeartbeatArrived("c", EngineLoad(1, 9, 0, 0.2), draining=False))
    long_prompts(fleet, "long")
    assert leaving(first_token(fleet, "long")) == ["long"]
    assert [each.replica_id for each in fleet.replicas.values() if each.coming] == [target]


def test_prompts_of_other_ingresses_that_wait_count_for_the_choice_and_the_longest_wait() -> None:
    fleet = pooled("abcd", PoolSizes(2, 2, 1, 9))
    run(fleet, HeartbeatArrived("a", EngineLoad(1, 1, 1, 0.1), draining=False))
    assert long_prompts(fleet, "l1") == ["b"]
    fleet = pooled("ab")
    run(fleet, HeartbeatArrived("a", EngineLoad(1, 1, 3, 0.1), draining=False))
    assert long_prompts(fleet, "l1") == ["b"], "three prompts of 2.4 s wait at a, and 5 s is the longest wait"


def test_long_prompts_are_counted_apart() -> None:
    fleet = pooled("ab")
    long_prompts(fleet, "long")
    first_token(fleet, "long")
    answers(fleet, "1")
    counted = fleet.tally
    assert (counted.long_prompts, counted.long_prompt_tokens, counted.prefilled_tokens) == (1, LONG, LONG + SHORT)

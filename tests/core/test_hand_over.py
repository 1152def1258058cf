"""A draining replica hands its streams over with their KV, and whatever fails there ends in a resume."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from serve_app.core.events import HeartbeatArrived, LinkEnd, LinkLost, LinkOpened, RequestsAborted, Ticked
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.hand_over import ANSWER_S, HANDED_OVER, KEPT_S, READ_S
from serve_app.core.instructions import AbortAttempts, DeliverOutputs, FreeKeptKv, HandOverAttempt, Instruction, StartAttempt
from serve_app.core.load import EngineLoad
from serve_app.core.read_costs import MIN_TOKENS, ReadCosts
from serve_app.core.request import Resume
from serve_app.core.trail import WITHOUT_KV, Move
from tests.core.helpers import Output, arrived, outputs, run, start
from tests.core.test_drain import draining

ASKED_AT = 7.0
WHERE = {"remote_block_ids": [[1, 2]]}
FREED = FreeKeptKv("a", "r@0")
TOKEN_BYTES = 1000


def linked(replica_id: str, *, kv_transfer: str = "nixl", credit: int = 8, weights: str = "w") -> LinkOpened:
    return LinkOpened(replica_id, credit, weights=weights, kv_transfer=kv_transfer, kv_token_bytes=TOKEN_BYTES)


def fleet_with(*links: LinkOpened, resume: Resume = Resume.CONTINUE, prompt_tokens: int = MIN_TOKENS) -> FleetState:
    """Return a fleet whose first replica drains for 8 s from 0 on and streams "r", of which one token came."""
    fleet = FleetState(FleetSettings(model="tiny", heartbeat_timeout_s=1000.0))
    run(fleet, links[0], arrived("r", resume, prompt_tokens=prompt_tokens, max_tokens=9), outputs("a", Output("r@0", [7])))
    run(fleet, *links[1:], draining("a", 8.0))
    return fleet


def handed(kv: object | None = WHERE, tokens: tuple[int, ...] = ()) -> Output:
    return Output("r@0", [*tokens], "length", stop_reason=HANDED_OVER, kv_transfer_params=kv)


def asked(fleet: FleetState) -> FleetState:
    assert run(fleet, Ticked(), now=ASKED_AT) == [HandOverAttempt("a", "r@0")]
    return fleet


def moved(attempt: int = 1, *, emitted: tuple[int, ...] = (7,), kv: object | None = WHERE) -> StartAttempt:
    return replace(start("r", attempt, "b", prefix=emitted, emitted=len(emitted)), kv=kv)


def test_a_stream_goes_on_with_its_kv_after_all_tokens_that_came_meanwhile() -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    more = Output("r@0", [8])
    assert run(fleet, outputs("a", more), now=7.1) == [DeliverOutputs([more])]
    last = handed(tokens=(9,))
    assert run(fleet, outputs("a", last), now=7.2) == [DeliverOutputs([last]), moved(emitted=(7, 8, 9))]
    assert (last.finish_reason, last.stop_reason) == (None, None), "the answer goes on"
    assert fleet.replicas["b"].outstanding_tokens == 6, "the prompt is not computed again"
    read = Output("r@1", [10], prefill_stats=SimpleNamespace(num_external_cached_tokens=300, num_cached_tokens=0))
    assert run(fleet, outputs("b", read), now=7.3) == [DeliverOutputs([read]), FREED]
    assert fleet.requests["r"].emitted_ids == [7, 8, 9, 10]
    assert (dict(fleet.hand_overs.results), fleet.hand_overs.tokens, fleet.drains.num_moved) == ({"read": 1}, 300, 1)
    assert fleet.hand_overs.num_bytes == 300 * TOKEN_BYTES
    saves_s, read_s = (MIN_TOKENS + 1) * fleet.order.costs.prompt_token_s, ReadCosts().seconds(MIN_TOKENS + 1)
    assert fleet.requests["r"].trail.moves == [Move(0, ASKED_AT, "drain", saves_s, read_s, "read", 300)]
    assert fleet.requests["r"].trail.routes[1].saves_s == 0.0, "the choice of the replica was one by load"


def test_a_target_that_read_nothing_is_counted_and_the_kv_is_freed() -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    run(fleet, outputs("a", handed()), now=7.2)
    token = Output("r@1", [8])
    assert run(fleet, outputs("b", token), now=7.2) == [DeliverOutputs([token]), FREED]
    assert (dict(fleet.hand_overs.results), fleet.hand_overs.tokens, fleet.hand_overs.num_bytes) == ({"computed": 1}, 0, 0)


@pytest.mark.parametrize(
    ("end", "is_freed"),
    [
        (LinkEnd.ENGINE_DIED, True),
        (LinkEnd.ENGINE_STOPPED, True),
        (LinkEnd.BROKE_OFF, False),
        (LinkEnd.UNRESPONSIVE, False),
        (LinkEnd.SAID_GOODBYE, False),
    ],
)
def test_kv_is_freed_when_the_engine_that_was_to_read_it_has_ended_and_not_when_it_may_still_read(
    end: LinkEnd, is_freed: bool
) -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    run(fleet, outputs("a", handed()), now=7.2)
    assert (FREED in run(fleet, LinkLost("b", end), now=7.3)) is is_freed
    assert FREED not in run(fleet, linked("b"), LinkLost("b", end), now=7.4)


@pytest.mark.parametrize(("after_s", "is_freed"), [(KEPT_S - 1.0, True), (KEPT_S + 1.0, False)])
def test_kv_of_a_read_that_was_given_up_is_freed_when_its_target_dies_unless_its_lease_is_over(
    after_s: float, is_freed: bool
) -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    run(fleet, outputs("a", handed()), RequestsAborted(["r"]), now=7.2)
    run(fleet, Ticked(), now=7.2 + after_s)
    assert (FREED in run(fleet, LinkLost("b", LinkEnd.ENGINE_DIED), now=7.2 + after_s)) is is_freed


def test_no_kv_is_freed_at_a_source_that_is_gone() -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    run(fleet, outputs("a", handed()), LinkLost("a", LinkEnd.SAID_GOODBYE), now=7.2)
    token = Output("r@1", [8])
    assert run(fleet, outputs("b", token), now=7.3) == [DeliverOutputs([token])]


@pytest.mark.parametrize(
    ("source", "target", "resume", "prompt_tokens"),
    [
        (linked("a", kv_transfer=""), linked("b"), Resume.CONTINUE, MIN_TOKENS),
        (linked("a"), linked("b", kv_transfer=""), Resume.CONTINUE, MIN_TOKENS),
        (linked("a"), linked("b", kv_transfer="other"), Resume.CONTINUE, MIN_TOKENS),
        (linked("a"), linked("b"), Resume.REPLAY, MIN_TOKENS),
        (linked("a"), linked("b"), Resume.CONTINUE, 2),
    ],
    ids=["source cannot", "target cannot", "they do not fit", "a replay", "too short"],
)
def test_a_stream_moves_without_its_kv_where_a_read_is_not_possible_or_not_worth_it(
    source: LinkOpened, target: LinkOpened, resume: Resume, prompt_tokens: int
) -> None:
    fleet = fleet_with(source, target, resume=resume, prompt_tokens=prompt_tokens)
    aborted, started = run(fleet, Ticked(), now=ASKED_AT)
    assert aborted == AbortAttempts("a", ("r@0",))
    assert isinstance(started, StartAttempt)
    assert started.kv is None
    assert fleet.requests["r"].trail.moves == [Move(0, ASKED_AT, "drain", 0.0, None, WITHOUT_KV)]


def test_a_source_that_has_no_whole_kv_lets_the_target_compute_it() -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    assert run(fleet, outputs("a", handed(None)), now=7.2) == [moved(kv=None)]
    assert dict(fleet.hand_overs.results) == {"not_kept": 1}


def test_a_source_that_does_not_answer_is_not_waited_for() -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    assert run(fleet, Ticked(), now=ASKED_AT + ANSWER_S) == []
    assert run(fleet, Ticked(), now=9.01) == [AbortAttempts("a", ("r@0",)), moved(kv=None)]
    assert run(fleet, outputs("a", handed()), now=9.02) == [FREED], "too late"
    assert dict(fleet.hand_overs.results) == {"unanswered": 1}


def lost(replica_id: str) -> LinkLost:
    return LinkLost(replica_id, LinkEnd.BROKE_OFF)


def test_a_source_that_is_lost_or_says_goodbye_meanwhile_is_a_loss_as_ever() -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    (started,) = run(fleet, LinkLost("a", LinkEnd.SAID_GOODBYE), now=7.1)
    assert started == moved(kv=None)
    assert dict(fleet.hand_overs.results) == {"ended": 1}


@pytest.mark.parametrize(
    "gone", [[lost("b")], [lost("b"), linked("b")], [draining("b", 9.0)]], ids=["lost", "linked again", "draining"]
)
def test_a_target_that_is_gone_leaves_the_stream_to_another_replica(gone: list[LinkOpened | LinkLost | HeartbeatArrived]) -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    run(fleet, *gone, linked("c"), now=7.1)
    freed, started = run(fleet, outputs("a", handed()), now=7.2)
    assert freed == FREED
    assert isinstance(started, StartAttempt)
    assert (started.replica_id in "bc", started.kv) == (True, None)
    assert dict(fleet.hand_overs.results) == {"no_target": 1}


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("is_reading", [False, True])
def test_a_source_and_a_target_that_are_both_lost_leave_the_stream_to_a_third_replica(first: str, is_reading: bool) -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    if is_reading:
        assert run(fleet, outputs("a", handed()), now=7.1) == [moved()]
    second = "b" if first == "a" else "a"
    ends = run(fleet, LinkLost(first, LinkEnd.SAID_GOODBYE), LinkLost(second, LinkEnd.SAID_GOODBYE), now=7.2)
    assert not any(isinstance(i, FreeKeptKv | HandOverAttempt) for i in ends)
    (started,) = run(fleet, linked("c"), now=7.3)
    attempt = fleet.requests["r"].attempt
    assert started == replace(start("r", attempt, "c", prefix=(7,), emitted=1), kv=None)
    last = Output(f"r@{attempt}", [8], "stop")
    assert run(fleet, outputs("c", last), now=7.4) == [DeliverOutputs([last])]
    assert dict(fleet.hand_overs.results) == {"ended": 1}
    assert dict(fleet.outcomes) == {"complete": 1}


def test_a_client_that_leaves_between_the_phases_leaves_nothing_behind() -> None:
    for events in ([], [outputs("a", handed())]):
        fleet = asked(fleet_with(linked("a"), linked("b")))
        aborts = run(fleet, *events, RequestsAborted(["r"]), now=7.1)
        assert [type(i) for i in aborts] == [AbortAttempts]
        assert not fleet.requests
        assert not fleet.replicas["b"].coming
        assert run(fleet, outputs("a", handed()), now=7.2) == [FREED], "its answer came too late"


def test_kv_is_freed_by_a_token_that_crosses_the_abort_of_its_request() -> None:
    fleet = asked(fleet_with(linked("a"), linked("b"), linked("c")))
    run(fleet, outputs("a", handed()), RequestsAborted(["r"]), now=7.2)
    assert run(fleet, outputs("c", Output("r@1", [8])), now=7.3) == [], "no reader of it"
    assert run(fleet, outputs("b", Output("r@1", [])), now=7.3) == [], "it may read still"
    assert run(fleet, outputs("b", Output("r@1", [8])), now=7.3) == [FREED]
    assert run(fleet, outputs("b", Output("r@1", [9])), now=7.4) == []


def test_an_answer_that_ends_first_has_ended() -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    last = Output("r@0", [8], "stop")
    assert run(fleet, outputs("a", last), now=7.1) == [DeliverOutputs([last])]
    assert dict(fleet.outcomes) == {"complete": 1}
    assert not fleet.replicas["b"].coming


def test_a_place_is_kept_at_the_target() -> None:
    fleet = asked(fleet_with(linked("a"), linked("b", credit=1)))
    assert run(fleet, arrived("other"), now=7.1) == []
    assert run(fleet, outputs("a", handed()), now=7.2) == [moved()]
    instructions: list[Instruction] = run(fleet, outputs("b", Output("r@1", [8], "stop")), now=7.3)
    assert instructions[1:] == [FREED, start("other", 0, "b")]


def test_hand_overs_under_way_count_in_the_limit_of_moves() -> None:
    fleet = FleetState(FleetSettings(model="tiny", heartbeat_timeout_s=1000.0))
    run(fleet, linked("a", credit=20))
    for i in range(9):
        request = arrived(f"r{i}", prompt_tokens=MIN_TOKENS, max_tokens=9)
        run(fleet, request, outputs("a", Output(f"r{i}@0", [7])))
    run(fleet, linked("b", credit=20), HeartbeatArrived("b", EngineLoad(1), draining=False), draining("a", 8.0))
    assert len(run(fleet, Ticked(), now=6.9)) == 4
    assert run(fleet, Ticked(), now=6.9) == []


def test_a_replica_that_hands_over_what_nobody_asked_for_loses_the_attempt_alone() -> None:
    fleet = fleet_with(linked("a"), linked("b"))
    assert run(fleet, outputs("a", handed()), now=1.0) == [FREED, moved(kv=None)]


def test_a_target_that_makes_no_token_in_time_is_not_waited_for() -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    run(fleet, outputs("a", handed()), LinkLost("a", LinkEnd.SAID_GOODBYE), now=7.2)
    assert run(fleet, Ticked(), now=7.2 + READ_S) == []
    assert run(fleet, Ticked(), now=17.3) == [AbortAttempts("b", ("r@1",)), moved(2, kv=None)]
    assert run(fleet, outputs("b", Output("r@1", [9])), now=17.4) == [], "too late"
    run(fleet, outputs("b", Output("r@2", [8], prefill_stats=SimpleNamespace(num_external_cached_tokens=0))), now=17.5)
    assert dict(fleet.hand_overs.results) == {"late": 1}


def test_a_stalled_target_that_drains_meanwhile_ends_its_attempt_once() -> None:
    fleet = asked(fleet_with(linked("a"), linked("b")))
    run(fleet, outputs("a", handed()), LinkLost("a", LinkEnd.SAID_GOODBYE), linked("c"), draining("b", 0.1), now=7.2)
    assert run(fleet, Ticked(), now=7.3) == [HandOverAttempt("b", "r@1")], "b reads still"
    aborted, started = run(fleet, Ticked(), now=7.3 + READ_S)
    assert aborted == AbortAttempts("b", ("r@1",))
    assert started == replace(moved(2, kv=None), replica_id="c")
    moves = [(move.attempt, move.cause, move.result) for move in fleet.requests["r"].trail.moves]
    assert moves == [(0, "drain", "ended"), (1, "drain", "unanswered")]
    assert dict(fleet.hand_overs.results) == {"ended": 1, "unanswered": 1}


def test_reads_of_one_source_that_end_together_are_learned_as_parts_of_their_time() -> None:
    fleet = FleetState(FleetSettings(model="tiny", heartbeat_timeout_s=1000.0))
    run(fleet, linked("a", credit=20))
    for i in range(4):
        run(fleet, arrived(f"r{i}", prompt_tokens=MIN_TOKENS, max_tokens=9), outputs("a", Output(f"r{i}@0", [7])))
    run(fleet, linked("b", credit=20), HeartbeatArrived("b", EngineLoad(1), draining=False), draining("a", 8.0))
    assert len(run(fleet, Ticked(), now=7.2)) == 4
    ends = [Output(f"r{i}@0", [], "length", stop_reason=HANDED_OVER, kv_transfer_params=WHERE) for i in range(4)]
    run(fleet, outputs("a", *ends), now=7.3)
    expected = fleet.hand_overs.costs.seconds(MIN_TOKENS)
    stats = SimpleNamespace(num_external_cached_tokens=MIN_TOKENS, num_cached_tokens=0)
    run(fleet, outputs("b", *(Output(f"r{i}@1", [8], prefill_stats=stats) for i in range(4))), now=9.3)
    run(fleet, Ticked(), now=9.4)
    assert expected < fleet.hand_overs.costs.seconds(MIN_TOKENS) < 0.5, "0.5 s is the time of each, 2 s that of all"


def test_a_read_ends_with_its_request() -> None:
    for end in (RequestsAborted(["r"]), LinkLost("b", LinkEnd.BROKE_OFF), outputs("b", Output("r@1", [], "abort"))):
        fleet = asked(fleet_with(linked("a"), linked("b")))
        run(fleet, outputs("a", handed()), end, now=7.2)
        assert dict(fleet.hand_overs.results) == {"ended": 1}
        assert run(fleet, Ticked(), now=7.2 + 2 * READ_S) == []

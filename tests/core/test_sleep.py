import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve_app.core.places import Applicant, Places
from serve_app.core.sleep import (
    ASKED_S,
    MIN_DRAIN_S,
    Asked,
    Claim,
    EngineChanged,
    Instruction,
    Looked,
    Order,
    Ordered,
    Phase,
    Sleep,
)
from tests.core.sleep_world import DRAIN_S, EXPIRY_S, TURN_S, SleepWorld

AFTER_S = 30.0


def starting(now: float = 0.0) -> Sleep:
    return Sleep(AFTER_S, drain_s=DRAIN_S, expiry_s=EXPIRY_S, now=now)


def awake() -> Sleep:
    sleep = starting()
    assert sleep.handle(Ordered(Order(may_hold=True)), now=0.0) == []
    assert sleep.handle(EngineChanged(), now=0.0) == []
    return sleep


def falling_asleep() -> Sleep:
    sleep = awake()
    sleep.handle(Ordered(Order(may_hold=True)), now=AFTER_S - 1)
    assert sleep.handle(Looked(0), now=AFTER_S) == [Instruction.START_DRAIN]
    assert sleep.handle(Looked(0), now=AFTER_S + 0.5) == [Instruction.PUT_TO_SLEEP]
    return sleep


def asleep() -> Sleep:
    """Return a replica that fell asleep at second 31.5, within one second."""
    sleep = falling_asleep()
    assert sleep.handle(EngineChanged(), now=AFTER_S + 1.5) == []
    return sleep


def test_a_replica_does_not_start_its_engine_before_it_may_hold_its_gpu() -> None:
    sleep = starting()
    assert sleep.claim(0.0) == Claim(holds=False, wants=True)
    sleep.handle(Ordered(Order(may_hold=True)), now=1.0)
    assert sleep.claim(1.0) == Claim(holds=True, busy=True)


def test_an_idle_replica_falls_asleep_and_gives_its_gpu_up() -> None:
    sleep = asleep()
    assert (sleep.phase, sleep.sleep_s, sleep.claim(40.0)) == (Phase.ASLEEP, 1.0, Claim(holds=False, change_s=2.0))


def test_a_request_wakes_a_replica_only_once_it_has_the_gpu() -> None:
    sleep = asleep()
    assert sleep.handle(Asked(), now=50.0) == []
    assert sleep.claim(50.0) == Claim(holds=False, wants=True, change_s=2.0)
    assert sleep.handle(Ordered(Order(may_hold=True)), now=50.1) == [Instruction.WAKE_UP]
    assert sleep.claim(50.1) == Claim(holds=True, busy=True, change_s=2.0)
    assert sleep.handle(EngineChanged(), now=50.9) == [Instruction.END_DRAIN]
    assert (sleep.phase, sleep.num_wakes, round(sleep.wake_s or 0, 6)) == (Phase.AWAKE, 1, 0.8)


def test_a_wish_that_no_ingress_repeats_is_forgotten() -> None:
    sleep = asleep()
    sleep.handle(Asked(), now=50.0)
    assert sleep.handle(Ordered(Order(may_hold=True)), now=50.0 + ASKED_S) == []
    assert not sleep.claim(50.0 + ASKED_S).wants


def test_a_request_that_comes_while_the_replica_drains_ends_the_drain_if_no_other_model_asks() -> None:
    sleep = awake()
    sleep.handle(Looked(2), now=1.0)
    assert sleep.handle(Ordered(Order(may_hold=True, make_room=True)), now=2.0) == [Instruction.START_DRAIN]
    assert sleep.handle(Asked(), now=3.0) == []
    assert sleep.handle(Ordered(Order(may_hold=True)), now=4.0) == [Instruction.END_DRAIN]


def test_a_drain_lasts_long_enough_for_the_attempts_that_are_on_their_way() -> None:
    sleep = awake()
    sleep.handle(Ordered(Order(may_hold=True, make_room=True)), now=4.0)
    assert sleep.handle(Looked(0), now=3.99 + MIN_DRAIN_S) == []
    assert sleep.handle(Looked(0), now=4.01 + MIN_DRAIN_S) == [Instruction.PUT_TO_SLEEP]


def test_an_attempt_that_comes_after_the_drain_goes_back_to_its_ingress_and_makes_the_replica_ask_for_its_gpu() -> None:
    """While another model has the GPU, only the ingress limits its wait."""
    for sleep in (falling_asleep(), asleep()):
        assert sleep.handle(Looked(1), now=32.0) == [Instruction.LET_GO]
        assert sleep.handle(Looked(0), now=32.1) == []
    assert sleep.claim(32.1).wants
    assert sleep.handle(Ordered(Order(may_hold=True)), now=32.2) == [Instruction.WAKE_UP]


def test_a_drain_lets_go_of_what_outlasts_it() -> None:
    sleep = awake()
    sleep.handle(Looked(1), now=1.0)
    sleep.handle(Ordered(Order(may_hold=True, make_room=True)), now=2.0)
    sleep.handle(Ordered(Order(may_hold=True, make_room=True)), now=DRAIN_S)
    assert sleep.handle(Looked(1), now=1.9 + DRAIN_S) == []
    assert sleep.handle(Looked(1), now=2.0 + DRAIN_S) == [Instruction.LET_GO]


def test_no_engine_falls_asleep_while_the_board_is_away_because_it_could_not_wake() -> None:
    sleep = awake()
    assert sleep.handle(Looked(0), now=AFTER_S) == []
    assert sleep.handle(Ordered(Order(may_hold=True)), now=AFTER_S + 10) == [Instruction.START_DRAIN]
    assert sleep.handle(Looked(0), now=AFTER_S + 10 + EXPIRY_S) == [Instruction.END_DRAIN], "the board went away in the drain"


def test_a_grant_ends_with_the_wish_that_it_answered() -> None:
    sleep = asleep()
    sleep.handle(Asked(), now=50.0)
    assert sleep.handle(Ordered(Order(may_hold=True)), now=50.0 + ASKED_S) == []
    assert sleep.handle(Asked(), now=480.0) == []
    assert sleep.order == Order(may_hold=False)


def report(places: Places, name: str, claim: Claim, now: float, priority: int = 0) -> Order:
    places.report(Applicant(name, ("gpu",), priority), claim, now=now)
    return places.order(name, now=now)


def test_an_idle_holder_makes_room_at_once_and_a_busy_one_after_its_stay() -> None:
    places = Places(EXPIRY_S, now=-EXPIRY_S)
    report(places, "a", Claim(holds=True, busy=True, serves=True, change_s=5.0), 0.0)
    assert report(places, "b", Claim(holds=False, wants=True), 1.0) == Order(may_hold=False)
    assert report(places, "a", Claim(holds=True, busy=False, serves=True), 2.0) == Order(may_hold=True, make_room=True)
    assert report(places, "a", Claim(holds=True, busy=True, serves=True, change_s=2.0), 3.9) == Order(may_hold=True)
    assert report(places, "a", Claim(holds=True, busy=True, serves=True, change_s=2.0), 4.0) == Order(
        may_hold=True, make_room=True
    )
    assert report(places, "a", Claim(holds=False), 5.0) == Order(may_hold=False)
    assert places.order("b", now=5.0) == Order(may_hold=True)


def test_a_model_of_higher_priority_does_not_wait_for_a_stay_and_one_of_lower_priority_for_idleness() -> None:
    places = Places(EXPIRY_S, now=-EXPIRY_S)
    report(places, "a", Claim(holds=True, busy=True, serves=True), 0.0)
    report(places, "low", Claim(holds=False, wants=True), 1.0, priority=-1)
    assert not report(places, "a", Claim(holds=True, busy=True, serves=True, change_s=0.1), 5.9).make_room
    report(places, "high", Claim(holds=False, wants=True), 6.0, priority=1)
    assert report(places, "a", Claim(holds=True, busy=True, serves=True), 6.0).make_room
    report(places, "a", Claim(holds=False), 6.5)
    assert list(places.holders()) == ["high"]


def test_a_new_board_grants_nothing_before_all_holders_have_reported() -> None:
    places = Places(EXPIRY_S, now=100.0)
    assert report(places, "b", Claim(holds=False, wants=True), 100.5) == Order(may_hold=False)
    assert report(places, "a", Claim(holds=True, busy=True, serves=True), 102.0) == Order(may_hold=True)
    assert report(places, "b", Claim(holds=False, wants=True), 106.0) == Order(may_hold=False)


def test_the_gpu_of_a_replica_that_died_is_free_when_its_claim_has_expired() -> None:
    places = Places(EXPIRY_S, now=-EXPIRY_S)
    report(places, "a", Claim(holds=True, busy=True, serves=True), 0.0)
    assert report(places, "b", Claim(holds=False, wants=True), EXPIRY_S) == Order(may_hold=False)
    assert report(places, "b", Claim(holds=False, wants=True), EXPIRY_S + 0.1) == Order(may_hold=True)


def test_a_holder_counts_as_gone_by_the_expiry_of_its_own_configuration() -> None:
    places, slow = Places(EXPIRY_S, now=0.0), Applicant("a", ("gpu",), expiry_s=31.0)
    places.report(slow, Claim(holds=False, wants=True), now=0.0)
    places.settle(EXPIRY_S)
    assert places.holders() == {}, "another holder may be as slow"
    places.report(slow, Claim(holds=True, busy=True), now=30.0)
    assert report(places, "b", Claim(holds=False, wants=True), 61.0) == Order(may_hold=False)
    assert report(places, "b", Claim(holds=False, wants=True), 61.1) == Order(may_hold=True)


def test_a_claim_that_comes_after_a_later_one_frees_no_gpu() -> None:
    places = Places(EXPIRY_S, now=-EXPIRY_S)
    report(places, "a", Claim(holds=True, busy=True, number=2), 0.0)
    assert report(places, "a", Claim(holds=False, number=1), 0.1) == Order(may_hold=True)
    assert report(places, "a", Claim(holds=False, number=3), 0.2) == Order(may_hold=False)


def test_a_claim_that_comes_after_its_replicas_goodbye_takes_no_gpu() -> None:
    places = Places(EXPIRY_S, now=-EXPIRY_S)
    report(places, "a", Claim(holds=True, busy=True), 0.0)
    places.forget("a", now=1.0)
    assert report(places, "a", Claim(holds=True, busy=True), 1.1) == Order(may_hold=False)
    assert report(places, "b", Claim(holds=False, wants=True), 1.2) == Order(may_hold=True)


def run_until_all_answered(world: SleepWorld, limit_s: float) -> None:
    until = world.now + limit_s
    while any(e.waiting or e.in_flight for e in world.engines.values()):
        assert world.now < until, {n: (e.sleep.phase, e.waiting, e.running) for n, e in world.engines.items()}
        world.turn()


class SleepMachine(RuleBasedStateMachine):
    """Three models share a GPU; a fourth has one for itself. Requests, ends, deaths and pauses of the board come at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.world = SleepWorld(after_s=5.0)
        self.number = 0
        for name in "abcd":
            self.start(name)

    def start(self, name: str) -> None:
        self.number += 1
        self.world.add(f"{name}{self.number}", "alone" if name == "d" else "shared", start_s=1.0)

    def of(self, name: str) -> str:
        return next(each for each in self.world.engines if each.startswith(name))

    @rule(name=st.sampled_from("abcd"))
    def request(self, name: str) -> None:
        self.world.ask(self.of(name))

    @rule(turns=st.integers(1, 60), lasting_s=st.sampled_from([0.1, 1.0, 8.0]))
    def time_passes(self, turns: int, lasting_s: float) -> None:
        for _ in range(turns):
            self.world.turn(lasting_s=lasting_s)

    @rule(name=st.sampled_from("abcd"), delay_s=st.sampled_from([0.0, 0.4, 0.7, 2.0]))
    def attempt_arrives_late(self, name: str, delay_s: float) -> None:
        """An ingress sent it before it heard of the drain."""
        engine = self.world.engines[self.of(name)]
        if engine.sleep.phase in (Phase.AWAKE, Phase.DRAINING):
            engine.in_flight.append(self.world.now + delay_s)

    @rule(name=st.sampled_from("abcd"))
    def client_leaves(self, name: str) -> None:
        engine = self.world.engines[self.of(name)]
        engine.waiting.clear()
        engine.in_flight.clear()
        engine.running.clear()

    @rule(name=st.sampled_from("abcd"))
    def replica_is_replaced(self, name: str) -> None:
        """A drain for good, in whatever phase: the board hears of the end, and a new replica starts with the requests that wait."""
        old = self.of(name)
        self.world.end(old)
        self.replace(name, old, forgotten=True)

    @rule(name=st.sampled_from("abcd"))
    def replica_dies(self, name: str) -> None:
        self.replace(name, self.of(name), forgotten=False)

    def replace(self, name: str, old: str, *, forgotten: bool) -> None:
        waiting = self.world.engines[old].waiting
        self.world.remove(old)
        if forgotten:
            self.world.places.forget(old, now=self.world.now)
        self.start(name)
        self.world.engines[self.of(name)].waiting = waiting

    @rule()
    def board_restarts(self) -> None:
        self.world.places = Places(EXPIRY_S, now=self.world.now)

    @precondition(lambda self: any(e.waiting or e.in_flight for e in self.world.engines.values()))
    @rule()
    def every_request_starts(self) -> None:
        run_until_all_answered(self.world, 200.0)

    @invariant()
    def at_most_one_engine_is_on_a_gpu(self) -> None:
        self.world.validate()


TestSleepMachine = SleepMachine.TestCase
TestSleepMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_wake_takes_no_longer_than_the_wake_and_the_other_models_sleep() -> None:
    world = SleepWorld(after_s=math.inf)
    world.add("a", "gpu")
    world.add("b", "gpu")
    world.ask("a")
    world.ask("b")
    run_until_all_answered(world, 120.0)
    for _ in range(int(25 / TURN_S)):
        world.turn()
    world.served.clear()
    world.ask("a" if world.engines["b"].sleep.phase is Phase.AWAKE else "b")
    run_until_all_answered(world, 10.0)
    assert world.ttfts_s[0] <= MIN_DRAIN_S + 0.5 + 0.5 + 7 * TURN_S

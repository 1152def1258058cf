"""These tests measure how fast a queue moves, and compare the Retry-After of refused requests with what happens then."""

import heapq
import random
from dataclasses import replace

import pytest

from serve_app.core.events import LinkOpened, RequestArrived, RequestsAborted, StepCostsMeasured, Ticked
from serve_app.core.fleet import FleetState
from serve_app.core.instructions import AbortAttempts, FailRequest, Instruction, StartAttempt
from serve_app.core.queue_rate import QueueRate, jitter
from serve_app.core.request import Resume
from serve_app.errors import CannotStartInTime, QueueFull
from tests.core.helpers import Output, arrived, fleet_of, outputs, run
from tests.core.test_fair_order import COSTS


def rate_of(*notes: tuple[float, int], waits: bool = True) -> QueueRate:
    """Return the rate after notes of (time, starts since the note before), of a queue that ``waits`` all the time."""
    rate = QueueRate()
    for at, starts in notes:
        rate.note(starts, is_waiting=waits, now=at)
    return rate


def test_the_rate_is_of_the_last_ten_seconds() -> None:
    rate = rate_of(*((float(second), 2) for second in range(40)))
    assert rate.per_second(39.0) == 2.0
    for second in range(40, 50):
        rate.note(6, is_waiting=True, now=float(second))
    assert rate.per_second(49.0) == 6.0


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ([(0.0, 0), (0.9, 100)], None),
        ([(0.0, 0), (2.0, 100)], 50.0),
        ([(0.0, 0), (8.0, 4)], None),
        ([(0.0, 0), (4.0, 8)], 2.0),
        ([(0.0, 0), (5.0, 0), (10.0, 0)], 0.1),
        ([(0.0, 0), (5.0, 1), (10.0, 1)], 0.2),
    ],
    ids=["too short", "very many", "too few", "enough", "none in the whole window", "few in the whole window"],
)
def test_a_rate_is_known_when_enough_was_seen(notes: list[tuple[float, int]], expected: float | None) -> None:
    assert rate_of(*notes).per_second(notes[-1][0]) == expected


def test_starts_without_a_queue_show_no_rate() -> None:
    rate = rate_of(*((second / 10, 5) for second in range(100)), waits=False)
    assert rate.per_second(10.0) is None
    rate.note(0, is_waiting=True, now=10.0)
    assert rate.per_second(12.0) is None


def test_the_starts_that_fill_new_places_do_not_count() -> None:
    rate = rate_of(*((float(second), 2) for second in range(10)))
    rate.forget()
    rate.note(50, is_waiting=True, now=9.0)
    assert rate.per_second(9.0) is None
    rate.note(8, is_waiting=True, now=13.0)
    assert rate.per_second(13.0) == 2.0


def test_the_jitter_spreads_requests_over_a_tenth_to_both_sides() -> None:
    factors = [jitter(f"request-{number}") for number in range(1000)]
    assert min(factors) >= 0.9
    assert max(factors) <= 1.1
    assert [sum(low <= f < low + 0.05 for f in factors) > 200 for low in (0.9, 0.95, 1.0, 1.05)] == [True] * 4
    assert jitter("request-1") == factors[1]
    assert jitter("\ud800") == jitter("\ud800")


def by(request_id: str, start_by: float) -> RequestArrived:
    return replace(arrived(request_id), start_by=start_by)


def slow_fleet(**settings: int) -> FleetState:
    """Return a fleet whose queue starts one request a second, at the tenth second, with the requests "w9" to "w11" waiting."""
    fleet = fleet_of("a", credit=1, heartbeat_timeout_s=1000.0, **settings)
    run(fleet, arrived("w0"), outputs("a", Output("w0@0", [5])), arrived("w1"), arrived("w2"))
    for number in range(9):
        ended = outputs("a", Output(f"w{number}@0", [5], finish_reason="stop"))
        begun = outputs("a", Output(f"w{number + 1}@0", [5]))
        run(fleet, ended, begun, arrived(f"w{number + 3}"), now=number + 1.0)
    return fleet


def test_a_request_that_would_start_too_late_is_refused_at_once_with_the_time_that_the_queue_takes() -> None:
    fleet = slow_fleet()
    assert list(fleet.waiting) == ["w10", "w11"]
    assert run(fleet, by("in-time", 12.8), now=9.0) == []
    (refusal,) = run(fleet, by("late", 13.9), now=9.0)
    assert isinstance(refusal, FailRequest)
    error = refusal.error
    assert isinstance(error, CannotStartInTime)
    assert (error.waiting, error.waited_s, error.expected_s) == (3, 0.0, 4.0)
    assert error.retry_after_s == pytest.approx(4.0 * jitter("late"))
    assert (fleet.outcomes["rejected"], fleet.tally.rejected) == (1, 1)
    assert run(fleet, arrived("without"), now=9.0) == []


def test_a_full_queue_tells_when_it_is_through() -> None:
    (refusal,) = run(slow_fleet(max_waiting_requests=2), arrived("late"), now=9.0)
    assert isinstance(refusal, FailRequest)
    assert isinstance(refusal.error, QueueFull)
    assert refusal.error.retry_after_s == pytest.approx(3.0 * jitter("late"))


def test_a_request_with_a_deadline_starts_at_once_where_there_is_room_and_may_wait_where_no_rate_is_known() -> None:
    fleet = fleet_of("a", credit=1)
    assert len(run(fleet, by("r0", 0.1))) == 1
    assert run(fleet, by("r1", 0.1)) == []
    assert run(fleet, by("r2", 0.1)) == []
    (refusal,) = run(fleet, by("past", 0.0))
    assert isinstance(refusal, FailRequest)
    assert isinstance(refusal.error, CannotStartInTime)
    assert (refusal.error.expected_s, refusal.error.retry_after_s) == (0.0, 5.0)


def test_a_request_that_waits_at_its_deadline_ends_before_it_starts_and_one_that_has_started_does_not() -> None:
    fleet = fleet_of("a", credit=1)
    run(fleet, by("r0", 2.0), by("r1", 2.0), by("r2", 4.0), outputs("a", Output("r0@0", [5])))
    assert run(fleet, Ticked(), now=1.9) == []
    (ended,) = run(fleet, Ticked(), now=2.0)
    assert isinstance(ended, FailRequest)
    assert ended.request_id == "r1"
    assert isinstance(ended.error, CannotStartInTime)
    assert (ended.error.waiting, ended.error.waited_s) == (1, 2.0)
    run(fleet, LinkOpened("a", 1), now=3.0)
    assert run(fleet, Ticked(), now=3.9) == []
    assert fleet.outcomes == {"rejected": 1}


class Overloaded:
    """A fleet in simulated time: three times as many requests as it can answer, and the truth about each refusal."""

    def __init__(self, seed: int, *, within_s: float | None, max_waiting: int) -> None:
        self.random = random.Random(seed)
        self.fleet = fleet_of("a", credit=64, heartbeat_timeout_s=1e9, no_replica_s=1e9, max_waiting_requests=max_waiting)
        self.within_s = within_s
        self.now = 0.0
        self.ends: list[tuple[float, str]] = []
        self.num_arrived = self.num_started = self.num_late = 0
        self.counted_from_s = 10.0  # before, the rate was not known
        self.open: list[tuple[int, float, float]] = []
        """Refusals: the number of starts after which those before it have started, when it was refused, and what it was told."""
        self.errors: list[float] = []

    def run(self, seconds: float, arrivals_per_s: float) -> None:
        next_arrival = next_tick = self.now
        until = self.now + seconds
        while self.now < until:
            next_end = self.ends[0][0] if self.ends else until
            self.now = min(next_arrival, next_tick, next_end)
            if self.now == next_arrival:
                start_by = None if self.within_s is None else self.now + self.within_s
                name = f"r{self.num_arrived}"
                request = RequestArrived(name, 10, 10, Resume.CONTINUE, name, start_by=start_by)
                self.num_arrived += 1
                next_arrival += self.random.expovariate(arrivals_per_s)
                self.take(self.fleet.handle(request, now=self.now))
            elif self.now == next_tick:
                next_tick += 0.25
                self.take(self.fleet.handle(Ticked(), now=self.now))
            else:
                _, attempt_id = heapq.heappop(self.ends)
                self.take(self.fleet.handle(outputs("a", Output(attempt_id, [5], finish_reason="stop")), now=self.now))

    def take(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, StartAttempt):
                self.num_started += 1
                self.fleet.handle(outputs("a", Output(instruction.attempt_id, [5])), now=self.now)
                heapq.heappush(self.ends, (self.now + self.random.uniform(1.0, 3.0), instruction.attempt_id))
                while self.open and self.open[0][0] <= self.num_started:
                    _, refused_at, told_s = self.open.pop(0)
                    self.errors.append(told_s / (self.now - refused_at) - 1)
            elif isinstance(instruction, FailRequest):
                error = instruction.error
                assert isinstance(error, CannotStartInTime | QueueFull)
                if isinstance(error, CannotStartInTime) and error.waited_s:
                    self.num_late += self.now > self.counted_from_s
                elif self.now > self.counted_from_s:
                    assert error.retry_after_s is not None
                    self.open.append((self.num_started + error.waiting + 1, self.now, error.retry_after_s))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("within_s", "max_waiting"), [(5.0, 10_000), (None, 200)], ids=["deadline", "full queue"])
def test_at_three_times_the_load_nine_of_ten_refusals_tell_the_right_time(
    seed: int, within_s: float | None, max_waiting: int
) -> None:
    overloaded = Overloaded(seed, within_s=within_s, max_waiting=max_waiting)
    overloaded.run(60.0, arrivals_per_s=96.0)
    errors = overloaded.errors
    assert len(errors) > 2000
    assert sum(abs(error) <= 0.25 for error in errors) >= 0.9 * len(errors)
    assert overloaded.num_started > 0.95 * 32 * 60
    assert overloaded.num_late < 0.02 * overloaded.num_started, "few of the admitted wait for nothing"


@pytest.mark.parametrize("error", [2 / 3, 1.0, 1.5])
def test_an_overload_that_begins_at_once_is_refused_by_measured_costs_until_a_rate_is_known(error: float) -> None:
    """64 answers at a time take two seconds each: 1/32 GPU-second, of which a replica has measured ``error`` times as much."""
    overloaded = Overloaded(1, within_s=5.0, max_waiting=100_000)
    costs = replace(COSTS, output_token_s=error / 32 / 2, prompt_token_s=0.0)  # an answer has two tokens
    overloaded.fleet.handle(StepCostsMeasured(costs), now=0.0)
    overloaded.run(10.0, arrivals_per_s=16.0)
    assert overloaded.num_started == overloaded.num_arrived
    overloaded.run(20.0, arrivals_per_s=640.0)
    assert overloaded.num_late < 100  # over 1,000 without the costs
    assert overloaded.num_started > 0.95 * (10 * 16 + 20 * 32), "engines are never idle for it"


def test_a_request_in_an_engines_queue_at_its_deadline_is_taken_from_it_and_one_with_a_token_is_not() -> None:
    fleet = fleet_of("a", credit=8)
    run(fleet, by("r0", 2.0), by("r1", 2.0), outputs("a", Output("r0@0", [5])))
    assert run(fleet, Ticked(), now=1.9) == []
    aborted, refused = run(fleet, Ticked(), now=2.0)
    assert aborted == AbortAttempts("a", ("r1@0",))
    assert isinstance(refused, FailRequest)
    assert isinstance(refused.error, CannotStartInTime)
    assert (refused.request_id, list(fleet.requests), fleet.outcomes) == ("r1", ["r0"], {"rejected": 1})


def test_the_models_limit_counts_only_with_all_replicas_and_only_at_arrival() -> None:
    late = replace(arrived("late"), max_wait_s=1.5)
    assert run(slow_fleet(max_replicas=2), late, now=9.0) == []
    fleet = slow_fleet()
    (refusal,) = run(fleet, late, now=9.0)
    assert isinstance(refusal, FailRequest)
    assert "too late for its model's replicas.refuse_after_s: 1.5; retry in" in str(refusal.error)
    run(fleet, replace(arrived("in-time"), max_wait_s=4.0), now=9.0)
    assert run(fleet, Ticked(), now=14.0) == []


def test_a_full_line_drops_the_request_that_is_last_in_order() -> None:
    fleet = fleet_of("a", credit=1, max_waiting_requests=2)
    run(fleet, *(replace(arrived(f"red{number}"), tenant="red") for number in range(3)))
    (refusal,) = run(fleet, replace(arrived("blue0"), tenant="blue"))
    assert isinstance(refusal, FailRequest)
    assert isinstance(refusal.error, QueueFull)
    assert (refusal.request_id, list(fleet.waiting)) == ("red2", ["blue0", "red1"])
    (own,) = run(fleet, replace(arrived("red3"), tenant="red"))
    assert isinstance(own, FailRequest)
    assert own.request_id == "red3"


def test_a_tenant_that_aborts_prompts_in_the_engine_pays_for_them() -> None:
    """An engine that computes one prompt at a time; "bad" gives up each of its prompts just before its first token."""
    fleet = fleet_of("a", credit=100, heartbeat_timeout_s=1e9)
    served, now, number = {"good": 0, "bad": 0}, 0.0, 0
    for _ in range(10):
        run(fleet, replace(arrived(f"good{number}", prompt_tokens=80), tenant="good"), now=now)
        number += 1
    run(fleet, replace(arrived(f"bad{number}", prompt_tokens=10), tenant="bad"), now=now)
    for _ in range(300):
        request = min((r for r in fleet.requests.values() if not r.emitted_ids), key=lambda r: r.priority)
        now += request.prompt_tokens / 10
        served[request.tenant] += request.prompt_tokens
        if request.tenant == "good":
            run(fleet, outputs("a", Output(request.attempt_id, [5], finish_reason="stop")), now=now)
        else:
            run(fleet, RequestsAborted([request.request_id]), now=now)
        number += 1
        run(
            fleet,
            replace(arrived(f"{request.tenant}{number}", prompt_tokens=request.prompt_tokens), tenant=request.tenant),
            now=now,
        )
    assert served["good"] == pytest.approx(served["bad"], rel=0.2)


def test_choices_of_one_tenant_do_not_close_the_line_for_another() -> None:
    fleet = fleet_of("a", credit=1, max_waiting_requests=3)
    many = [replace(arrived(f"red{number}"), tenant="red", priority="background", is_first=not number) for number in range(4)]
    run(fleet, *many)
    (refusal,) = run(fleet, replace(arrived("blue"), tenant="blue"))
    assert isinstance(refusal, FailRequest)
    assert refusal.request_id == "red3"
    assert "blue" in fleet.waiting

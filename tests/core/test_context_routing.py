"""Replicas of one model may have contexts of different lengths; a request goes, resumes and moves only where it fits."""

from collections.abc import Mapping

from serve_app.core.events import HeartbeatArrived, LinkEnd, LinkLost, LinkOpened, Ticked
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import AbortAttempts, FailRequest
from serve_app.core.least_loaded import LeastOutstandingTokens
from serve_app.core.load import EngineLoad
from serve_app.core.request import RequestState, Resume
from serve_app.core.routing import Choice, ReplicaState
from serve_app.errors import ReplicaLost
from tests.core.helpers import Output, arrived, fleet_of, outputs, run, start

LONG, SHORT = LinkOpened("long", 8, max_model_len=100), LinkOpened("short", 8, max_model_len=20)
FITS_BOTH, FITS_LONG = arrived("r", prompt_tokens=10, max_tokens=10), arrived("r", prompt_tokens=10, max_tokens=11)


def test_a_request_goes_only_where_its_whole_answer_fits() -> None:
    fleet = fleet_of()
    run(fleet, LONG, SHORT, arrived("first", prompt_tokens=50, max_tokens=50))  # the long one has more to do now
    assert run(fleet, FITS_BOTH) == [start("r", 0, "short")]
    assert run(fleet, arrived("s", prompt_tokens=10, max_tokens=11)) == [start("s", 0, "long")]


def test_it_waits_for_a_place_there_and_keeps_no_shorter_one_waiting() -> None:
    fleet = fleet_of()
    run(fleet, LinkOpened("long", 1, max_model_len=100), SHORT, arrived("first", prompt_tokens=50, max_tokens=50))
    assert run(fleet, FITS_LONG) == []
    assert run(fleet, arrived("later")) == [start("later", 0, "short")]
    assert run(fleet, outputs("long", Output("first@0", [7], "stop")))[-1] == start("r", 0, "long")


def test_a_lost_request_resumes_where_the_rest_of_its_answer_fits() -> None:
    fleet = fleet_of()
    run(fleet, LONG, FITS_LONG, outputs("long", Output("r@0", [7, 8])), SHORT, LinkOpened("other", 8, max_model_len=100))
    assert run(fleet, LinkLost("long", LinkEnd.ENGINE_DIED)) == [start("r", 1, "other", (7, 8), 2, suspect=True)]


def test_without_a_longer_one_it_goes_to_the_longest_if_the_answer_so_far_fits_there() -> None:
    fleet = fleet_of()
    run(fleet, LONG, FITS_LONG, outputs("long", Output("r@0", [7, 8])), SHORT, LinkOpened("shorter", 8, max_model_len=15))
    assert run(fleet, LinkLost("long", LinkEnd.SAID_GOODBYE)) == [start("r", 1, "short", (7, 8), 2)]


def test_a_draining_replica_is_not_waited_for() -> None:
    fleet = fleet_of()
    run(fleet, LONG, SHORT, HeartbeatArrived("long", EngineLoad(1, 0, 0, 0.0), draining=True, drain_left_s=60.0))
    assert run(fleet, FITS_LONG) == [start("r", 0, "short")]


def test_an_answer_that_fits_nowhere_ends_with_one_error_that_says_so() -> None:
    fleet = fleet_of(no_replica_s=5.0, max_standstill_s=100.0, heartbeat_timeout_s=100.0)
    run(fleet, LONG, arrived("r", prompt_tokens=18, max_tokens=50), outputs("long", Output("r@0", [7, 8])), SHORT)
    assert run(fleet, LinkLost("long", LinkEnd.SAID_GOODBYE), now=1.0) == []
    (failed,) = run(fleet, Ticked(), now=7.0)
    assert isinstance(failed, FailRequest)
    assert isinstance(failed.error, ReplicaLost)
    assert "room for its tokens" in str(failed.error)


def test_a_draining_replica_moves_requests_only_where_they_fit() -> None:
    fleet = fleet_of(heartbeat_timeout_s=100.0)
    run(fleet, LONG, FITS_LONG, outputs("long", Output("r@0", [7])), SHORT, LinkOpened("other", 8, max_model_len=100))
    run(fleet, HeartbeatArrived("long", EngineLoad(1, 1, 0, 0.0), draining=True, drain_left_s=10.0))
    moves = run(fleet, Ticked(), now=9.0)
    assert moves == [AbortAttempts("long", ("r@0",)), start("r", 1, "other", (7,), 1)]


def test_a_new_replica_takes_back_only_what_fits_there() -> None:
    fleet = fleet_of()
    run(fleet, LONG, arrived("a", Resume.CONTINUE), *(arrived(f"r{i}", prompt_tokens=10, max_tokens=11) for i in range(3)))
    run(fleet, HeartbeatArrived("long", EngineLoad(1, 1, 3, 0.5), draining=False))
    assert run(fleet, SHORT) == []
    assert run(fleet, LinkOpened("other", 8, max_model_len=100))[0] == AbortAttempts("long", ("r0@0", "r1@0", "r2@0"))


def test_a_long_queue_of_requests_that_fit_nowhere_now_is_tried_once_for_all_of_a_kind() -> None:
    class Counting(LeastOutstandingTokens):
        picks = 0

        def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
            Counting.picks += 1
            return super().pick(request, replicas)

    fleet = FleetState(FleetSettings(model="tiny", max_waiting_requests=500), Counting())
    run(fleet, LinkOpened("long", 1, max_model_len=100), SHORT)
    for number in range(300):
        fleet.handle(arrived(f"r{number}", prompt_tokens=50, max_tokens=50), now=0.0)
    run(fleet, arrived("s"))
    before = Counting.picks
    fleet.handle(outputs("short", Output("s@0", [7], "stop")), now=0.0)
    assert Counting.picks - before == 1

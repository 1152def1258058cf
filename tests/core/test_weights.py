"""In a roll-out of new weights no answer has tokens of both."""

from serve_app.core.events import HeartbeatArrived, LinkEnd, LinkLost, LinkOpened, OutputsArrived, Ticked
from serve_app.core.instructions import FailRequest
from serve_app.core.load import EngineLoad
from serve_app.errors import ReplicaLost
from tests.core.helpers import Output, arrived, fleet_of, outputs, run, same, start

OLD, NEW = LinkOpened("a", 8, weights="old"), LinkOpened("b", 8, weights="new")
LOST = LinkLost("a", LinkEnd.SAID_GOODBYE)


def first_token() -> OutputsArrived:
    return outputs("a", Output("begun@0", [7]))


def test_a_request_with_a_token_waits_for_its_weights_and_delays_no_other() -> None:
    fleet = fleet_of()
    run(fleet, OLD, arrived("begun"), arrived("new"), first_token(), NEW)
    assert run(fleet, LOST) == [start("new", 1, "b")]
    assert run(fleet, arrived("later")) == [start("later", 0, "b")]
    assert run(fleet, LinkOpened("c", 8, weights="old")) == [start("begun", 1, "c", (7,), emitted=1)]


def test_without_a_replica_of_its_weights_it_ends_by_an_error() -> None:
    fleet = fleet_of(no_replica_s=60.0, max_standstill_s=90.0)
    run(fleet, OLD, arrived("begun"), first_token(), NEW, LOST)
    assert run(fleet, HeartbeatArrived("b", EngineLoad(1, 0, 0, 0.0), False), now=60.0) == []
    (ended,) = run(fleet, HeartbeatArrived("b", EngineLoad(1, 0, 0, 0.0), False), Ticked(), now=60.5)
    assert isinstance(ended, FailRequest)
    reason = "for 60.5 s there was no replica with the weights that began its answer and room for its tokens"
    assert same(ended.error, ReplicaLost(request="begun", reason=reason))


def test_a_drain_moves_it_only_to_its_weights() -> None:
    fleet = fleet_of()
    drain = HeartbeatArrived("a", EngineLoad(1, 1, 0, 0.0), draining=True, drain_left_s=4.0)
    run(fleet, OLD, arrived("begun"), first_token(), NEW, drain)
    run(fleet, HeartbeatArrived("b", EngineLoad(1, 0, 0, 0.0), False), drain, now=3.5)
    assert run(fleet, Ticked(), now=3.5) == []
    assert run(fleet, LinkOpened("c", 8, weights="old"), Ticked(), now=3.5)[-1] == start("begun", 1, "c", (7,), emitted=1)

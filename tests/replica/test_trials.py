"""The line of suspects is tested alone, and behind a replica's listener with links of two ingresses."""

from functools import partial

from serve_app.links.protocol.messages import AddSuspect, Heartbeat, Message, Outputs, TrialBegins
from serve_app.replica import pipe
from serve_app.replica.trials import Trials
from tests.doubles.fleet import FakeReplica, in_loop, settings, start_replica, until
from tests.doubles.probe import Probe
from tests.replica.linked import linked, recorded


class Line:
    """Trials whose links are names; ``done`` lists their calls, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.trials = Trials[str](self._begin, partial(self.done.append, "ask"))

    def _begin(self, link: str, suspect: AddSuspect) -> None:
        self.done.append(f"{link}: {suspect.attempt_id}")

    def add(self, link: str, *attempt_ids: str) -> None:
        for attempt_id in attempt_ids:
            self.trials.add(link, AddSuspect(attempt_id, [b""], 0, b""))


def test_suspects_of_all_links_begin_one_by_one_in_the_order_of_their_arrival() -> None:
    line = Line()
    line.add("x", "r0")
    line.add("y", "s0")
    line.add("x", "r1")
    assert line.done == ["x: r0"]
    line.trials.let_go(["r1", "unknown"])
    assert line.done == ["x: r0"], "neither is on trial"
    line.trials.let_go(["r0"])
    line.trials.let_go(["s0"])
    assert line.done == ["x: r0", "y: s0", "x: r1"]


def test_one_that_is_withdrawn_from_the_line_never_begins() -> None:
    line = Line()
    line.add("x", "r0", "r1", "r2")
    line.trials.withdraw(["r1"])
    line.trials.let_go(["r0"])
    assert line.done == ["x: r0", "x: r2"]


def test_after_one_that_is_withdrawn_in_its_trial_the_next_begins_when_the_engine_has_answered() -> None:
    line = Line()
    line.add("x", "r0", "r1", "r2")
    line.trials.withdraw(["r0"])
    line.trials.withdraw(["r0", "r1"])
    line.trials.let_go(["r0"])
    assert line.done == ["x: r0", "ask"]
    line.trials.answered()
    assert line.done == ["x: r0", "ask", "x: r2"]


def send(probe: Probe, *attempt_ids: str) -> None:
    connection = probe.link.connection
    probe.link.write(b"".join(connection.send_add(i, [b"request"], suspect=True) for i in attempt_ids))


def heard(probe: Probe) -> list[Message]:
    return [message for message in probe.messages if not isinstance(message, Heartbeat)]


async def two_in_line(replica: FakeReplica, received: list[pipe.ToEngine]) -> tuple[Probe, Probe]:
    one, two = await linked(replica), await linked(replica)
    send(one, "r@1")
    await until(lambda: received)
    send(two, "s@1")
    await until(lambda: replica.server.num_attempts() == 2)
    assert received == [pipe.AddToEngine(0, "r@1", [b"request"], 0)]
    await until(lambda: heard(one))
    assert (heard(one), heard(two)) == ([TrialBegins("r@1")], [])
    return one, two


@in_loop
async def test_the_next_suspect_goes_to_the_engine_when_the_ingress_of_the_former_says_that_it_has_passed() -> None:
    replica = await start_replica(settings(), "a")
    with recorded(replica) as received:
        one, two = await two_in_line(replica, received)
        one.link.write(one.link.connection.send_trial_passed("r@1"))
        await until(lambda: len(received) == 2)
        await until(lambda: heard(two))
    assert received[1:] == [pipe.AddToEngine(1, "s@1", [b"request"], 0)]
    assert heard(two) == [TrialBegins("s@1")]
    await replica.close()


@in_loop
async def test_the_next_suspect_goes_to_the_engine_when_the_former_ends_there() -> None:
    replica = await start_replica(settings(), "a")
    with recorded(replica) as received:
        one, _ = await two_in_line(replica, received)
        replica.engine.emit_outputs(0, [b"last"], finished=["r@1"])
        await until(lambda: len(received) == 2)
        await until(lambda: len(heard(one)) == 2)
    assert heard(one)[1:] == [Outputs([b"last"])]
    await replica.close()


@in_loop
async def test_the_next_suspect_waits_for_the_engines_answer_when_the_ingress_of_the_former_goes() -> None:
    replica = await start_replica(settings(), "a")
    with recorded(replica) as received:
        one, _ = await two_in_line(replica, received)
        one.link.abort("the test cuts it")
        await until(lambda: len(received) == 3)
        assert received[1:] == [pipe.AbortInEngine(["r@1"]), pipe.AskTrial()]
        replica.server.on_engine_message(pipe.Answered(pipe.TRIALS_SLOT))
        assert received[3:] == [pipe.AddToEngine(1, "s@1", [b"request"], 0)]
    await replica.close()

"""Two connections talk over two pipes that deliver any number of bytes at any time."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from serve_app.core.load import EngineLoad
from serve_app.links.protocol.connection import LinkState
from serve_app.links.protocol.errors import CreditExceeded, DuplicateAttempt, PeerClosed, UnexpectedMessage
from serve_app.links.protocol.messages import Abort, Add, Heartbeat, Outputs, Ping
from tests.protocol.helpers import make_ingress, make_replica, outputs

CREDIT = 3
byte_counts = st.sampled_from([1, 3, 50, 300, 100_000])


class LinkMachine(RuleBasedStateMachine):
    """``running`` is the engine behind the replica; outputs carry the ids that finished in that step."""

    added = Bundle("added")

    def __init__(self) -> None:
        super().__init__()
        self.ingress, self.replica = make_ingress(), make_replica(credit=CREDIT)
        self.to_replica = bytearray(self.ingress.initiate())
        self.to_ingress = bytearray()
        self.running: set[str] = set()
        self.num_added = self.num_pings = self.num_pings_seen = 0

    @rule(target=added)
    def add(self) -> str:
        attempt_id = f"r{self.num_added}@0"
        expected = (
            UnexpectedMessage
            if self.ingress.state is not LinkState.OPEN
            else CreditExceeded
            if len(self.ingress.attempts) == CREDIT
            else None
        )
        if expected:
            with pytest.raises(expected):
                self.ingress.send_add(attempt_id, [b"request"])
        else:
            self.to_replica += self.ingress.send_add(attempt_id, [b"request"])
            self.num_added += 1
        return attempt_id

    @precondition(lambda self: self.ingress.attempts)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        attempt_id = data.draw(st.sampled_from(sorted(self.ingress.attempts)))
        with pytest.raises(DuplicateAttempt):
            self.ingress.send_add(attempt_id, [b"request"])

    @precondition(lambda self: self.ingress.state is LinkState.OPEN)
    @rule(attempt_ids=st.lists(added, max_size=2))
    def abort(self, attempt_ids: list[str]) -> None:
        self.to_replica += self.ingress.send_abort([i for i in attempt_ids if int(i[1:-2]) < self.num_added])

    @precondition(lambda self: self.ingress.state is LinkState.OPEN)
    @rule()
    def ping(self) -> None:
        self.num_pings += 1
        self.to_replica += self.ingress.ping()

    @precondition(lambda self: self.replica.state is LinkState.OPEN)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        finished = [i for i in sorted(self.running) if data.draw(st.booleans())]
        for attempt_id in finished:
            self.running.remove(attempt_id)
            self.replica.attempt_finished(attempt_id)
        self.to_ingress += outputs(b"step", *(i.encode() for i in finished))

    @precondition(lambda self: self.replica.state is LinkState.OPEN)
    @rule()
    def heartbeat(self) -> None:
        self.to_ingress += self.replica.send_heartbeat(EngineLoad(1, len(self.running)))

    @rule(num_bytes=byte_counts)
    def deliver_to_replica(self, num_bytes: int) -> None:
        data = bytes(self.to_replica[:num_bytes])
        del self.to_replica[:num_bytes]
        for message in self.replica.receive_data(data):
            match message:
                case Add(attempt_id, _, _):
                    assert attempt_id not in self.running
                    self.running.add(attempt_id)
                case Abort(attempt_ids):
                    self.running.difference_update(attempt_ids)
                case _:
                    assert message == Ping()
                    self.num_pings_seen += 1
        self.to_ingress += self.replica.data_to_send()

    @rule(num_bytes=byte_counts)
    def deliver_to_ingress(self, num_bytes: int) -> None:
        data = bytes(self.to_ingress[:num_bytes])
        del self.to_ingress[:num_bytes]
        for message in self.ingress.receive_data(data):
            match message:
                case Outputs([_, *finished]):
                    for attempt_id in finished:
                        self.ingress.attempt_finished(attempt_id.decode())
                case _:
                    assert isinstance(message, Heartbeat)
                    assert message.running <= CREDIT
        self.to_replica += self.ingress.data_to_send()

    @invariant()
    def credit_is_never_exceeded(self) -> None:
        assert len(self.ingress.attempts) <= CREDIT
        assert len(self.replica.attempts) <= CREDIT
        assert self.replica.attempts == self.running

    def teardown(self) -> None:
        """Deliver all bytes, after which both sides agree; then one says Goodbye and both are closed."""
        while self.to_replica or self.to_ingress:
            self.deliver_to_replica(100_000)
            self.deliver_to_ingress(100_000)
        assert [self.ingress.state, self.replica.state] == [LinkState.OPEN, LinkState.OPEN]
        assert self.ingress.attempts == self.replica.attempts
        assert self.num_pings_seen == self.num_pings
        goodbye = self.replica.close("shutdown", "the test is over")
        with pytest.raises(PeerClosed):
            self.ingress.receive_data(goodbye)
        assert [self.ingress.state, self.replica.state] == [LinkState.CLOSED, LinkState.CLOSED]


TestLink = LinkMachine.TestCase
TestLink.settings = settings(max_examples=100, stateful_step_count=40)

"""Links of probes to a replica's listener, and what its engine receives."""

import contextlib
from collections.abc import Iterator
from typing import Any

from serve_app.replica import pipe
from tests.doubles.fleet import FakeReplica, until
from tests.doubles.probe import Probe


async def linked(replica: FakeReplica, **changes: Any) -> Probe:
    """Return an open link whose first heartbeat has come: the replica knows that it is open."""
    probe = Probe(**changes)
    await probe.connect(replica.lease.port)
    await until(lambda: probe.messages)
    return probe


def add(probe: Probe, attempt_id: str) -> None:
    probe.link.write(probe.link.connection.send_add(attempt_id, [b"request"]))


class Recorder:
    """An engine that keeps the messages that it gets."""

    def __init__(self) -> None:
        self.received: list[pipe.ToEngine] = []

    def send(self, message: pipe.ToEngine) -> None:
        self.received.append(message)


@contextlib.contextmanager
def recorded(replica: FakeReplica) -> Iterator[list[pipe.ToEngine]]:
    recorder = Recorder()
    replica.server.engine = recorder
    yield recorder.received

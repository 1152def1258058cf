"""`play` lets all clients ask at once, and kills the engine in the midst of their answers where a test wants it."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.clients.client import Client
from tests.clients.programs.loop import Command
from tests.clients.relay import Relay
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.operations import Fleet

MIDST_LIMIT_S = 120.0


@dataclass(frozen=True)
class Watched:
    """A client whose requests go through the relay."""

    client: Client
    relay: Relay


@dataclass(frozen=True)
class Outcome:
    """What one client made of its answers, and what its relay saw."""

    answer: Mapping[str, Any]
    num_asked: int
    num_comments: int
    was_amid: bool
    """Whether the client's first answer was in its midst at the kill."""


def play(
    clients: Sequence[Watched], command_of: Callable[[str], Command], kill: Callable[[], None], *, after_events: int | None
) -> dict[str, Outcome]:
    """Return each client's outcome, by the library's name.

    Args:
        command_of: Returns the command for the library of this name.
        kill: Is called once, when each client has had ``after_events`` events of a stream; 0: when each has asked. None: it is not called.
    """
    for one in clients:
        one.relay.forget()
    with ThreadPoolExecutor(len(clients)) as pool:
        running = [pool.submit(one.client.ask, command_of(one.client.library.name)) for one in clients]
        were_amid = [False] * len(clients)
        if after_events is not None:
            _wait_until_all_have(after_events, clients, running)
            were_amid = [not future.done() and one.relay.num_asked() == 1 for one, future in zip(clients, running, strict=True)]
            kill()
    return {
        one.client.library.name: Outcome(future.result(), one.relay.num_asked(), one.relay.num_comments(), was_amid)
        for one, future, was_amid in zip(clients, running, were_amid, strict=True)
    }


def _wait_until_all_have(num_events: int, clients: Sequence[Watched], running: Sequence[Future[dict[str, Any]]]) -> None:
    def all_have() -> bool:
        begun = [one.relay.num_asked() > 0 and one.relay.num_events() >= num_events for one in clients]
        return all(has or future.done() for has, future in zip(begun, running, strict=True))

    wait_until(all_have, limit_s=MIDST_LIMIT_S, what=f"{num_events} events at each client", every_s=0.02)
    if num_events == 0:
        time.sleep(2)  # of an answer without a stream, nothing tells that it has begun


def engine_of(fleet: Fleet) -> Callable[[], None]:
    """Return a function that kills the engine process of the only replica."""
    (member,) = fleet.members("replica")
    pid = int(member["load"]["engine_pid"])
    return lambda: os.kill(pid, signal.SIGKILL)

"""`play` lets all clients ask at once, and kills the engine in the midst of their answers where a test wants it."""

import os
import signal
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
    """Whether the client's answer was in its midst at the kill."""


def play(
    clients: Sequence[Watched],
    command_of: Callable[[str], Command],
    kill: Callable[[], None],
    amid: Callable[[Relay], bool] | None,
) -> dict[str, Outcome]:
    """Return each client's outcome, by the library's name.

    Args:
        command_of: Returns the command for the library of this name.
        kill: Is called once, when all answers are in their midst.
        amid: Whether the answer that passes a relay is in its midst; None: nothing is killed.
    """
    for one in clients:
        one.relay.forget()
    with ThreadPoolExecutor(len(clients)) as pool:
        running = [pool.submit(one.client.ask, command_of(one.client.library.name)) for one in clients]
        were_amid = _kill_amid(clients, running, kill, amid) if amid is not None else [False] * len(clients)
    return {
        one.client.library.name: Outcome(future.result(), one.relay.num_asked(), one.relay.num_comments(), was_amid)
        for one, future, was_amid in zip(clients, running, were_amid, strict=True)
    }


def _kill_amid(
    clients: Sequence[Watched], running: Sequence[Future[dict[str, Any]]], kill: Callable[[], None], amid: Callable[[Relay], bool]
) -> list[bool]:
    def all_are() -> bool:
        return all(future.done() or amid(one.relay) for one, future in zip(clients, running, strict=True))

    wait_until(all_are, limit_s=MIDST_LIMIT_S, what="the answers of all clients in their midst", every_s=0.02)
    kill()
    return [not future.done() for future in running]


def engine_of(fleet: Fleet) -> Callable[[], None]:
    """Return a function that kills the engine process of the only replica."""
    (member,) = fleet.members("replica")
    pid = int(member["load"]["engine_pid"])
    return lambda: os.kill(pid, signal.SIGKILL)

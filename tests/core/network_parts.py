"""These are the parts of a `World`: clients, connections, replicas and ingresses, which do nothing by themselves."""

from collections import deque
from dataclasses import dataclass, field

from serve_app.core.events import HeartbeatArrived, LinkEnd, TrialBegan
from serve_app.core.fleet import FleetState
from serve_app.core.instructions import AbortAttempts, FreeKeptKv, HandOverAttempt, PassTrial, StartAttempt
from serve_app.core.request import Resume
from serve_app.links.protocol.messages import AddSuspect
from serve_app.replica.trials import Trials
from tests.core.helpers import Output


@dataclass
class Client:
    """One request: its whole answer, the part that came, and how it ended."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    resume: Resume
    delivered: list[int] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Connection:
    """Both directions of one link; each end notices the connection's end by itself."""

    ingress: "Ingress"
    replica: "Replica"
    up: deque[StartAttempt | AbortAttempts | HandOverAttempt | FreeKeptKv | PassTrial] = field(default_factory=deque)
    down: deque[list[Output] | HeartbeatArrived | TrialBegan | LinkEnd] = field(default_factory=deque)
    frozen: bool = False
    running: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Attempts of this link in the engine: attempt id -> prompt and output so far."""
    in_line: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Suspects, as ``running``."""
    leaving: set[str] = field(default_factory=set)
    """Attempts that the engine will hand over, if they do not end before."""
    reading: dict[str, "Kept"] = field(default_factory=dict)
    """Attempts that came with KV and have no token yet."""

    def is_alive(self) -> bool:
        """Return whether both ends still take it for open."""
        return self.ingress.links.get(self.replica.replica_id) is self and self in self.replica.links


@dataclass(eq=False)
class Kept:
    """KV that a replica keeps of an attempt that it handed over on the connection ``of``, and the connection of its reader."""

    of: Connection
    attempt_id: str
    num_tokens: int
    until: float
    reader: Connection | None = None


@dataclass(eq=False)
class Replica:
    replica_id: str
    kept: list[Kept] = field(default_factory=list)
    links: list[Connection] = field(default_factory=list)
    drain_ends_at: float | None = None

    @property
    def draining(self) -> bool:
        return self.drain_ends_at is not None

    @property
    def kv_transfer(self) -> str:
        """Return the same for replicas that can read each other's KV: seven of eight."""
        return "" if int(self.replica_id[1:]) % 8 == 7 else "kv"

    def __post_init__(self) -> None:
        self.trials = Trials[Connection](self.begin_trial, lambda: self.trials.answered())

    def begin_trial(self, connection: Connection, suspect: AddSuspect) -> None:
        connection.down.append(TrialBegan(suspect.attempt_id))
        connection.running[suspect.attempt_id] = connection.in_line.pop(suspect.attempt_id)

    def end(self, connection: Connection) -> None:
        """Let the replica notice the connection's end: the engine drops the attempts of that link."""
        if connection in self.links:
            self.links.remove(connection)
            unfinished = [*connection.in_line, *connection.running]
            connection.running.clear()
            connection.reading.clear()
            self.trials.withdraw(unfinished)
            connection.in_line.clear()


@dataclass(eq=False)
class Ingress:
    fleet: FleetState
    clients: dict[str, Client] = field(default_factory=dict)
    links: dict[str, Connection] = field(default_factory=dict)
    num_clients: int = 0

    def live(self) -> list[str]:
        return list(self.clients)

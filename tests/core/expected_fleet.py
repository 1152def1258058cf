"""This module models what the fleet is compared with: the answer of each request, the requests of each engine, and those that wait.

An engine's next token is a function of the sequence so far.
"""

import zlib
from dataclasses import dataclass, field
from typing import Literal

from serve_app.core.events import LinkEnd, TrialBegan
from serve_app.core.request import Resume
from tests.core.helpers import Output

MAX_WAITING = 4
MAX_DEATHS = 3
TIMEOUT_S = 5.0
NO_REPLICA_S = 12.0
STANDSTILL_S = 20.0
QUARANTINE_S = 15.0
BLAMED = (LinkEnd.ENGINE_DIED, LinkEnd.MISUNDERSTOOD, LinkEnd.BROKE_OFF)
REPLICAS = ("a", "b", "c")


def next_token(sequence: tuple[int, ...]) -> int:
    return zlib.crc32(repr(sequence).encode()) % 50


@dataclass
class Request:
    """The answer that the client of one request must get, and the part that it has got."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    resume: Resume
    sendable: bool
    fingerprint: str
    arrived_at: float
    start_by: float | None = None
    delivered: list[int] = field(default_factory=list)
    losses: int = 0
    deaths: int = 0
    broken_off: set[str] = field(default_factory=set)
    """Replicas that may have died."""
    lost_at: float | None = None
    """When the client's present wait for another replica began."""
    suspect_of: str = ""
    """The replica that the request may have brought down since its latest token."""
    trial: Literal["", "in line", "begun"] = ""
    weights: str = ""
    """The weights that made its first token."""
    moves: int = 0
    """How often the request came back from an engine's queue."""
    outcomes: list[str] = field(default_factory=list)


@dataclass
class Link:
    """The engine behind one link, and the frames that are on their way from it."""

    credit: int
    heard_at: float
    draining: bool = False
    weights: str = ""
    waiting: int = 0
    """Requests in the engine's queue at the last heartbeat. This ingress's share of them is its share of all requests of the engine."""
    beat_running: int = 0
    moves_from: float | None = None
    """When requests may begin to move away; None while the replica does not drain."""
    running: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Attempt id -> prompt and output so far, by start."""
    held: dict[str, str] = field(default_factory=dict)
    """Request id -> attempt id as the ingress sees it, by start."""
    line: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Suspects that wait for ``on_trial``, as ``running``."""
    on_trial: str = ""
    frames: list[list[Output] | TrialBegan] = field(default_factory=list)

    def compute(self, attempt_id: str, request: Request, count: int, *, wrong: bool) -> Output:
        """Add up to ``count`` tokens. ``wrong``: a replay does not repeat itself."""
        if request.resume is Resume.RESTART:
            del self.running[attempt_id]
            self.next_trial(attempt_id)
            return Output(attempt_id, [], finish_reason="stop")
        sequence = self.running[attempt_id]
        whole = request.prompt + request.answer
        replays = request.resume is Resume.REPLAY and len(sequence) - 1 < len(request.delivered)
        new = [next_token(sequence) + 50] if wrong and replays and count else []
        while not new or (not wrong and len(new) < count and len(sequence) + len(new) < len(whole)):
            if len(new) == count:
                break
            new.append(next_token(sequence + tuple(new)))
        self.running[attempt_id] = sequence + tuple(new)
        finished = len(self.running[attempt_id]) >= len(whole)
        if finished:
            del self.running[attempt_id]
            self.next_trial(attempt_id)
        return Output(attempt_id, new, finish_reason="stop" if finished else None)

    def next_trial(self, former: str = "") -> None:
        """Give the next suspect in line to the engine, if ``former`` was on trial, or no suspect was."""
        if self.on_trial == former:
            self.on_trial = next(iter(self.line), "")
            if self.on_trial:
                self.running[self.on_trial] = self.line.pop(self.on_trial)
                self.frames.append(TrialBegan(self.on_trial))


class ExpectedFleet:
    """The test's own account of requests, links and the queue: nothing in it is read from the fleet."""

    def __init__(self) -> None:
        super().__init__()  # a subclass may be a state machine too
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.links: dict[str, Link] = {}
        self.queue: list[str] = []
        self.waiting_since: dict[str, float] = {}
        self.stale: list[tuple[str, Output]] = []
        self.start_s: dict[str, float] = {}
        self.blocked: dict[str, float] = {}

    def never_started(self, request_id: str) -> bool:
        """Return whether a request of the queue has had no attempt."""
        request = self.requests[request_id]
        return request.losses + request.moves == 0

    def request_of(self, attempt_id: str) -> Request:
        return self.requests[attempt_id.split("@")[0]]

    def live(self) -> list[str]:
        return [i for i, r in self.requests.items() if not r.outcomes]

    def is_blocked(self, request_id: str) -> bool:
        return self.blocked.get(self.requests[request_id].fingerprint, self.now) > self.now

    def stands_still(self, request_id: str) -> bool:
        lost_at = self.requests[request_id].lost_at
        return lost_at is not None and self.now - lost_at > STANDSTILL_S

    def is_deadly(self, request: Request) -> bool:
        return request.deaths + len(request.broken_off) == MAX_DEATHS

    def is_stuck(self, request: Request) -> bool:
        return bool(request.resume is Resume.NEVER and request.delivered)

    def tried_alike(self, request_id: str) -> str | None:
        """Return the replica where a request like this suspect is on trial or in line."""
        request = self.requests[request_id]
        tried = [
            replica_id
            for replica_id, link in self.links.items()
            for i in link.held
            if self.requests[i].trial and self.requests[i].fingerprint == request.fingerprint
        ]
        assert len(set(tried)) <= 1
        return tried[0] if tried and request.suspect_of else None

    def waits_for_its_like(self, request_id: str) -> bool:
        if (only := self.tried_alike(request_id)) is None:
            return False
        link, weights = self.links[only], self.requests[request_id].weights
        return link.draining or len(link.held) >= link.credit or weights not in ("", link.weights)

    def waits_for_its_weights(self, request_id: str) -> bool:
        weights = self.requests[request_id].weights
        links = [k for k in self.links.values() if not k.draining and len(k.held) < k.credit]
        return bool(weights) and all(k.weights != weights for k in links)

    def forget(self, replica_id: str, end: LinkEnd) -> None:
        """Let the requests of a lost link wait at the front of the queue, oldest first, or end."""
        if (link := self.links.pop(replica_id, None)) is None:
            return
        self.stale = [(replica_id, output) for frame in link.frames if isinstance(frame, list) for output in frame]
        back = []
        for request_id in link.held:
            request = self.requests[request_id]
            request.losses += 1
            trial, request.trial = request.trial, ""
            if end in BLAMED and trial == "begun" and request.suspect_of:
                self.blocked[request.fingerprint] = self.now + QUARANTINE_S
                continue
            if end in BLAMED and trial != "in line":
                request.suspect_of = replica_id
                request.deaths += end is not LinkEnd.BROKE_OFF
                request.broken_off |= {replica_id} if end is LinkEnd.BROKE_OFF else set()
            if not (self.is_deadly(request) or self.stands_still(request_id) or self.is_stuck(request)):
                back.append(request_id)
                self.waiting_since[request_id] = self.now
                request.lost_at = self.now if request.lost_at is None else request.lost_at
        self.put_back(back)

    def take_back(self, limit: int) -> None:
        """Take requests that only wait in engines to the front of the queue, in the order of arrival."""
        back: list[str] = []
        for link in self.links.values():
            unstarted = [i for i in link.held if not self.requests[i].delivered and not self.requests[i].trial]
            total = link.waiting + link.beat_running
            part = min(len(unstarted), round(link.waiting * len(link.held) / total)) if total else 0
            taken = unstarted[-part:][: limit - len(back)] if part and not link.draining else []
            link.waiting = max(0, link.waiting - len(taken))
            back += taken
            for request_id in taken:
                del link.held[request_id]
        for request_id in back:
            self.requests[request_id].moves += 1
            self.waiting_since[request_id] = self.now
        self.put_back(back)

    def put_back(self, request_ids: list[str]) -> None:
        """Let answers that have begun wait before the other requests, in the order of arrival."""
        arrivals = [*self.requests]
        self.queue = sorted([*request_ids, *self.queue], key=lambda i: (not self.requests[i].delivered, arrivals.index(i)))

    def end(self, request_id: str, outcome: str) -> None:
        self.requests[request_id].outcomes.append(outcome)
        self.requests[request_id].trial = ""
        if request_id in self.queue:
            self.queue.remove(request_id)
        for link in self.links.values():
            link.held.pop(request_id, None)

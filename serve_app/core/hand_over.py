"""`HandOvers` follows the requests that take their KV from a draining replica to another, from the question to the target's first token.

Pure. Only `Attempts` and `FleetState` call this module. The source ends its attempt, keeps the KV for a time, and says where it is; the
target reads it. A source that does not answer in time is not waited for, and a target that cannot read computes the prompt. If the target
neither reads nor computes, the request starts again. So a hand-over that fails costs time, and nothing else.

The source frees the KV when the target reports to it that the KV was read, or when the lease ends. `HandOvers` orders the source to free
it as soon as no read can be under way any more. An earlier order could give the blocks to another request while the target still reads.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from serve_app.core.instructions import FreeKeptKv
from serve_app.core.read_costs import ReadCosts
from serve_app.core.request import EngineOutput, RequestState, Resume
from serve_app.core.routing import Choice, ReplicaState

HANDED_OVER = "handed over"
"""The stop reason of an attempt's last output after a replica was asked to hand it over."""
ANSWER_S = 2.0
"""The longest wait for that output. A step takes less, and until then tokens come as before."""
READ_S = 10.0
"""The longest wait for the first token of an attempt that reads KV. The first read between two engines has to connect them."""
KEPT_S = 60.0
"""The time after which KV counts as freed by its source, whose lease lasts 30 s and is extended while the target waits to read."""
_LATE = 4.0
"""A late read counts as one that took this many times as long as expected."""


@dataclass(slots=True)
class _Ended:
    """Reads of one source whose end the same frame showed: ``num`` reads of ``tokens`` in all took ``seconds``; 0 reads if learned."""

    at: float
    seconds: float
    num: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Asked:
    request: RequestState
    target: Choice
    at: float


@dataclass(frozen=True, slots=True)
class _Kept:
    """KV that the replica ``source`` keeps of an ended attempt since ``at``, for the attempt ``reader`` at the replica ``target``."""

    source: str
    target: str
    at: float
    reader: str


class HandOvers:
    """The hand-overs that were asked for and have no answer, the reads, and the KV that sources keep."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        """Hand-overs by how they ended: ``read``; ``computed``: the target read nothing; ``late``: the target neither read nor computed in
        time; ``not_kept``: the source had no whole KV; ``no_target``: the target took no request any more; ``unanswered``; ``ended``: the
        request ended, or a replica was lost."""
        self.tokens = 0
        """Tokens whose KV was read."""
        self.num_bytes = 0
        """Bytes of that KV."""
        self.asked: Counter[str] = Counter()
        """Hand-overs that were asked for, by cause: ``drain``; ``prompts``: a long prompt began, or its first token came; ``balance``:
        another replica had less to do; ``role``: the replica computes prompts, and others make answers."""
        self.costs = ReadCosts()
        self._asked: dict[str, _Asked] = {}
        self._reading: dict[str, tuple[RequestState, float]] = {}
        """Requests by id that read KV and have no token since, and when that began."""
        self._ended: dict[str, _Ended] = {}
        """Source -> its reads that ended last."""
        self._kept: dict[str, _Kept] = {}
        """Attempt that was handed over -> its KV, until the target has a token of the next attempt."""

    @staticmethod
    def is_possible(request: RequestState, source: ReplicaState, target: ReplicaState) -> bool:
        """Return whether the request can take its KV from the source to the target."""
        if not source.kv_transfer or source.kv_transfer != target.kv_transfer or source.weights != target.weights:
            return False
        return bool(request.emitted_ids) and request.resume is Resume.CONTINUE

    def ask(self, request: RequestState, target: Choice, cause: str, now: float) -> None:
        """Note that the source was asked, and keep a place at the target, whose ``saves_s`` is what the move should save."""
        self.asked[cause] += 1
        request.is_leaving = True
        request.trail.moves_on(cause, now, saves_s=target.saves_s, read_s=self.costs.seconds(_tokens(request)))
        target.replica.coming.add(request.request_id)
        # The trail has the seconds with the move; the choice of the replica saved none.
        self._asked[request.request_id] = _Asked(request, target._replace(saves_s=0.0), now)

    def end(self, request: RequestState, result: str) -> Choice | None:
        """Forget the request's hand-over, whose place at the target is free again; return the target, None if nothing was asked."""
        if (reading := self._reading.pop(request.request_id, None)) is not None:
            request.reads_kv = False
            if result == "late":  # perhaps the target hangs, which says nothing about reads: so it counts only in part
                tokens = _tokens(request)
                self.costs.learn(tokens, min(READ_S, _LATE * self.costs.seconds(tokens)), reading[1] + READ_S)
            self.count(request, "ended" if request.is_leaving or not result else result)
        if (asked := self._asked.pop(request.request_id, None)) is None:
            return None
        request.is_leaving = False
        asked.target.replica.coming.discard(request.request_id)
        if result:
            self.count(request, result)
        return asked.target

    def count(self, request: RequestState, result: str, read_tokens: int = 0) -> None:
        """Count how a hand-over of the request ended."""
        self.results[result] += 1
        request.trail.moved(result, read_tokens)

    def overdue(self, now: float) -> list[tuple[RequestState, str]]:
        """Return the requests whose source has not answered, or whose target has made no token, in time; and the result of each."""
        unanswered = [(asked.request, "unanswered") for asked in self._asked.values() if now - asked.at > ANSWER_S]
        reading = [request for request, at in self._reading.values() if now - at > READ_S and not request.is_leaving]
        return unanswered + [(request, "late") for request in reading]

    def tick(self, now: float) -> None:
        """Learn from the reads that ended, and forget old costs and KV that is freed by now."""
        self.costs.tick(now)
        if self._kept:
            self._kept = {attempt_id: kept for attempt_id, kept in self._kept.items() if now - kept.at < KEPT_S}
        for ended in self._ended.values():
            self._learn(ended)
        self._ended = {source: ended for source, ended in self._ended.items() if now - ended.at < READ_S}

    def coming_tokens(self) -> Counter[str]:
        """Return, by replica, the tokens whose KV it reads, or is to read once the source has answered."""
        coming = Counter[str]()
        for asked in self._asked.values():
            coming[asked.target.replica.replica_id] += _tokens(asked.request)
        for request, _ in self._reading.values():
            coming[request.replica_id or ""] += _tokens(request)
        return coming

    def begin_read(self, request: RequestState, now: float) -> None:
        """Note that an attempt starts that reads KV."""
        request.reads_kv = True
        self._reading[request.request_id] = request, now
        source, target = request.trail.replicas[-2:]
        self._kept[_attempt_before(request)] = _Kept(source, target, now, request.attempt_id)

    def note_read(self, request: RequestState, output: EngineOutput, target: ReplicaState, now: float) -> FreeKeptKv:
        """Count what the target read, which its first output with a token says; return the order to free the KV.

        Usually the target has reported to the source before, and the order does nothing. The target has not if it could not reach the
        source, or found no use for the KV.
        """
        request.reads_kv = False
        _, began_at = self._reading.pop(request.request_id)
        source = request.trail.replicas[-2]
        self._kept.pop(_attempt_before(request), None)
        before = self._ended.get(source)
        if before is not None and before.at == now:
            before.num += 1
            before.tokens += _tokens(request)
        else:
            # Reads of one source share its link: while an earlier one went on, this one waited.
            since = began_at if before is None else max(began_at, before.at)
            if before is not None:
                self._learn(before)
            self._ended[source] = _Ended(now, now - since, 1, _tokens(request))
        tokens = int(getattr(output.prefill_stats, "num_external_cached_tokens", 0))
        self.tokens += tokens
        self.num_bytes += tokens * target.kv_token_bytes
        self.count(request, "read" if tokens else "computed", tokens)
        return FreeKeptKv(source, _attempt_before(request))

    def note_late_token(self, replica_id: str, attempt_id: str) -> list[FreeKeptKv]:
        """Return the order to free the KV that an attempt was to read whose request has ended here before this token of it came."""
        found = [before for before, kept in self._kept.items() if (kept.target, kept.reader) == (replica_id, attempt_id)]
        return [FreeKeptKv(self._kept.pop(before).source, before) for before in found]

    def target_died(self, replica_id: str) -> list[FreeKeptKv]:
        """Return the orders to free the KV that a replica was to read whose engine has ended."""
        dead = {attempt_id: kept for attempt_id, kept in self._kept.items() if kept.target == replica_id}
        for attempt_id in dead:
            del self._kept[attempt_id]
        return [FreeKeptKv(kept.source, attempt_id) for attempt_id, kept in dead.items()]

    def _learn(self, ended: _Ended) -> None:
        if ended.num:
            self.costs.learn(round(ended.tokens / ended.num), ended.seconds / ended.num, ended.at)
            ended.num = 0

    def validate(self, requests: Collection[RequestState], replicas: Collection[ReplicaState]) -> None:
        """Assert that a place is kept for each hand-over that has no answer, and for nothing else."""
        leaving = {request.request_id for request in requests if request.is_leaving}
        assert leaving == self._asked.keys()
        assert all(asked.request.replica_id is not None for asked in self._asked.values())
        coming = {request_id for replica in replicas for request_id in replica.coming}
        assert coming <= leaving
        assert {request.request_id for request in requests if request.reads_kv} == self._reading.keys()
        assert all(request.replica_id is not None for request, _ in self._reading.values())


def _attempt_before(request: RequestState) -> str:
    """Return the id of the attempt before the present one."""
    return f"{request.request_id}@{request.attempt - 1}"


def _tokens(request: RequestState) -> int:
    return request.prompt_tokens + len(request.emitted_ids)

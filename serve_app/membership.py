"""The lease board is a small Ray actor that knows which replicas and ingresses there are: they renew leases, and ingresses long-poll it.

The request path never calls the actor. While it is dead, links stay open and no replica is ejected. Ray restarts it empty, and the next
renewal of every member, within ``renew_s``, puts the member back. A lease that ends only because it could not be renewed closes no link:
``FleetClient`` drops a replica when its link is lost, never because of this board.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import ray
from ray._common.constants import HEAD_NODE_RESOURCE_NAME

from serve_app.config import MembershipSettings
from serve_app.core.order_board import OrderBoard
from serve_app.core.places import Applicant, Places
from serve_app.core.quota_shares import Answer, QuotaShares, Report
from serve_app.core.sleep import Claim, Order
from serve_app.environment import as_typed
from serve_app.errors import ClusterFailed, LeaseBoardSilent
from serve_app.host.steady_clock import steady_clock

logger = logging.getLogger(__name__)

_POLL_S = 10.0
_RETRY_S = 0.5
_LOOK_AT_PLACES_S = 0.25

AWAY = (ray.exceptions.RayError, OSError, ValueError, RuntimeError)
"""Errors of a call while the board or Ray's control store is away. OSError includes TimeoutError and Ray's own failures to connect.
ValueError means that no actor has the name any more, RuntimeError that no thread can be started to look for it. None of these may end a
member's task: Serve would replace a healthy replica."""


@dataclass(frozen=True)
class Lease:
    """One member. ``load`` is for people (``serve-app status``); the only decision from it is Retry-After, by ``start_s``.

    ``epoch`` is for people, too: when the member began to serve, in nanoseconds of Unix time. `serve-app status --json` shows it, and
    tools/cold_start.py and tests use it to measure starts.
    """

    member_id: str
    """The id that Serve gave to the process, a replica of a model or an ingress."""
    role: Literal["replica", "ingress"]
    model: str
    host: str
    port: int
    epoch: int
    pid: int
    vllm_version: str = ""
    state: Literal["ready", "draining"] = "ready"
    load: dict[str, Any] = field(default_factory=dict)
    release: str = ""
    """For a replica, the digest of its model's settings (`ModelSettings.release`)."""
    adapters: tuple[int, ...] = ()
    """For a replica, the numbers of the LoRA adapters that its engine has loaded."""
    quarantined: tuple[tuple[str, str, float], ...] = ()
    """For an ingress, what it has quarantined: model, fingerprint, and the seconds that are left."""
    condemned: tuple[tuple[str, str], ...] = ()
    """For an ingress, canaries that it found bad: digest of the release, and why."""
    prefill_share: float | None = None
    """For a replica of a model with pools, what the board adds: the share of its model's replicas that should compute long prompts, by the
    autoscaler. None: the autoscaler has said nothing."""
    expiry_s: float = 0.0
    """Seconds after a renewal at which the lease ends; `Membership.keep` fills it in. 0: the board's own `expiry_s`.

    A board outlives a change of `membership.expiry_s`, so each lease must state its own. A member of another version may send a lease
    without this field, and a board of another version ignores it.
    """

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles leases between processes whose versions may differ during an update. All versions know this key.
        return {_KEYS.get(name, name): value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({_NAMES.get(key, key): value for key, value in state.items()})

    def row(self) -> dict[str, Any]:
        """Return the lease as plain data, under the keys of `GET /fleet` and of `serve-app status --json`."""
        row = {_KEYS.get(name, name): value for name, value in asdict(self).items()}
        if self.prefill_share is None:
            del row["prefill_share"]  # most models have no pools
        return row

    def concerns(self) -> tuple[object, ...]:
        """Return the fields on which other members act at once."""
        return self.state, self.port, {fingerprint for _, fingerprint, _ in self.quarantined}, self.condemned


_KEYS = {"member_id": "replica_id"}
_NAMES = {key: name for name, key in _KEYS.items()}


@dataclass(frozen=True)
class ScalingNote:
    """One decision of the autoscaler that changed the number of replicas, for people who watch the fleet."""

    time: float
    """Seconds since the epoch."""
    model: str
    """`(ingresses)` for the ingresses."""
    before: int
    after: int
    rule: str
    """The rule of the autoscaler whose wish won (docs/autoscaling.md)."""


@dataclass(frozen=True)
class PoolNote:
    """The share of a model's replicas that should compute long prompts, 0..1, by the autoscaler."""

    model: str
    prefill_share: float
    models: tuple[str, ...] = ()
    """All models of which the autoscaler says this; the board forgets the shares of others. Empty: they stay."""


MAX_NOTES = 100
"""The most scaling notes that a board keeps; it drops the oldest."""


class LeaseBoard:
    """The actor's class, in plain asyncio, so that tests run it without Ray. Versions count changes of the member set."""

    def __init__(self, expiry_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._expiry_s = expiry_s
        self._now = now
        self._leases: dict[str, tuple[Lease, float]] = {}
        self._notes: deque[ScalingNote] = deque(maxlen=MAX_NOTES)
        self._kept = b""
        self._prefill_shares: dict[str, float] = {}
        self._clock = steady_clock()
        self._shares = QuotaShares(expiry_s, self._clock())
        self._orders = OrderBoard(expiry_s)
        self._places = Places(expiry_s, now=now())
        self._places_changed = asyncio.Event()
        self._version = 1
        self._changed = asyncio.Event()
        # A version of an earlier incarnation, which a caller still has, must never look current.
        self._incarnation = time.time_ns()

    def renew(self, lease: Lease) -> None:
        """Add or renew a member; only a new one, another state, a new quarantine or a condemned canary wakes the pollers."""
        known = self._leases.get(lease.member_id)
        self._leases[lease.member_id] = (lease, self._now() + self._expiry_of(lease))
        if known is None or known[0].concerns() != lease.concerns():
            self._bump()

    def release(self, member_id: str) -> None:
        """Remove a member at once, because it stops."""
        if self._leases.pop(member_id, None) is not None:
            self._bump()
        self._places.forget(member_id, now=self._now())
        self._wake_places()

    def members(self) -> list[Lease]:
        """Return the members whose lease has not ended."""
        self._expire()
        return [self._with_share(lease) for lease, _ in self._leases.values()]

    def note(self, note: ScalingNote) -> None:
        """Keep a decision of the autoscaler, without waking the pollers."""
        self._notes.append(note)

    def plan_pools(self, note: PoolNote) -> None:
        """Tell all ingresses how the replicas of a model divide into pools; repeats wake no poller.

        The board outlives a change of the configuration, so the shares of models that no longer have pools are removed.
        """
        known = note.models or self._prefill_shares
        shares = {name: share for name, share in self._prefill_shares.items() if name in known} | {note.model: note.prefill_share}
        if shares != self._prefill_shares:
            self._prefill_shares = shares
            self._bump()

    def keep(self, data: bytes) -> None:
        """Keep the autoscaler's memory for the next controller (`autoscaling/memory.py`)."""
        self._kept = data

    def kept(self) -> bytes:
        """Return the memory kept last, empty if there is none."""
        return self._kept

    def exchange_shares(self, report: Report) -> Answer | None:
        """Exchange an ingress's shares of tenants' quotas, without waking the pollers."""
        if (answer := self._shares.exchange(report, self._clock())) is None:
            return None
        waits = self._orders.exchange(
            report.ingress, report.waits, self._now(), number=report.number, last_answered=report.last_answered
        )
        return answer._replace(waits=waits)

    async def claim_place(self, applicant: Applicant, claim: Claim, seen: Order, timeout_s: float) -> Order:
        """Take in a replica's claim to the GPUs that it shares. Return the answer.

        It waits until the answer differs from ``seen``, at most ``timeout_s`` seconds.
        """
        self._places.report(applicant, claim, now=self._now())
        self._wake_places()
        deadline = self._now() + timeout_s
        while True:
            order = self._places.order(applicant.replica_id, now=self._now())
            if order != seen or (left := deadline - self._now()) <= 0:
                return order
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _LOOK_AT_PLACES_S)):  # a stay may be over, or a holder silent
                    await self._places_changed.wait()
            self._places.settle(self._now())

    def _wake_places(self) -> None:
        self._places_changed.set()
        self._places_changed = asyncio.Event()

    def report(self) -> dict[str, Any]:
        """Return members and scaling notes as plain data, for people who watch the fleet. Notes are in order of time."""
        return {"members": [lease.row() for lease in self.members()], "decisions": [asdict(note) for note in self._notes]}

    async def wait(self, seen: tuple[int, int], timeout_s: float) -> tuple[tuple[int, int], list[Lease]]:
        """Return (version, members) as soon as the version differs from ``seen``, or after ``timeout_s``."""
        deadline = self._now() + timeout_s
        self._expire()
        while (self._incarnation, self._version) == seen and (left := deadline - self._now()) > 0:
            try:
                async with asyncio.timeout(min(left, self._shortest_expiry_s() / 4)):
                    await self._changed.wait()
            except TimeoutError:
                self._expire()
        return (self._incarnation, self._version), self.members()

    def _with_share(self, lease: Lease) -> Lease:
        share = self._prefill_shares.get(lease.model) if lease.role == "replica" else None
        return lease if share is None else replace(lease, prefill_share=share)

    def _expiry_of(self, lease: Lease) -> float:
        return lease.expiry_s or self._expiry_s

    def _shortest_expiry_s(self) -> float:
        return min((self._expiry_of(lease) for lease, _ in self._leases.values()), default=self._expiry_s)

    def _expire(self) -> None:
        now = self._now()
        ended = [i for i, (_, until) in self._leases.items() if until < now]
        for member_id in ended:
            del self._leases[member_id]
        if ended:
            self._bump()

    def _bump(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


def board_name(application: str) -> str:
    return f"{application}-leases"


def lease_board(application: str, settings: MembershipSettings) -> Any:
    """Return a handle of the application's board; the first caller creates it."""
    return (
        ray.remote(LeaseBoard)
        .options(
            name=board_name(application),
            namespace=application,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            # On the node of Serve's controller. A worker node with the board would never be idle, and never be removed.
            resources={HEAD_NODE_RESOURCE_NAME: 0.001},
            max_concurrency=1000,
        )
        .remote(settings.expiry_s)
    )


class Membership:
    """A member's connection to the board. It retries after every failure of the board."""

    def __init__(self, application: str, settings: MembershipSettings) -> None:
        self._application = application
        self._settings = settings
        self._board: Any = None

    @property
    def claim_expiry_s(self) -> float:
        """Seconds after which a claim to GPUs ends, longer than two claims in a row that are lost or late."""
        return max(self._settings.expiry_s, 3 * self._settings.renew_s + 1.0)

    async def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            if self._board is None:  # in a thread: with Ray's control store away, this waits for it
                self._board = await asyncio.to_thread(lease_board, self._application, self._settings)
            return await getattr(self._board, method).remote(*args)

    async def keep(self, lease: Callable[[], Lease]) -> None:
        """Renew the lease until cancelled. A board that does not answer is logged once and tried again."""
        failing = False
        while True:
            try:
                renewed = replace(lease(), expiry_s=self._settings.expiry_s)
                await self._call("renew", renewed, timeout_s=self._settings.renew_s)
                failing = False
            except AWAY as exc:
                if not failing:
                    logger.warning("lease not renewed: %s: %s", type(exc).__name__, exc)
                failing = True
                if not isinstance(exc, TimeoutError):  # after a late answer the handle is still valid
                    self._board = None
                    await asyncio.sleep(_RETRY_S)
                    continue
            await asyncio.sleep(self._settings.renew_s)

    async def release(self, member_id: str) -> None:
        """Give up the lease; a dead board has forgotten it anyway."""
        try:
            await self._call("release", member_id, timeout_s=self._settings.renew_s)
        except AWAY as exc:
            logger.info("lease not released: %s", exc)

    async def exchange_shares(self, report: Report) -> Answer | None:
        """Return `LeaseBoard.exchange_shares`.

        Raises:
            LeaseBoardSilent: The board does not answer, or is of a release that knows no shares.
        """
        try:
            answer: Answer | None = await self._call("exchange_shares", report, timeout_s=1.0)
        except (*AWAY, AttributeError) as exc:
            if not isinstance(exc, TimeoutError):
                self._board = None
            raise LeaseBoardSilent(retry_after_s=self._settings.renew_s) from exc
        return answer

    async def claim_place(self, applicant: Applicant, claim: Claim, seen: Order) -> Order:
        """Return `LeaseBoard.claim_place`, within `renew_s`.

        Raises:
            ClusterFailed: The board is of a release that knows no places.
            LeaseBoardSilent: The board does not answer.
        """
        renew_s = self._settings.renew_s
        try:
            order: Order = await self._call("claim_place", applicant, claim, seen, renew_s, timeout_s=2 * renew_s)
        except AttributeError as exc:
            self._board = None
            problem = "models.NAME.sleep needs a lease board that gives out GPUs, and the application's is of an older release"
            raise ClusterFailed(problem, f"run `{as_typed()} down`, then `{as_typed()} up`") from exc
        except AWAY as exc:
            if not isinstance(exc, TimeoutError):
                self._board = None
            raise LeaseBoardSilent(retry_after_s=renew_s) from exc
        return order

    async def report(self) -> dict[str, Any]:
        """Return `LeaseBoard.report`.

        Raises:
            LeaseBoardSilent: The board does not answer.
        """
        try:
            return dict(await self._call("report", timeout_s=self._settings.renew_s))
        except AWAY as exc:
            if not isinstance(exc, TimeoutError):
                self._board = None
            raise LeaseBoardSilent(retry_after_s=self._settings.renew_s) from exc

    async def watch(self, on_members: Callable[[list[Lease]], Awaitable[None] | None]) -> None:
        """Call ``on_members`` with each new set of members until cancelled; while the board is away, the last set stays valid."""
        seen = (0, 0)
        while True:
            try:
                seen, members = await self._call("wait", seen, _POLL_S, timeout_s=_POLL_S + self._settings.expiry_s)
            except AWAY as exc:
                logger.info("lease board does not answer: %s: %s", type(exc).__name__, exc)
                self._board = None
                await asyncio.sleep(_RETRY_S)
                continue
            if (result := on_members(members)) is not None:
                await result

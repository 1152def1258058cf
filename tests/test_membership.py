"""These tests run the lease board as a plain object with its own clock; no Ray."""

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from serve_app import membership
from serve_app.config import MembershipSettings
from serve_app.errors import LeaseBoardSilent
from serve_app.membership import MAX_NOTES, Lease, LeaseBoard, Membership, PoolNote, ScalingNote, board_name
from tests.doubles.fleet import in_loop, until

A = Lease("a", "replica", "tiny", "10.0.0.1", 4000, epoch=1, pid=11)
B = Lease("b", "ingress", "", "10.0.0.2", 8010, epoch=2, pid=12)
FOREVER_S = 1e6


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def board(clock: Clock, expiry_s: float = 6.0) -> LeaseBoard:
    return LeaseBoard(expiry_s, clock)


def test_members_are_those_whose_lease_was_renewed_in_time() -> None:
    clock = Clock()
    leases = board(clock)
    leases.renew(A)
    clock.now += 4
    leases.renew(B)
    clock.now += 2
    assert leases.members() == [A, B]
    clock.now += 1
    assert leases.members() == [B]
    leases.renew(A)
    assert leases.members() == [B, A]


def test_a_member_whose_configuration_has_another_expiry_than_the_boards_lives_by_its_own() -> None:
    clock = Clock()
    leases = board(clock, expiry_s=6.0)
    slow, quick = replace(A, expiry_s=30.0), replace(B, expiry_s=3.0)
    for member in (slow, quick):
        leases.renew(member)
    clock.now += 4
    assert leases.members() == [slow]
    clock.now += 26
    assert leases.members() == [slow]
    clock.now += 1
    assert leases.members() == []


def test_a_lease_of_a_version_that_knows_no_expiry_lives_by_the_boards() -> None:
    clock = Clock()
    leases = board(clock, expiry_s=6.0)
    old = pickle.loads(pickle.dumps(A))
    del old.__dict__["expiry_s"]  # as it comes out of pickle, where its fields are put back without a call of __init__
    leases.renew(old)
    clock.now += 6
    assert leases.members() == [A]
    clock.now += 1
    assert leases.members() == []


def test_a_lease_crosses_versions_under_the_key_that_all_of_them_know() -> None:
    state = A.__getstate__()
    assert (state["replica_id"], "member_id" in state) == ("a", False)
    old = object.__new__(Lease)
    old.__setstate__(state)
    assert old == pickle.loads(pickle.dumps(A)) == A


@in_loop
async def test_a_new_quarantine_wakes_the_pollers_and_its_passing_time_does_not() -> None:
    leases = board(Clock())
    leases.renew(B)
    seen, _ = await leases.wait((0, 0), FOREVER_S)
    poison = replace(B, quarantined=(("tiny", "f", 600.0),))
    leases.renew(poison)
    seen, members = await leases.wait(seen, FOREVER_S)
    assert members == [poison]
    leases.renew(later := replace(B, quarantined=(("tiny", "f", 598.0),)))
    assert await leases.wait(seen, 0.0) == (seen, [later])


def test_a_member_that_stops_is_gone_at_once() -> None:
    leases = board(Clock())
    leases.renew(A)
    leases.release("a")
    leases.release("a")
    assert leases.members() == []


@in_loop
async def test_a_poller_with_no_or_an_old_version_is_answered_at_once() -> None:
    leases = board(Clock())
    first, members = await leases.wait((0, 0), FOREVER_S)
    assert members == []
    leases.renew(A)
    second, members = await leases.wait(first, FOREVER_S)
    assert members == [A]
    assert second != first


@in_loop
async def test_a_change_wakes_every_poller_and_a_renewal_does_not() -> None:
    leases = board(Clock(), expiry_s=FOREVER_S)
    leases.renew(A)
    seen, _ = await leases.wait((0, 0), FOREVER_S)
    polls = [asyncio.create_task(leases.wait(seen, FOREVER_S)) for _ in range(2)]
    await asyncio.sleep(0)
    leases.renew(replace(A, load={"running": 3}))
    for _ in range(3):
        await asyncio.sleep(0)
    assert [poll.done() for poll in polls] == [False, False]
    draining = replace(A, state="draining")
    leases.renew(draining)
    assert [(await poll)[1] for poll in polls] == [[draining], [draining]]


@in_loop
async def test_a_release_and_another_address_wake_pollers_too() -> None:
    leases = board(Clock(), expiry_s=FOREVER_S)
    leases.renew(A)
    moved = replace(A, port=4001)
    changes: list[tuple[Callable[[], None], list[Lease]]] = [
        (lambda: leases.renew(moved), [moved]),
        (lambda: leases.release("a"), []),
    ]
    for change, members in changes:
        seen, _ = await leases.wait((0, 0), FOREVER_S)
        poll = asyncio.create_task(leases.wait(seen, FOREVER_S))
        await asyncio.sleep(0)
        change()
        assert (await poll)[1] == members


@in_loop
async def test_a_poller_learns_of_a_lease_that_ran_out_while_it_waited() -> None:
    clock = Clock()
    leases = board(clock, expiry_s=0.04)  # a waiting poll looks four times per lease
    leases.renew(A)
    seen, _ = await leases.wait((0, 0), FOREVER_S)
    poll = asyncio.create_task(leases.wait(seen, FOREVER_S))
    await asyncio.sleep(0)
    clock.now += 1
    assert (await poll)[1] == []


@in_loop
async def test_a_poller_learns_of_the_end_of_a_lease_that_is_shorter_than_the_boards() -> None:
    clock = Clock()
    leases = board(clock, expiry_s=FOREVER_S)
    leases.renew(replace(A, expiry_s=0.04))
    seen, _ = await leases.wait((0, 0), FOREVER_S)
    poll = asyncio.create_task(leases.wait(seen, FOREVER_S))
    await asyncio.sleep(0)
    clock.now += 1
    assert (await poll)[1] == []


@in_loop
async def test_a_poll_without_a_change_ends_with_what_is_known() -> None:
    leases = board(Clock())
    leases.renew(A)
    seen, _ = await leases.wait((0, 0), FOREVER_S)
    assert await leases.wait(seen, 0.0) == (seen, [A])


@in_loop
async def test_a_version_of_an_earlier_incarnation_never_looks_current() -> None:
    before, after = board(Clock()), board(Clock())
    before.renew(A)
    after.renew(B)
    seen, _ = await before.wait((0, 0), FOREVER_S)
    assert (await after.wait(seen, FOREVER_S))[1] == [B]


@in_loop
async def test_a_poll_that_is_cancelled_leaves_the_board_as_it_was() -> None:
    leases = board(Clock())
    seen, _ = await leases.wait((0, 0), FOREVER_S)
    poll = asyncio.create_task(leases.wait(seen, FOREVER_S))
    await asyncio.sleep(0)
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    assert poll.cancelled()
    assert await leases.wait(seen, 0.0) == (seen, [])


class Handle:
    """Ray's handle of a board; the first calls raise what is in ``failures``, in their order."""

    def __init__(self, board: LeaseBoard, failures: list[Exception]) -> None:
        self._board = board
        self._failures = failures

    def __getattr__(self, method: str) -> Any:
        async def remote(*args: Any) -> Any:
            if self._failures:
                raise self._failures.pop(0)
            result = getattr(self._board, method)(*args)
            return await result if asyncio.iscoroutine(result) else result

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize(
    "failure",
    [
        OSError("Failed to connect to GCS"),
        ConnectionError("refused"),
        TimeoutError(),
        ray.exceptions.RaySystemError("away"),
        ValueError("no such actor"),
        RuntimeError("can't start new thread"),
    ],
    ids=lambda failure: type(failure).__name__,
)
@in_loop
async def test_no_failure_of_rays_control_plane_ends_a_members_tasks(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    leases, failures, handles_refused = board(Clock(), expiry_s=FOREVER_S), [failure] * 4, [failure] * 2

    def handle(*_: object) -> Handle:
        if handles_refused:
            raise handles_refused.pop()
        return Handle(leases, failures)

    monkeypatch.setattr(membership, "lease_board", handle)
    monkeypatch.setattr(membership, "_RETRY_S", 0.0)
    settings = MembershipSettings(renew_s=0.01, expiry_s=0.1)
    seen: list[list[Lease]] = []
    kept = replace(A, expiry_s=0.1)
    member = Membership("app", settings)
    tasks = [asyncio.create_task(member.keep(lambda: A)), asyncio.create_task(member.watch(seen.append))]
    await until(lambda: [kept] in seen or any(task.done() for task in tasks))
    assert ([task.done() for task in tasks], failures) == ([False, False], [])
    failures.append(failure)
    await member.release("a")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_report_has_the_members_and_the_latest_decisions() -> None:
    leases = board(Clock())
    leases.renew(A)
    for number in range(MAX_NOTES + 1):
        leases.note(ScalingNote(float(number), "tiny", number, number + 1, "demand"))
    report = leases.report()
    assert [member["replica_id"] for member in report["members"]] == ["a"]
    assert len(report["decisions"]) == MAX_NOTES
    assert report["decisions"][0] == {"time": 1.0, "model": "tiny", "before": 1, "after": 2, "rule": "demand"}


@in_loop
async def test_the_leases_of_a_models_replicas_say_how_these_divide_into_pools_and_a_change_wakes_pollers() -> None:
    leases = board(Clock())
    other = replace(A, member_id="o", model="other")
    for lease in (A, B, other):
        leases.renew(lease)
    seen, _ = await leases.wait((0, 0), FOREVER_S)
    leases.plan_pools(PoolNote("tiny", 0.25))
    changed, members = await leases.wait(seen, FOREVER_S)
    assert changed != seen
    assert members == [replace(A, prefill_share=0.25), B, other]
    leases.plan_pools(PoolNote("tiny", 0.25))
    assert (await leases.wait((0, 0), FOREVER_S))[0] == changed, "a repeat is no change"
    assert ["prefill_share" in lease.row() for lease in members] == [True, False, False]


def test_the_board_forgets_the_shares_of_models_that_the_autoscaler_no_longer_divides() -> None:
    leases = board(Clock())
    for lease in (A, replace(A, member_id="o", model="other")):
        leases.renew(lease)
    leases.plan_pools(PoolNote("tiny", 0.25))
    leases.plan_pools(PoolNote("other", 0.5, ("tiny", "other")))
    assert [lease.prefill_share for lease in leases.members()] == [0.25, 0.5]
    leases.plan_pools(PoolNote("other", 0.5, ("other",)))
    assert [lease.prefill_share for lease in leases.members()] == [None, 0.5]


@in_loop
async def test_a_report_of_a_board_that_is_away_fails_by_one_error_and_the_next_one_may_be_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leases = board(Clock())
    leases.renew(B)
    failures: list[Exception] = [OSError("Failed to connect to GCS")]
    monkeypatch.setattr(membership, "lease_board", lambda *_: Handle(leases, failures))
    member = Membership("app", MembershipSettings(renew_s=1.0, expiry_s=6.0))
    with pytest.raises(LeaseBoardSilent, match=r"retry in 1\.0 s"):
        await member.report()
    assert [row["replica_id"] for row in (await member.report())["members"]] == ["b"]


def test_two_applications_have_two_boards() -> None:
    assert board_name("one") == "one-leases"

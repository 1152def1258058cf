import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from serve_app.errors import BodyTooSlow, RequestTooLarge
from serve_app.ingress.routes import bodies
from serve_app.ingress.routes.bodies import ROOM_BYTES, SMALL_BYTES, Bodies
from tests.doubles.fleet import in_loop

LIMIT = 10 << 20
Receive = Callable[[], Awaitable[dict[str, Any]]]


def sending(*pieces: bytes, more: bool = False) -> Receive:
    """Return a receive that gives these pieces, and then nothing any more if ``more``."""
    rest = [*pieces]

    async def receive() -> dict[str, Any]:
        if not rest:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": rest.pop(0), "more_body": bool(rest) or more}

    return receive


def scope(announced: int | None = None) -> dict[str, Any]:
    return {"headers": [] if announced is None else [(b"content-length", b"%d" % announced)]}


@in_loop
async def test_a_body_is_all_of_its_pieces() -> None:
    whole = bytes(range(256)) * 8 * 1024
    pieces = [whole[at : at + 60_000] for at in range(0, len(whole), 60_000)]
    reader = Bodies(LIMIT, 5.0)
    for announced in (None, len(whole)):
        assert await reader.read(scope(announced), sending(*pieces)) == whole
    assert await reader.read(scope(), sending(b"")) == b""


@in_loop
async def test_a_body_above_the_limit_is_refused_as_soon_as_that_is_known() -> None:
    reader = Bodies(1000, 5.0)
    with pytest.raises(RequestTooLarge):
        await reader.read(scope(1001), sending(more=True))
    with pytest.raises(RequestTooLarge):
        await reader.read(scope(), sending(b"x" * 600, b"x" * 401, more=True))
    assert len(await reader.read(scope(), sending(b"x" * 600, b"x" * 400))) == 1000


@in_loop
async def test_a_client_that_goes_away_ends_its_body() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await Bodies(LIMIT, 5.0).read(scope(), receive)


@in_loop
async def test_large_bodies_wait_for_room_and_small_ones_do_not() -> None:
    reader, piece = Bodies(LIMIT, 5.0), b"x" * (SMALL_BYTES + 1)
    fit = ROOM_BYTES // LIMIT
    tasks = [asyncio.create_task(reader.read(scope(), sending(piece, more=True))) for _ in range(fit)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(reader.read(scope(), sending(piece, b"end")))
    assert await reader.read(scope(), sending(b"small")) == b"small"
    assert not waiting.done()
    tasks[0].cancel()
    assert await waiting == piece + b"end"
    assert reader._lines == {}
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert reader._taken.total() == 0


@in_loop
async def test_a_tenant_takes_half_of_the_room_and_others_find_the_rest() -> None:
    reader, piece = Bodies(LIMIT, 5.0), b"x" * (SMALL_BYTES + 1)
    slow = [asyncio.create_task(reader.read(scope(), sending(piece, more=True), "red")) for _ in range(20)]
    await asyncio.sleep(0)
    assert reader._taken["red"] <= ROOM_BYTES // 2
    assert await reader.read(scope(), sending(piece, b"end"), "blue") == piece + b"end"
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert reader._taken.total() == 0


@in_loop
async def test_a_slow_large_body_ends_early_where_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "FAIR_S", 0.05)
    reader, piece = Bodies(LIMIT, 60.0), b"x" * (SMALL_BYTES + 1)
    slow = [asyncio.create_task(reader.read(scope(), sending(piece, more=True))) for _ in range(ROOM_BYTES // LIMIT)]
    await asyncio.sleep(0)
    assert await reader.read(scope(), sending(piece, b"end")) == piece + b"end"
    for error in await asyncio.gather(*slow, return_exceptions=True):
        assert isinstance(error, BodyTooSlow)


@in_loop
async def test_a_refused_body_leaves_no_memory_with_its_error() -> None:
    reader = Bodies(1000, 5.0)
    with pytest.raises(RequestTooLarge) as caught:
        await reader.read(scope(), sending(b"x" * 600, b"x" * 600))
    trace, held = caught.value.__traceback__, []
    while trace is not None:
        held += [value for value in trace.tb_frame.f_locals.values() if isinstance(value, bytes | bytearray)]
        trace = trace.tb_next
    assert sum(map(len, held)) == 0

"""Ingresses of one fleet may listen on one port, and those of another fleet may not; real listeners."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from serve_app.config import IngressSettings
from serve_app.errors import ListenFailed
from serve_app.ingress.http import shared_port
from serve_app.ingress.http.listener import Listener
from serve_app.ingress.http.shared_port import fleet_id, refuse_another_fleets_port
from serve_app.ingress.routes.app import AppLimits, IngressApp
from tests.doubles.fleet import in_loop, settings
from tests.ingress.fake_fronts import front
from tests.ports import free_port


@contextlib.asynccontextmanager
async def listening(own_id: str) -> AsyncIterator[IngressSettings]:
    values = settings(ingress={"port": free_port()}).ingress
    app = IngressApp({"tiny": front("tiny")}, AppLimits(max_body_bytes=1000), version={}, fleet_id=own_id)
    listener = Listener(app, values)
    await listener.start()
    try:
        yield values
    finally:
        await listener.stop()


@in_loop
async def test_a_port_on_which_no_process_listens_is_free() -> None:
    await refuse_another_fleets_port(settings(ingress={"port": free_port()}).ingress, "own")


@in_loop
async def test_ingresses_of_one_fleet_share_a_port() -> None:
    async with listening("own") as values:
        await refuse_another_fleets_port(values, "own")
        await refuse_another_fleets_port(values.model_copy(update={"host": "0.0.0.0"}), "own")


@in_loop
async def test_a_port_of_another_fleet_is_refused_by_its_number_and_the_way_out() -> None:
    async with listening("another") as values:
        with pytest.raises(ListenFailed) as refused:
            await refuse_another_fleets_port(values, "own")
        said = f"cannot listen on 127.0.0.1:{values.port}: another application answers there; set ingress.port to a free port"
        assert str(refused.value) == said


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"])
@in_loop
async def test_a_port_of_something_else_is_refused(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    values = settings(ingress={"port": server.sockets[0].getsockname()[1]}).ingress
    with pytest.raises(ListenFailed):
        await refuse_another_fleets_port(values, "own")
    server.close()


@in_loop
async def test_who_does_not_answer_may_be_an_ingress_of_the_same_fleet_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_port, "_ANSWER_LIMIT_S", 0.05)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    values = settings(ingress={"port": server.sockets[0].getsockname()[1]}).ingress
    await refuse_another_fleets_port(values, "own")
    server.close()


def test_applications_of_one_name_on_two_clusters_and_two_of_one_cluster_have_different_ids() -> None:
    ids = {fleet_id(name, address) for name in ("a", "b") for address in ("127.0.0.1:6379", "127.0.0.1:6380")}
    assert len(ids) == 4

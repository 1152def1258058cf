"""A replica reserves a port for its engine, which the engine can listen on and no other replica gets."""

import socket

import pytest
import zmq

from serve_app.errors import ListenFailed
from serve_app.replica.side_channel import reserve
from tests.ports import free_port

HOST = "127.0.0.1"


def test_replicas_of_one_machine_reserve_different_ports_on_which_their_engines_listen() -> None:
    first_port = free_port()
    first = reserve(HOST, range(first_port, first_port + 64), "kv.port")
    second = reserve(HOST, range(first.port, first.port + 64), "kv.port")
    assert second.port > first.port
    assert first.environment() == {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(first.port)}
    with zmq.Context() as context, context.socket(zmq.ROUTER) as engine:  # as vLLM listens
        engine.bind(f"tcp://{HOST}:{first.port}")
        socket.create_connection((HOST, first.port)).close()
    for channel in (first, second):
        channel.sock.close()


def test_a_machine_without_a_free_port_is_named_with_the_setting() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ListenFailed, match=rf"{HOST}:{port}: Address already in use.*; set models.tiny.kv.port to a free port"
        ):
            reserve(HOST, range(port, port + 1), "models.tiny.kv.port")

"""This module runs the workers of an engine on a node other than its first, as ``vllm serve --headless`` does, in an engine's process."""

import socket
import threading
from collections.abc import Mapping
from typing import Any

from vllm.transformers_utils.config import maybe_register_config_serialize_by_value

from serve_app.errors import EngineDied
from serve_app.replica import pipe
from serve_app.replica.engine_core import ImpatientExecutor, engine_config, with_adapters


def run_workers(engine_args: Mapping[str, Any], sock: socket.socket, end: pipe.EngineEnd) -> None:
    """Load the model's part on this node, and wait until one of the workers ends. The engine core on the first node leads them.

    Raises:
        EngineDied: A worker has ended.
    """
    threading.Thread(target=end.run_thread, args=(lambda: _read_pings(sock, end),), name="pings", daemon=True).start()
    vllm_config = engine_config(with_adapters(engine_args), headless=True)
    maybe_register_config_serialize_by_value()
    executor = ImpatientExecutor(vllm_config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)
    raise EngineDied("a worker process has ended")


def _read_pings(sock: socket.socket, end: pipe.EngineEnd) -> None:
    """Count the supervisor's pings until the pipe closes, which its watch sees, too."""
    frames = pipe.frame_decoder()
    while data := sock.recv(1 << 16):
        for body in frames.receive_data(data):
            if isinstance(pipe.to_engine_decoder.decode(body), pipe.Ping):
                end.pinged()

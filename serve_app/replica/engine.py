"""The engine core process: its start and its ends. The engine itself is in ``engine_core.py``."""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from typing import Any

import msgspec

from serve_app.config import ModelSettings
from serve_app.replica import pipe

CALLABLE_METHODS = frozenset(
    {"add_lora", "is_sleeping", "list_loras", "pin_lora", "remove_lora", "reset_encoder_cache", "reset_mm_cache"}
    | {"reset_prefix_cache", "sleep", "wake_up"}
)
"""What an ingress may call on an engine core: nothing that runs code it sends or changes weights."""


def run(model: ModelSettings, model_path: str, sock: socket.socket, max_frame_bytes: int) -> None:
    """Build the engine core and serve the pipe until its other end closes. Returns never; ends the process."""
    engine: Any = None
    end = pipe.EngineEnd(sock)
    try:
        from serve_app.replica.engine_core import build_engine  # late: it imports vLLM, and a failure of that is told, too

        engine = build_engine(model, model_path, sock, end, max_frame_bytes)
        engine.run_busy_loop()
    except SystemExit:
        raise
    except BaseException as exc:
        end.send_failure(exc)
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.shutdown()
        os._exit(1)


def _end_with_supervisor(sock: socket.socket) -> None:
    """End this process as soon as the other end of the pipe is closed, also while a model is still loading.

    The workers of a multi-process executor watch their parent in the same way.
    """
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP | select.POLLHUP)
    poller.poll()
    os._exit(0)


def main() -> None:
    """Entry point of the process: argument 1 is the file descriptor of the pipe; the settings come as JSON on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the supervisor decides
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_supervisor, args=(sock,), name="supervisor-watch", daemon=True).start()
    start = msgspec.json.decode(sys.stdin.buffer.read())
    run(ModelSettings.model_validate(start["model"]), start["model_path"], sock, start["max_frame_bytes"])


if __name__ == "__main__":
    main()

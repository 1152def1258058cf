"""The engine core process: its start and its ends. The engine itself is in ``engine_core.py``."""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import psutil

from serve_app.replica import pipe
from serve_app.vllm_start import inspect_models_here, without_collection

CALLABLE_METHODS = frozenset(
    {"add_lora", "is_sleeping", "list_loras", "pin_lora", "remove_lora", "reset_encoder_cache", "reset_mm_cache"}
    | {"reset_prefix_cache", "sleep", "wake_up"}
)
"""What an ingress may call on an engine core: nothing that runs code it sends or changes weights."""

_RESOURCE_TRACKER = "multiprocessing.resource_tracker"
_GROUP_END_S = 5.0  # a worker may be inside a call of the GPU driver that no signal interrupts
_GROUP_POLL_S = 0.02


def run(sock: socket.socket) -> None:
    """Build the engine core and serve the pipe until its other end closes. Returns never; ends the process.

    What to build comes as JSON on standard input, as soon as the supervisor has the model's files; vLLM is imported meanwhile.
    """
    engine: Any = None
    end = pipe.EngineEnd(sock)
    try:
        with without_collection():
            from serve_app.replica.engine_core import build_engine  # late: it imports vLLM, and a failure of that is told, too

        imported = time.monotonic()
        start = msgspec.json.decode(sys.stdin.buffer.read())
        if start["device"] == "cpu":
            inspect_models_here()
        engine = build_engine(start["engine_args"], sock, end, start["max_frame_bytes"], download_s=time.monotonic() - imported)
        engine.run_busy_loop()
    except SystemExit:
        raise
    except BaseException as exc:
        end.send_failure(exc)
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.shutdown()
        os._exit(1)


def end_group(leader: int) -> bool:
    """Kill the engine core process ``leader`` and its workers: the group that ``leader`` was started to lead. This process is spared.

    So is Python's resource tracker, which ends by itself after the others and removes their shared memory.

    Returns:
        Whether there was a process to kill.
    """
    members = [process for process in psutil.process_iter() if _is_to_end(process, leader)]
    for process in members:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return bool(members)


def _is_to_end(process: psutil.Process, leader: int) -> bool:
    try:
        return (
            os.getpgid(process.pid) == leader
            and process.pid != os.getpid()
            and process.status() != psutil.STATUS_ZOMBIE
            and _RESOURCE_TRACKER not in " ".join(process.cmdline())
        )
    except (psutil.Error, ProcessLookupError):
        return False  # it has ended


def _end_with_supervisor(sock: socket.socket) -> None:
    """End this process and its workers as soon as the other end of the pipe is closed, also while a model is still loading.

    Workers of a multi-process executor watch this process only once they have loaded: until then they would hold their GPUs' memory.
    """
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP | select.POLLHUP)
    poller.poll()
    deadline = time.monotonic() + _GROUP_END_S
    while end_group(os.getpid()) and time.monotonic() < deadline:  # again: the main thread may be starting workers
        time.sleep(_GROUP_POLL_S)
    os._exit(0)


def main() -> None:
    """Entry point of the process: argument 1 is the file descriptor of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the supervisor decides
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_supervisor, args=(sock,), name="supervisor-watch", daemon=True).start()
    run(sock)


if __name__ == "__main__":
    main()

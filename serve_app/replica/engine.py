"""The engine core process: its start and its ends. The engine itself is in ``engine_core.py``."""

import select
import signal
import socket
import sys
import threading
import time

import msgspec

from serve_app.replica import pipe
from serve_app.replica.process_group import end_own_group
from serve_app.vllm_start import inspect_models_here, without_collection

CALLABLE_METHODS = frozenset(
    {"add_lora", "is_sleeping", "list_loras", "pin_lora", "remove_lora", "reset_encoder_cache", "reset_mm_cache"}
    | {"reset_prefix_cache", "sleep", "wake_up"}
)
"""What an ingress may call on an engine core: nothing that runs code it sends or changes weights."""


def run(sock: socket.socket) -> None:
    """Build the engine core and serve the pipe until its other end closes. Returns never; ends the process.

    What to build comes as JSON on standard input, as soon as the supervisor has the model's files; vLLM is imported meanwhile.
    """
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
    except BaseException as exc:
        end.send_failure(exc)
        end_own_group(1)


def _end_with_supervisor(sock: socket.socket) -> None:
    """End this process and its workers as soon as the other end of the pipe is closed, also while a model is still loading.

    Workers of a multi-process executor watch this process only once they have loaded: until then they would hold their GPUs' memory.
    """
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP | select.POLLHUP)
    poller.poll()
    end_own_group(0)


def main() -> None:
    """Entry point of the process: argument 1 is the file descriptor of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the supervisor decides
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_supervisor, args=(sock,), name="supervisor-watch", daemon=True).start()
    run(sock)


if __name__ == "__main__":
    main()

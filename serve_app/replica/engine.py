"""The engine core process starts and ends here. ``engine_core.py`` has the engine itself."""

import ctypes
import signal
import socket
import sys
import threading
import time

import msgspec

from serve_app.host.vllm_start import inspect_models_here, without_collection
from serve_app.replica import pipe
from serve_app.replica.process_group import end_own_group
from serve_app.replica.supervisor_watch import SupervisorWatch

_PR_SET_PDEATHSIG = 1


def run(sock: socket.socket, end: pipe.EngineEnd, watch: SupervisorWatch) -> None:
    """Build the engine core and serve the pipe until its other end closes. Never returns; ends the process.

    On a node other than the engine's first, there are only workers to run.

    The engine's arguments come as JSON on standard input as soon as the supervisor has the model's files; vLLM is imported meanwhile.
    """
    began = time.monotonic()
    try:
        with without_collection():
            # Imported late: these import vLLM, and a failure of the import is reported, too.
            from serve_app.replica.engine_core import build_engine
            from serve_app.replica.headless import run_workers
            from serve_app.replica.self_measurement import limit_s

        imported = time.monotonic()
        start = msgspec.json.decode(sys.stdin.buffer.read())
        watch.limit_s = start["supervisor_silence_s"]
        if start["device"] == "cpu":
            inspect_models_here()
        if start["engine_args"].get("node_rank", 0) > 0:
            run_workers(start["engine_args"], sock, end)
        engine = build_engine(start["engine_args"], sock, end, start["max_frame_bytes"], download_s=time.monotonic() - imported)
        if start["measures_itself"]:
            engine.measure_itself(limit_s(start["measured_as"], time.monotonic() - began))
        engine.run_busy_loop()
    except BaseException as exc:
        end.send_failure(exc)
        end_own_group(1)


def lead(sock: socket.socket) -> None:
    """Be the engine core process whose supervisor has the other end of the pipe ``sock``. Never returns."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and systemd signal every process at once; the supervisor decides
        signal.signal(number, signal.SIG_IGN)
    end = pipe.EngineEnd(sock)
    watch = SupervisorWatch(sock, end)
    threading.Thread(target=watch.run, name="supervisor-watch", daemon=True).start()
    run(sock, end, watch)


def main() -> None:
    """Run the process; argument 1 is the file descriptor of the pipe."""
    # A process that is stopped does not see that the pipe has closed: the kernel continues it when its supervisor ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    lead(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()

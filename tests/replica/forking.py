"""This program is a fork server without vLLM: its forks report over the pipe what they got from their supervisor, and wait.

    python -m tests.replica.forking LISTENER RAYLET

Its environment: `LOADS`, a file to which each server adds a line when it loads; `FAILS`, with which loading fails; `UNTIL`, a named pipe
that ends the loading when something is written to it; `CUDA`, with which the server's own import runs, of modules that stand for vLLM and
PyTorch, where it initializes CUDA if the value is "initialized"; `LINGER_S`.
"""

import json
import os
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

from serve_app.replica import pipe
from serve_app.replica.fork_server import _import_vllm, serve
from serve_app.replica.supervisor_watch import SupervisorWatch


def load() -> None:
    with Path(os.environ["LOADS"]).open("a") as file:
        print(os.getpid(), file=file)
    if "FAILS" in os.environ:
        raise RuntimeError("no such library")
    if "UNTIL" in os.environ:
        Path(os.environ["UNTIL"]).read_bytes()
    if "CUDA" in os.environ:
        torch = sys.modules["torch"] = ModuleType("torch")
        torch.__dict__["cuda"] = SimpleNamespace(is_initialized=lambda: os.environ["CUDA"] == "initialized")
        sys.modules["serve_app.replica.engine_core"] = ModuleType("engine_core")
        _import_vllm()


def lead(sock: socket.socket) -> None:
    """Report after the arguments have come: `pipe.EngineFailed` is the message that holds any text."""
    end = pipe.EngineEnd(sock)
    print("written to standard error", file=sys.stderr, flush=True)
    report = {
        "arguments": json.load(sys.stdin),
        "server": os.getppid(),
        "session": os.getsid(0),
        "address": os.environ.get("VLLM_HOST_IP"),
        "folder": os.getcwd(),
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "shows_environment": f"LOADS={os.environ['LOADS']}".encode() in Path("/proc/self/environ").read_bytes(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    end.send(pipe.EngineFailed(json.dumps(report)))
    SupervisorWatch(sock, end).run()


if __name__ == "__main__":
    serve(
        socket.socket(fileno=int(sys.argv[1])),
        int(sys.argv[2]),
        load,
        lead,
        linger_s=float(os.environ.get("LINGER_S", "600")),
    )

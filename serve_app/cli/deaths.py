"""This module replaces Ray's report of a dead worker process by one line on the terminal of `serve-app up`.

Ray's report has 900 characters with its own ids; the worker's log says which process died and why.
"""

import re
from pathlib import Path
from typing import Any

from rich.console import Console

from serve_app.autoscaling.rules import INGRESS

_DIED = "A worker died or was killed"
_LOST = re.compile(r"engine lost \(\w+\): (.+)")
_NEXT = {
    INGRESS: "its streams are cut, and clients connect again; Ray Serve starts another",
    "replica": "its streams continue at other replicas, or wait for the next; Ray Serve starts another",
    "": "Ray starts another where one is needed",
}


def print_deaths_in_one_line(console: Console, logs: Path) -> None:
    """From now on print one `death_line` for each of Ray's reports of a dead worker.

    ``logs`` is the folder of Ray's logs on this machine.
    """
    from ray._private import worker

    rays_own = worker.print_to_stdstream

    def print_lines(data: dict[str, Any], ignore_prefix: bool) -> None:
        if _DIED in (message := "\n".join(data["lines"])):
            console.print(death_line(message, logs), markup=False)
        else:
            rays_own(data, ignore_prefix)

    worker.print_to_stdstream = print_lines  # the thread that gets the reports looks the name up for each


def death_line(message: str, logs: Path) -> str:
    """Return one line from Ray's message about a dead worker and from the log of that worker: who, why, and what happens next."""
    found = re.search(r"Worker PID: (\d+)", message)
    pid = found[1] if found else "unknown"
    log = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in logs.glob(f"worker-*-{pid}.err"))
    actor = re.search(r"^:actor_name:(.+)", log, re.MULTILINE)
    name = actor[1].rpartition(":")[2] if actor else "a worker of Ray"
    reasons = _LOST.findall(log)
    why = reasons[-1] if reasons else "killed, out of memory, or crashed"
    kind = name if name == INGRESS else "replica" if name.startswith("replica-") else ""
    return f"{name} (pid {pid}) has died: {why}; {_NEXT[kind]}"

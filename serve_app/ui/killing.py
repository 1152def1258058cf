"""`Killer` kills the engine of a replica for real. The fleet page of a demo offers it on the machine where `serve-app up` runs its own Ray.

The number of the engine's process comes from the service's answer, which may be wrong. So only two kinds of processes are killed: those
that the starter of these pages has started as well, and forks whose environment names its raylet.
"""

import contextlib
from urllib.parse import urlsplit

import psutil

from serve_app.environment import LOOPBACK
from serve_app.ui.changes import short
from serve_app.ui.replicas import Replica, Report, models_of, replicas_of


def is_local(host: str) -> bool:
    """Return whether a `Host` header names this machine. One of another site's page, whose name leads here, does not."""
    try:
        return urlsplit(f"//{host}").hostname in LOOPBACK
    except ValueError:
        return False


def victim_of(report: Report) -> Replica | None:
    """Return the ready replica with the most requests on its engine, one that is alone for its model last; None if none is ready."""
    ready = [[r for r in replicas_of(report, model) if r.state == "ready" and _engine_of(r)] for model in models_of(report)]
    choices = [(len(of_model) > 1, _running_of(replica), replica) for of_model in ready for replica in of_model]
    return max(choices, key=lambda choice: choice[:2])[2] if choices else None


class Killer:
    """Kills engines below the process ``starter``: `serve-app up`, which has started Ray and these pages."""

    def __init__(self, starter: psutil.Process) -> None:
        self._starter = starter

    def kill(self, report: Report) -> str:
        """Kill the engine of `victim_of` by SIGKILL; return a sentence about what was done."""
        if (victim := victim_of(report)) is None:
            return "No replica is ready, so there is no engine to kill."
        pid, name = _engine_of(victim), short(victim.replica_id)
        try:
            engine = next((child for child in self._starter.children(recursive=True) if child.pid == pid), None)
            if engine is None and (engine := self._fork(pid)) is None:
                return f"The engine of replica {name}, process {pid}, was not started on this machine by this `serve-app up`."
            engine.kill()
        except psutil.NoSuchProcess:
            return f"The engine of replica {name}, process {pid}, has just ended."
        return f"Killed the engine of replica {name}, process {pid}: its answers continue elsewhere, and another replica starts."

    def _fork(self, pid: int) -> psutil.Process | None:
        """Return the process if a fork server of the starter's Ray node has made it: it is not below the starter."""
        with contextlib.suppress(psutil.Error):
            engine = psutil.Process(pid)
            node = engine.environ().get("RAY_RAYLET_PID")
            if any(child.name() == "raylet" and str(child.pid) == node for child in self._starter.children()):
                return engine
        return None


def _engine_of(replica: Replica) -> int:
    """Return the number of the engine's process; 0 if the report lacks it."""
    return 0 if replica.member is None else int(replica.member["load"].get("engine_pid") or 0)


def _running_of(replica: Replica) -> int:
    return 0 if replica.member is None else int(replica.member["load"]["running"])

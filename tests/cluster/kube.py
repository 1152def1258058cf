"""This module runs kubectl and helm, and waits with deadlines. It uses one current context: $KUBECONFIG.

It polls, with a sleep: what is waited for is spread over several objects and pods, and a watch of each would be another client.
"""

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

POLL_S = 1.0
LIMIT_S = 750.0  # a pass takes a sixth of it; a machine with much else to do, most


def run(*command: str, stdin: str | None = None, limit_s: float = 120.0, code: int = 0) -> str:
    """Return the command's standard output; if it is to fail, its standard error.

    Raises:
        AssertionError: It ended with another exit status than ``code``; the message holds all that it said.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == code, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stderr if code else done.stdout


def kubectl(*arguments: str, stdin: str | None = None, limit_s: float = 120.0) -> str:
    """Return what kubectl printed."""
    return run("kubectl", *arguments, stdin=stdin, limit_s=limit_s)


def get(kind: str, *arguments: str) -> Any:
    """Return the object, or with a selector the list, as parsed JSON."""
    return json.loads(kubectl("get", kind, *arguments, "-o", "json"))


def apply(*objects: dict[str, Any]) -> None:
    """Create or change objects."""
    kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(o) for o in objects))


def wait_until(what: str, condition: Callable[[], Any]) -> Any:
    """Return the condition's first true value.

    Raises:
        AssertionError: It was false for `LIMIT_S`.
    """
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S:.0f} s"
        time.sleep(POLL_S)
    return value


def is_ready(found: dict[str, Any]) -> bool:
    """Whether the condition Ready of a pod or node is true and it is not being deleted."""
    conditions = found["status"].get("conditions", [])
    return "deletionTimestamp" not in found["metadata"] and any(
        c["type"] == "Ready" and c["status"] == "True" for c in conditions
    )

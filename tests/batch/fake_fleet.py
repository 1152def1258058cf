"""This script replaces ``serve-app up -f -``: a `Service` at the configuration's port, which fails once, in the way that a prompt names.

Each start adds a line to ``$FAKE_FLEET/starts``: its process id. ``$FAKE_FLEET/refuse`` makes it end at once with these words.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import yaml

from tests.batch.service import Service

FOLDER = "FAKE_FLEET"


def main() -> None:
    folder = Path(os.environ[FOLDER])
    with (folder / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    if (refusal := folder / "refuse").exists():
        print(f"error: {refusal.read_text()}")
        sys.exit(1)
    service = Service(yaml.safe_load(sys.stdin)["ingress"]["port"])
    service.verdict = lambda prompt: fail(prompt, folder)
    signal.pause()


def fail(prompt: str, folder: Path) -> int:
    how = {"die": signal.SIGKILL, "hang": signal.SIGSTOP}.get(prompt)
    if how is not None and not (seen := folder / prompt).exists():
        seen.touch()
        os.kill(os.getpid(), how)
        threading.Event().wait()  # a stop may reach this thread late, and an answer would slip through
    return 200


if __name__ == "__main__":
    main()

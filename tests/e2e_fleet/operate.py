"""What an operator does to a running fleet through Ray Serve, as a command: ``python -m tests.e2e_fleet.operate redeploy FILE``.

A process of its own, because a process talks to one Ray cluster at a time.
"""

import sys
from pathlib import Path

from serve_app.cli.cluster import connect, find_run
from serve_app.cli.up import deploy
from serve_app.config import load_settings


def main() -> None:
    """``redeploy FILE`` hands a changed configuration to Serve; ``delete FILE`` deletes its application. Waits for neither."""
    action, file = sys.argv[1:]
    settings = load_settings(Path(file))
    run = find_run(settings.name)
    connect(run.ray_address, settings.name, run.ray_token)
    if action == "redeploy":
        deploy(settings)
    elif action == "delete":
        from ray import serve

        serve.delete(settings.name, _blocking=False)
    else:
        raise SystemExit(f"unknown action {action!r}")


if __name__ == "__main__":
    main()

"""This command operates a running fleet through Ray Serve: ``python -m tests.e2e_fleet.operate redeploy FILE``.

A process of its own, because a process talks to one Ray cluster at a time.
"""

import sys
from pathlib import Path

from serve_app.autoscaling.rules import replica_deployment
from serve_app.cli.cluster import connect, find_run
from serve_app.cli.up import deploy
from serve_app.config import Settings, load_settings


def main() -> None:
    """Do one of these with the configuration in FILE, and wait for none.

    ``redeploy FILE`` hands it to Serve, ``scale FILE MODEL COUNT`` with another number of replicas; ``delete FILE`` deletes its
    application.
    """
    action, file, *arguments = sys.argv[1:]
    settings = load_settings(Path(file))
    run = find_run(settings.name)
    connect(run.ray_address, settings.name, run.ray_token)
    if action == "redeploy":
        deploy(settings)
    elif action == "scale":
        scale(settings, *arguments)
    elif action == "delete":
        from ray import serve

        serve.delete(settings.name, _blocking=False)
    else:
        raise SystemExit(f"unknown action {action!r}")


def scale(settings: Settings, model: str, count: str) -> None:
    """Change nothing but the number of replicas: those that stay and the ingresses are left as they are."""
    from ray.serve.context import _get_global_client  # late, as all that imports Ray: `connect` first sets its token
    from ray.serve.schema import ServeDeploySchema

    from serve_app.application import serve_config

    config, name, number = serve_config(settings), replica_deployment(settings.models[model]), int(count)
    (application,) = config["applications"]
    entries = {entry["name"]: entry for entry in application.get("deployments", [])}
    if name in entries:  # it is scaled: to remove the entry would replace every replica
        entries[name]["autoscaling_config"] |= {"min_replicas": number, "max_replicas": number, "initial_replicas": None}
    else:
        application["deployments"] = [*entries.values(), {"name": name, "num_replicas": number}]
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)


if __name__ == "__main__":
    main()

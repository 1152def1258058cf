"""A fleet whose models the tests of `serve-app models` change, and what is reported of it."""

from typing import Any

from serve_app.application import serve_config
from serve_app.cli.running import Running
from serve_app.config import parse_settings

MODELS: dict[str, Any] = {
    "chat": {
        "model": "/chat",
        "engine_args": {"revision": "v1"},
        "replicas": {"min": 1, "max": 4, "initial": 2},
        "required": False,
    },
    "org/code": {"model": "/code", "replicas": {"min": 0, "max": 1}, "required": False},
    "vital": {"model": "/vital", "replicas": {"min": 1, "max": 2}},
    "fixed": {"model": "/fixed"},
}
SETTINGS = parse_settings({"models": MODELS})


def fleet() -> Running:
    return Running("", SETTINGS, serve_config(SETTINGS))


def report(
    status: str, *members: str, ingress: str = "HEALTHY", why: str = "", message: str = "", chat: str = ""
) -> dict[str, Any]:
    """What is known while the model `chat` has one replica and runs beside an ingress, members `i...` and `r...`."""
    config = "" if ingress == "HEALTHY" else "config update started"
    deployments = {
        "ingress": {"status": ingress, "message": why, "rollout": config, "target": 1, "replica_states": {"RUNNING": 1}},
        "replica-chat": {"status": "HEALTHY", "message": chat, "rollout": "", "target": 1, "replica_states": {"RUNNING": 1}},
    }
    leases: list[dict[str, Any]] = [
        {"replica_id": name, "model": "" if name.startswith("i") else "chat", "load": {}} for name in members
    ]
    return {"name": "serve-app", "status": status, "message": message, "deployments": deployments, "members": leases}

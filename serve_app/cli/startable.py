"""This module refuses a start on this machine that can only fail, before anything is started."""

import json
import os
import socket
import sys
from pathlib import Path

from serve_app.checkpoints import resolve_model
from serve_app.cli.cluster import RunState
from serve_app.config import IngressSettings, ModelSettings, Settings, default_cache_dir
from serve_app.config.checks import dotted
from serve_app.config.vllm_source import engine_arg_types
from serve_app.errors import ClusterFailed, ConfigError, ListenFailed


def refuse_hopeless_start(settings: Settings) -> None:
    """Check for vLLM, and check the name, the models' folders and the port.

    Raises:
        ClusterFailed: vLLM is not installed, or an application of that name runs here.
        CheckpointError: An embedded model is not fetched or damaged.
        ConfigError: A model's folder is not a checkpoint.
        ListenFailed: The port is taken.
    """
    refuse_missing_vllm()
    refuse_name_in_use(settings.name)
    for model in settings.models.values():
        refuse_missing_checkpoint(model)
    _refuse_taken_port(settings.ingress)


def refuse_missing_vllm() -> None:
    """Raise ClusterFailed if this Python has no vLLM, which every ingress and replica imports."""
    if not engine_arg_types():
        raise ClusterFailed(
            problem=f"vLLM is not installed for {sys.executable}",
            hint="pip install 'serve-app[cpu]', or use .venv/bin/serve-app, which `make .venv` makes with all packages",
        )


def refuse_name_in_use(name: str) -> None:
    """Raise ClusterFailed if an application of that name runs here."""
    if (other := RunState.load(name)) is not None:
        raise ClusterFailed(
            problem=f"an application named {name!r} runs already (pid {other.pid})",
            hint=f"serve-app down {name}; or, to run both, another name, ingress.port and ui.port in the file",
        )


def refuse_missing_checkpoint(model: ModelSettings) -> None:
    """Check that a model is on this machine if it is embedded, or named by a folder.

    Raises:
        CheckpointError: An embedded model is not fetched or damaged.
        ConfigError: The folder is not a checkpoint, or a half-written one.
    """
    path = Path(resolve_model(model.model, default_cache_dir()))
    if path.is_absolute() and (problem := _problem_of_folder(path)):
        raise ConfigError(dotted(("models", model.name, "model")), problem, "give the folder of a Hugging Face checkpoint")


def _problem_of_folder(path: Path) -> str:
    """Return why an ingress cannot read the checkpoint; "" if no problem is found. Weights are not checked."""
    config = path / "config.json"
    if not os.path.isfile(config):  # Path.is_file() raises if a name is too long
        return f"{path} holds no config.json" if os.path.isdir(path) else f"{path} does not exist"
    try:
        is_object = isinstance(json.loads(config.read_bytes()), dict)
    except OSError as exc:
        return f"{config} cannot be read: {exc.strerror}"
    except ValueError:
        is_object = False
    return "" if is_object else f"{config} is no JSON object: half written, or damaged"


def _refuse_taken_port(ingress: IngressSettings) -> None:
    refuse_taken_port(ingress.host, ingress.port, "ingress.port")


def refuse_taken_port(host: str, port: int, key: str) -> None:
    """Refuse a port that another process has. The probe binds without SO_REUSEPORT: with it, two applications could share the port.

    Raises:
        ListenFailed: The port is taken; the configuration key ``key`` sets another port.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lingering connections do not count
        try:
            sock.bind((host, port))
        except OSError as exc:
            raise ListenFailed(host=host, port=port, reason=exc.strerror or str(exc), key=key) from exc

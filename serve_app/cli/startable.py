"""This module refuses a start on this machine that can only fail, before anything is started."""

import json
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

from serve_app.checkpoints import resolve_model
from serve_app.cli.cluster import RunState
from serve_app.cli.hub import HubAnswer, is_hub_id, lacking_weights, look_up
from serve_app.config import IngressSettings, ModelSettings, Settings, default_cache_dir
from serve_app.config.adapters import CONFIG, WEIGHTS
from serve_app.config.checks import dotted
from serve_app.config.vllm_source import engine_arg_types
from serve_app.environment import as_typed
from serve_app.errors import ClusterFailed, ConfigError, ListenFailed


def refuse_hopeless_start(settings: Settings) -> None:
    """Check for vLLM and NIXL, and check the name, the models' and adapters' files, and the port. This takes 5 s at most for a model of
    the hub.

    Raises:
        ClusterFailed: vLLM, or NIXL for a model that needs it, is not installed, an application of that name runs here, or a replica has
            several nodes.
        CheckpointError: An embedded model is not fetched or damaged.
        ConfigError: A model's or an adapter's files cannot be had.
        ListenFailed: The port is taken.
    """
    refuse_missing_vllm()
    if missing := missing_nixl(settings):
        raise ClusterFailed(problem=f"{missing} {sys.executable}", hint=INSTALL_NIXL)
    refuse_name_in_use(settings.name)
    for model in settings.models.values():
        if model.nodes > 1:
            problem = f"{dotted(('models', model.name, 'nodes'))} is {model.nodes}, and this machine is one node"
            raise ClusterFailed(problem=problem, hint="start it on a cluster with --address, or set nodes: 1")
        refuse_missing_checkpoint(model)
    _refuse_taken_port(settings.ingress)


def refuse_missing_vllm() -> None:
    """Raise ClusterFailed if this Python has no vLLM, which every ingress and replica imports."""
    if not engine_arg_types():
        raise ClusterFailed(
            problem=f"vLLM is not installed for {sys.executable}",
            hint=f"{as_typed('pip')} install 'serve-app[cpu]', or use .venv/bin/serve-app, which `make .venv` makes with all packages",
        )


INSTALL_NIXL = f"{as_typed('pip')} install 'serve-app[kv]', or set kv.transfer: none"


def missing_nixl(settings: Settings) -> str:
    """Return that this Python lacks NIXL, a sentence without its last word, the Python; "" if it has NIXL or no model needs it."""
    moving = [dotted(("models", name, "kv", "transfer")) for name, model in settings.models.items() if model.needs_nixl()]
    return f"{moving[0]} is nixl, and nixl is not installed for" if moving and find_spec("nixl") is None else ""


def refuse_name_in_use(name: str) -> None:
    """Raise ClusterFailed if an application of that name runs here."""
    if (other := RunState.load(name)) is not None:
        raise ClusterFailed(
            problem=f"an application named {name!r} runs already (pid {other.pid})",
            hint=f"{as_typed()} down {name}; or, to run both, another name, ingress.port and ui.port in the file",
        )


def refuse_missing_checkpoint(model: ModelSettings) -> HubAnswer | None:
    """Check that a model and its adapters are on this machine, or that the hub has the model. Return the hub's answer, None if not asked.

    Raises:
        CheckpointError: An embedded model is not fetched or damaged.
        ConfigError: A folder is not a checkpoint or an adapter, or lacks weights; or the hub does not give the model.
    """
    key = dotted(("models", model.name, "model"))
    answer = look_up(model) if is_hub_id(model.model) else None
    if answer is not None:
        if answer.state == "refused":
            raise ConfigError(key, answer.said, answer.remedy)
    else:
        folder = Path(resolve_model(model.model, default_cache_dir()))
        if problem := _problem_of_folder(folder):
            raise ConfigError(key, problem, "give the folder of a Hugging Face checkpoint")
        if problem := lacking_weights(model, folder):
            raise ConfigError(key, problem, "fetch the checkpoint again")
    for name, adapter in model.adapters.items():
        if problem := _problem_of_folder(adapter.path, CONFIG) or _problem_of_adapter(adapter.path):
            way_out = "give the folder of an adapter in PEFT's form: docs/adapters.md"
            raise ConfigError(dotted(("models", model.name, "adapters", name, "path")), problem, way_out)
    return answer


def named_files(settings: Settings) -> dict[str, Path]:
    """Return key -> file, of the secrets and tables without which an ingress or a replica does not start."""
    ingress, protocol = settings.ingress, settings.protocol
    files: dict[str, Path | None] = {
        "ingress.api_keys_file": ingress.api_keys_file,
        "ingress.tenants_file": ingress.tenants_file,
        "ingress.oidc.ca_file": getattr(ingress.oidc, "ca_file", None),
        "ingress.batch.database_file": getattr(ingress.batch, "database_file", None),
        "protocol.cluster_token_file": protocol.cluster_token_file,
        **{f"protocol.tls.{name}": getattr(protocol.tls, name, None) for name in ("cert_file", "key_file", "ca_file")},
    }
    return {key: path for key, path in files.items() if path is not None}


def _problem_of_folder(path: Path, name: str = "config.json") -> str:
    """Return why the configuration of a checkpoint or an adapter cannot be read; "" if no problem is found."""
    config = path / name
    if not os.path.isfile(config):  # Path.is_file() raises if a name is too long
        return f"{path} holds no {name}" if os.path.isdir(path) else f"{path} does not exist"
    try:
        is_object = isinstance(json.loads(config.read_bytes()), dict)
    except OSError as exc:
        return f"{config} cannot be read: {exc.strerror}"
    except ValueError:
        is_object = False
    return "" if is_object else f"{config} is no JSON object: half written, or damaged"


def _problem_of_adapter(folder: Path) -> str:
    is_there = any(os.path.isfile(folder / name) and os.path.getsize(folder / name) for name in WEIGHTS)
    return "" if is_there else f"{folder} holds no weights, neither {WEIGHTS[0]} nor {WEIGHTS[1]}"


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

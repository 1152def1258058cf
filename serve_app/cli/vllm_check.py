"""This module asks vLLM itself about a configuration: in a process of its own, without a GPU, and without reading weights.

For each model whose checkpoint is on this machine, the front end is built as an ingress builds it. For a model on cpu, the engine core's
configuration is made as its replica makes it. For a model on cuda only the front end is checked: vLLM checks the rest by the GPU it finds.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from serve_app.checkpoints import CheckpointError, resolve_model
from serve_app.config import ModelSettings, Settings, default_cache_dir, inherited_environment, parse_settings
from serve_app.config.checks import dotted
from serve_app.config.vllm_source import takes_media, vllm_version
from serve_app.engine_args import INGRESS_ENVIRONMENT, engine_core_args, engine_environment
from serve_app.errors import ClusterFailed, ConfigError, FrontEndStartFailed
from serve_app.host.foreign_errors import in_one_line, lacking_packages
from serve_app.sizing.checkpoint_files import config_file_of, read_config
from serve_app.vllm_versions import refusing_media

LIMIT_S = 600.0
"""Longest time that vLLM may take. Its import alone takes a minute on a busy machine."""


def local_checkpoints(settings: Settings) -> dict[str, str]:
    """Return model -> folder, for each model whose checkpoint is on this machine."""
    found = {name: folder for name, model in settings.models.items() if (folder := _folder(model))}
    # not `Path.is_file`, which raises for a name too long
    return {name: folder for name, folder in found.items() if os.path.isfile(f"{folder}/config.json")}


def _folder(model: ModelSettings) -> str:
    try:
        source = resolve_model(model.model, default_cache_dir())
    except CheckpointError:
        return ""
    return source if source.startswith("/") else ""


def media_notes(settings: Settings) -> Iterator[str]:
    """Yield, for `serve-app check`, which models on GPUs get no media from an ingress with the installed vLLM.

    This is so if their replicas have a newer vLLM. A model counts if its checkpoint is on this machine.
    """
    ours = vllm_version()
    for name, folder in local_checkpoints(settings).items():
        model = settings.models[name]
        if model.device != "cuda" or model.simulated is not None:
            continue
        for architecture in filter(takes_media, sorted(_architectures(folder))):
            if theirs := refusing_media(architecture, ours):
                yield (
                    f"{dotted(('models', name))}: an ingress with vLLM {ours} (the CPU image) refuses images, sound and video for replicas "
                    f"with {theirs} (the CUDA image), which may make other tensors of them for {architecture}; for media, give all pods "
                    "the CUDA image"
                )


def _architectures(folder: str) -> frozenset[str]:
    """Return the model's, as the checkpoint names it; empty if its config.json cannot be read."""
    config: Any = None
    with suppress(ConfigError):
        config = read_config(config_file_of(Path(folder)))
    names = config.get("architectures") if isinstance(config, dict) else None
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def vllm_problems(settings: Settings, folders: Mapping[str, str]) -> list[ConfigError]:
    """Ask vLLM about the models that ``folders`` names; this takes 10 s of CPU.

    Raises:
        ClusterFailed: vLLM's process gave no answer.
    """
    environment = {**inherited_environment(), **INGRESS_ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
    asked = json.dumps({"settings": settings.model_dump(mode="json"), "folders": dict(folders)})
    command = [sys.executable, "-m", "serve_app.cli.vllm_check"]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as exc:
        raise ClusterFailed(f"vLLM did not answer within {LIMIT_S:g} s", "check without it: --no-vllm") from exc
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ClusterFailed(f"vLLM could not be asked: {last}", "check without it: --no-vllm")
    return [
        ConfigError(_key_in(settings.models[name], said), said, way_out or _hint(said, done.stderr))
        for name, said, way_out in json.loads(done.stdout)
    ]


def _hint(said: str, log: str) -> str:
    """Return which modules a model's code lacks here. Where vLLM's message itself refers to the log, they are in the log."""
    missing = ", ".join(lacking_packages(log if "failed to be inspected" in said else said))
    return f"this Python lacks {missing}; for torchvision and torchaudio, give all pods the CUDA image" if missing else ""


def _key_in(model: ModelSettings, said: str) -> str:
    """Return the path of the argument that vLLM's message names, or else of the model."""
    for section, args in (("engine_args", model.engine_args), ("frontend_args", model.frontend_args)):
        for name in args:
            if name in said:
                return dotted(("models", model.name, section, name))
    return dotted(("models", model.name))


async def _refusals(settings: Settings, folders: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return each model that vLLM refuses, why, and the way out if known. If the front end is refused, the engine core is not checked."""
    from serve_app.ingress.fleet.fleet_client import FleetClient
    from serve_app.ingress.front_end.front_end import build_front_end
    from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
    from serve_app.ingress.runtime import installer_of

    found = []
    for name, folder in folders.items():
        model = settings.models[name]
        client = FleetClient(settings, model, ingress_id="check", token=b"", tls=None)
        try:
            await build_front_end(model, folder, client, GrammarCompiler(), installer_of(settings))
        except FrontEndStartFailed as exc:
            found.append((name, exc.reason, exc.way_out))
        else:
            found += [(name, said, "") for said in _engine_refusals(model, folder)]
    return found


def _engine_refusals(model: ModelSettings, folder: str) -> Iterator[str]:
    from serve_app.replica.engine_core import engine_config

    if model.device != "cpu":
        return
    before = inherited_environment()
    os.environ.update(engine_environment(model, before))
    try:
        engine_config(engine_core_args(model, folder))
    except Exception as exc:  # vLLM raises all kinds, as it does at an engine's start
        yield in_one_line(exc)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _main() -> None:
    """Read the question from standard input and write the answer to standard output, which no other code may use."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked: dict[str, Any] = json.load(sys.stdin)
    json.dump(asyncio.run(_refusals(parse_settings(asked["settings"]), asked["folders"])), answer)
    answer.flush()
    os._exit(0)  # vLLM's threads would take another second


if __name__ == "__main__":
    _main()

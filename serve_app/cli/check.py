"""`serve-app check FILE`: refuse a wrong configuration in under 2 s, and show what a right one asks for."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from serve_app.config import ModelSettings, Settings, default_cache_dir, load_settings
from serve_app.config_checks import did_you_mean, engine_arg_names
from serve_app.errors import ConfigError


def check(file: Annotated[Path, typer.Argument(help="The configuration file.", show_default=False)]) -> None:
    """Check a configuration file without starting anything.

    Exit status 0: it can be used. 1: the message names the first wrong key.
    """
    try:
        settings = load_settings(file)
        notes = list(_notes(settings))
    except ConfigError as exc:
        raise dataclasses.replace(exc, path=f"{file}: {exc.path}" if exc.path else "") from exc
    typer.secho(f"{file} is valid.", fg="green")
    for line in (*map(_model_line, settings.models), *_summary(settings)):
        typer.echo(line)
    for note in notes:
        typer.secho(f"note: {note}", fg="yellow")


def _notes(settings: Settings) -> Iterator[str]:
    """What is not wrong with the file but missing on this machine.

    Raises:
        ConfigError: A model is embedded by a name that does not exist.
    """
    from serve_app.checkpoints import EMBEDDED, CheckpointError, resolve_model

    if not engine_arg_names():
        yield "vLLM is not installed: the names in engine_args and frontend_args are unchecked"
    for index, model in enumerate(settings.models):
        name = model.model.removeprefix("embedded:")
        if name != model.model and name not in EMBEDDED:
            hint = did_you_mean(name, EMBEDDED)
            raise ConfigError(path=f"models[{index}].model", problem=f"no embedded model {name!r}", hint=hint)
        try:
            source = resolve_model(model.model, default_cache_dir())
        except CheckpointError as exc:
            yield str(exc)
        else:
            if source.startswith("/") and not Path(source).exists():
                yield f"{source} does not exist on this machine"
    tls = settings.protocol.tls
    secrets = (settings.protocol.cluster_token_file, settings.ingress.api_keys_file)
    for path in (*secrets, *((tls.cert_file, tls.key_file, tls.ca_file) if tls else ())):
        if path is not None and not path.exists():
            yield f"{path} does not exist on this machine; the nodes of the cluster need it"


def _model_line(model: ModelSettings) -> str:
    what = f"vLLM on {model.device}"
    if model.simulated is not None:
        profile = model.simulated.profile
        what = f"vLLM with simulated {profile if isinstance(profile, str) else 'accelerator'}"
    replicas = _count(model.replicas.min, model.replicas.max, "replica")
    return f"  {model.name}: {model.model}, {what}, {replicas} with {_needs(model)}"


def _needs(model: ModelSettings) -> str:
    needs = [f"{model.num_cpus:g} CPU"]
    if model.device == "cuda":
        needs.append(f"{model.gpus_per_replica} GPU")
    elif model.simulated is None:
        needs.append(f"{model.kv_cache_gib:g} GiB of KV cache")
    return " + ".join([*needs, *(f"{amount:g} {name}" for name, amount in model.resources.items())])


def _summary(settings: Settings) -> Iterator[str]:
    ingress = settings.ingress
    replicas = _count(ingress.replicas.min, ingress.replicas.max, "replica")
    yield f"  ingress: http://{ingress.host}:{ingress.port}/v1, {replicas} with {ingress.num_cpus:g} CPU"
    cpus = ingress.num_cpus * ingress.replicas.max + sum(m.num_cpus * m.replicas.max for m in settings.models)
    gpus = sum(m.gpus_per_replica * m.replicas.max for m in settings.models)
    yield f"At full scale Ray reserves {cpus:g} CPU and {gpus} GPU for it."


def _count(low: int, high: int, noun: str) -> str:
    amount = str(low) if low == high else f"{low} to {high}"
    return f"{amount} {noun}" + ("" if high == 1 else "s")

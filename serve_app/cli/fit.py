"""`serve-app fit MODEL|CONFIG|MANIFESTS --gpu NAME` estimates memory, GPUs, pods, nodes and replicas from config.json files, offline."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from serve_app.autoscaling.capacity import Slo
from serve_app.checkpoints import resolve_model
from serve_app.cli.fit_report import as_json_value, lines_of
from serve_app.cli.hub import is_hub_id
from serve_app.cli.manifests import are_manifests
from serve_app.cli.rendered_models import rendered_models
from serve_app.cli.settings_file import in_file, settings_in
from serve_app.config import ModelSettings, default_cache_dir, read_text
from serve_app.config.adapters import rank_in
from serve_app.config.checks import dotted
from serve_app.config.scaling import ScalingSettings
from serve_app.engine_args import adapter_args
from serve_app.environment import as_typed
from serve_app.errors import CheckpointError, ConfigError
from serve_app.simulated.profiles import ACCELERATORS
from serve_app.sizing.adapters import DEFAULT_RANK, limit_of
from serve_app.sizing.architecture import Architecture, architecture_of
from serve_app.sizing.checkpoint_files import config_file_of, read_config, tensor_bytes_of
from serve_app.sizing.estimate import Estimate, Wish, check_gpus, estimate, tokens_of
from serve_app.sizing.fits import accelerator_named
from serve_app.sizing.nodes import PodSizes
from serve_app.sizing.rate import Load
from serve_app.sizing.weights import TensorBytes

DOES_NOT_FIT = 3
"""Exit status when a model does not fit."""
_YAML = (".yaml", ".yml")
_RAYS_KIND = "accelerator_type:"
"""Beginning of the Ray resources that name the accelerator of a node, such as ``accelerator_type:L4``."""


@dataclass(frozen=True)
class Asked:
    """A model to estimate: its name in the output, and the file or folder that describes it."""

    name: str
    where: str
    """What errors begin with: the model as it was given, or the key of a configuration."""
    model: str
    """A folder, a config.json, an id of the hub, or an embedded model."""
    settings: ModelSettings | None = None
    """Its section, if it comes from a configuration."""
    revision: str = ""
    """The commit that a job of the manifests fetches from the hub."""
    pod: PodSizes | None = None
    """Sizes of its pods in the manifests; None: those that the chart computes."""
    is_rendered: bool = False
    """Whether manifests hold it, and its path is one in the cluster."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command, read."""

    gpu: str
    gpu_of: Mapping[str, str]
    """The kinds of single models."""
    gpus: int | None
    nodes: int | None
    context: int | None
    rates: Mapping[str, float]
    """Requests per second of single models, and of all others at ""."""
    prompt: int
    answer: int


def fit(
    source: str,
    *,
    gpu: Sequence[str],
    gpus: int | None,
    nodes: int | None,
    context: str | None,
    requests_per_s: Sequence[str],
    prompt: int,
    answer: int,
    as_json: bool,
) -> None:
    """Run `serve-app fit`."""
    asked = list(_asked(source))
    names = [each.name for each in asked]
    kinds = _kinds_of(gpu, names)
    options = Options(
        gpu=kinds.pop("", ""),
        gpu_of=kinds,
        gpus=gpus,
        nodes=nodes,
        context=None if context is None else tokens_of(context, "--context"),
        rates={name: _rate_in(given) for name, given in _by_model("--requests-per-s", requests_per_s, names).items()},
        prompt=prompt,
        answer=answer,
    )
    found = {each.name: _answered(each, options) for each in asked}
    if as_json:
        models = {name: as_json_value(each) if isinstance(each, Estimate) else {"error": each} for name, each in found.items()}
        typer.echo(json.dumps({"models": models}, indent=2))
    else:
        sections = ["\n".join(lines_of(name, each)) for name, each in found.items() if isinstance(each, Estimate)]
        if sections:
            typer.echo("\n\n".join(sections))
        for each in found.values():
            if isinstance(each, str):
                typer.secho(f"error: {each}", fg="red", err=True)
    if any(isinstance(each, str) for each in found.values()):
        raise typer.Exit(1)
    if not all(isinstance(each, Estimate) and each.fit.fits for each in found.values()):
        raise typer.Exit(DOES_NOT_FIT)


def _kinds_of(gpu: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Return the kind of GPU of each model that has one of its own, and that of all others at "".

    Raises:
        ConfigError: A kind or a model is unknown, or a model has no kind.
    """
    kinds = {name: accelerator_named(kind).name for name, kind in _by_model("--gpu", gpu, models).items()}
    if "" not in kinds and (without := [name for name in models if name not in kinds]):
        raise ConfigError("--gpu", f"names no kind for {', '.join(without)}", "give a kind without MODEL= too")
    return kinds


def _by_model(option: str, given: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Return the values of an option by the model before their =; at "" the one for all other models.

    Raises:
        ConfigError: A model is unknown, or has two values.
    """
    found: dict[str, str] = {}
    for each in given:
        name, _, value = each.rpartition("=")
        if name and name not in models:
            raise ConfigError(option, f"names the model {name!r}", f"give one of {', '.join(models)}")
        if name in found:
            raise ConfigError(option, f"is given twice for {name or 'all models'}", "give one, and MODEL=VALUE for other models")
        found[name] = value
    return found


def _rate_in(given: str) -> float:
    try:
        rate = float(given)
    except ValueError:
        rate = math.nan
    if not 0 < rate <= 1e6:
        raise ConfigError("--requests-per-s", f"is {given}", "give requests per second above 0, at most a million")
    return rate


def _asked(source: str) -> Iterator[Asked]:
    """Yield the model, or each model of a configuration or of manifests; - is standard input.

    Raises:
        ConfigError: The source is neither a checkpoint, its config.json, a configuration, nor manifests.
    """
    if source == "-" or (source.endswith(_YAML) and not os.path.isdir(source)):
        text = read_text(Path(source))
        if are_manifests(text):
            yield from _rendered(source, text)
            return
        for name, model in settings_in(Path(source), text).models.items():
            yield Asked(name, f"{source}: {dotted(('models', name))}", model.model, model)
        return
    yield Asked(source, source or "MODEL|CONFIG", source)


def _rendered(source: str, text: str) -> Iterator[Asked]:
    try:
        for found in rendered_models(text):
            where = f"{source}: {found.where}"
            yield Asked(found.settings.name, where, found.source, found.settings, found.revision, found.pod, is_rendered=True)
    except ConfigError as exc:
        raise in_file(Path(source), exc) from exc


def _answered(asked: Asked, options: Options) -> Estimate | str:
    """Return the estimate of a model; the reason if there is none. A model given alone raises it."""
    try:
        return _estimate(asked, options)
    except (ConfigError, CheckpointError) as exc:
        if asked.settings is None:
            raise
        said = str(exc)
        return said if said.startswith(asked.where) else f"{asked.where}: {said}"


def _estimate(asked: Asked, options: Options) -> Estimate:
    args: Mapping[str, Any] = {}
    num_gpus, num_nodes, scaling, offload_gib = options.gpus, options.nodes, ScalingSettings(), 0.0
    if asked.settings is not None:
        if asked.settings.simulated is not None:
            raise ConfigError(asked.where, "is simulated", "its profile sets memory and times; fit sizes models that compute")
        args, scaling, offload_gib = _engine_args(asked.settings), asked.settings.replicas, asked.settings.kv.offload_gib
        num_gpus = options.gpus or asked.settings.gpus_per_replica or None
        num_nodes = options.nodes or asked.settings.nodes
    rate = options.rates.get(asked.name, options.rates.get(""))
    wish = Wish(
        accelerator=ACCELERATORS[options.gpu_of.get(asked.name, options.gpu)],
        num_gpus=num_gpus,
        num_nodes=num_nodes or 1,
        context=options.context,
        engine_args=args,
        load=None if rate is None else _load_of(options, rate, scaling),
        offload_gib=offload_gib,
        pod=asked.pod,
    )
    found = _estimate_of(_folder(asked), wish)
    return found if asked.settings is None else dataclasses.replace(found, notes=(*_notes(asked.settings, found), *found.notes))


def _notes(model: ModelSettings, found: Estimate) -> Iterator[str]:
    if found.replicas is not None and found.replicas.num > model.replicas.max:
        yield f"{found.replicas.num:,} replicas are needed, and replicas.max is {model.replicas.max:,}"
    if model.device == "cpu":
        yield "device is cpu in the configuration: sized as if it were cuda"
    if model.adapters and "max_lora_rank" not in _engine_args(model):
        yield f"not all adapters are here: a rank of {DEFAULT_RANK} is assumed; engine_args.max_lora_rank sets another"


def _engine_args(model: ModelSettings) -> dict[str, Any]:
    """Return a model's engine arguments, with those for its adapters. The rank is that of the adapters' files, if all are here."""
    ranks = []
    for adapter in model.adapters.values():
        try:
            ranks.append(rank_in(Path(adapter.path)))
        except (OSError, ValueError):
            return {**model.engine_args, **adapter_args(model)}
    read = {"max_lora_rank": limit_of(max(ranks))} if ranks else {}
    return {**read, **model.engine_args, **adapter_args(model)}


def _load_of(options: Options, requests_per_s: float, scaling: ScalingSettings) -> Load:
    return Load(
        requests_per_s=requests_per_s,
        prompt_tokens=options.prompt,
        answer_tokens=options.answer,
        slo=Slo(ttft_s=scaling.ttft_slo_s, itl_s=scaling.itl_slo_s),
        utilization=scaling.utilization,
        headroom=scaling.headroom,
    )


def _estimate_of(path: Path, wish: Wish) -> Estimate:
    return estimate(*_shape_of(path), wish)


def _shape_of(path: Path) -> tuple[Architecture, TensorBytes | None]:
    """Return the shape that a checkpoint's config.json describes, and what the weights' files hold, if they are there."""
    file = config_file_of(path)
    shape = architecture_of(read_config(file), str(file))
    return shape, tensor_bytes_of(file.parent, shape)


def _folder(asked: Asked) -> Path:
    """Return the folder or file of a model on this machine.

    Raises:
        ConfigError: It is not here. Nothing is downloaded.
        CheckpointError: An embedded model is unknown, not fetched, or damaged.
    """
    source = resolve_model(asked.model, default_cache_dir())
    is_bucket = source.startswith("s3://")
    is_elsewhere = is_bucket or (asked.is_rendered and os.path.isabs(source))
    copy = source.removeprefix("s3://").strip("/") if is_elsewhere else ""
    mounted = asked.settings.model if asked.settings else ""
    # Of manifests: where a job fetches from, where pods have it, and where the commands below put it.
    for place in (source, mounted, copy):
        if place and os.path.exists(place):
            return Path(place)
    named = "" if asked.settings is None else f"{source} "
    where = asked.where if asked.settings is None else f"{asked.where}.model"
    if is_hub_id(source) and source.count("/") == 1 and not source.startswith("."):
        if (cached := _cached(source, _revision(asked))) is not None:
            return cached
        command = f"{as_typed('hf')} download {source} config.json"
        command += f" --revision {asked.revision}" if asked.revision else ""
        hint = f"fit downloads nothing: run `{command}` first"
        raise ConfigError(where, f"{named}is neither here nor in the cache of the hub", hint)
    if is_elsewhere:
        there, way = "volume of the cluster", f"copy its config.json to {copy}/"
        if is_bucket:
            there, way = "bucket", f"run `aws s3 cp s3://{copy}/config.json {copy}/config.json`"
        hint = f"fit reads no {there}: {way}, then the same command again in this folder"
        raise ConfigError(where, f"{named}is not on this machine", hint)
    hint = (
        "give a checkpoint's folder, its config.json, or a configuration of serve-app (.yaml); embedded:NAME is an embedded model"
    )
    raise ConfigError(where, f"{named}does not exist", hint)


def _revision(asked: Asked) -> str:
    return asked.revision or str((asked.settings.engine_args.get("revision") if asked.settings else None) or "main")


def _cached(repository: str, revision: str) -> Path | None:
    """Return the folder of a repository in this machine's cache of the hub; None if it has no config.json there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def memory_notes(models: Mapping[str, ModelSettings]) -> Iterator[str]:
    """Yield, for `serve-app check`, which models do not fit on the GPUs that the configuration gives them.

    A model counts if its checkpoint is on this machine. Memory counts where the model's resources name an accelerator as Ray does
    (``accelerator_type:L4``).
    """
    for name, model in models.items():
        if model.device != "cuda" or model.simulated is not None or not os.path.isabs(model.model):
            continue
        at = dotted(("models", name))
        try:
            shape, files = _shape_of(Path(model.model))
        except ConfigError:  # an architecture that fit does not know is no mistake of the configuration
            continue
        try:
            check_gpus(shape, model.gpus_per_replica, model.nodes, model.stages())
        except ConfigError as exc:
            yield f"{at}.gpus_per_replica {exc.problem}; {exc.hint}"
            continue
        named = [key.removeprefix(_RAYS_KIND) for key in model.resources if key.startswith(_RAYS_KIND)]
        if not named:
            continue
        try:
            accelerator = accelerator_named(named[0])
            num_gpus, num_nodes, args = model.gpus_per_replica, model.nodes, _engine_args(model)
            wish = Wish(accelerator=accelerator, num_gpus=num_gpus, num_nodes=num_nodes, engine_args=args)
            found = estimate(shape, files, wish)
        except ConfigError:
            continue
        if not found.fit.fits:
            ways = " or ".join(found.ways_out) or "another GPU"
            kind = f"{model.gpus_per_replica} x {accelerator.name}"
            yield f"{at} does not fit on {kind} with {found.fit.context:,} tokens; {ways} would ({as_typed()} fit)"

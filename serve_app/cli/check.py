"""`serve-app check FILE` refuses a wrong configuration, in under 2 s where vLLM is not asked, and shows what a right one asks for.

For models on GPUs it asks the driver as well, which may take seconds.
"""

import json
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from serve_app.cli.hub import is_hub_id
from serve_app.cli.manifests import are_manifests, manifest_problems, timeout_problems, upgrade_lines
from serve_app.cli.settings_file import CHART_VALUES, hold_chart_values, in_file, refuse
from serve_app.cli.startable import INSTALL_NIXL, missing_nixl, named_files
from serve_app.cli.vllm_check import local_checkpoints, media_notes, vllm_problems
from serve_app.config import ModelSettings, Settings, default_cache_dir, mapping_in, parse_settings, problems, read_text
from serve_app.config.checks import did_you_mean, dotted
from serve_app.config.timeouts import RULES, timeouts_of
from serve_app.config.vllm_source import engine_arg_types
from serve_app.core.tenants import Keyring
from serve_app.environment import as_typed
from serve_app.errors import ConfigError

MAX_GPUS_OF_USUAL_NODES = 8


@dataclass(frozen=True)
class CheckResult:
    """The result of a check: mistakes; or, of a valid file, a summary of what it asks for and notes about this machine."""

    problems: Sequence[ConfigError] = ()
    summary: Sequence[str] = ()
    notes: Sequence[str] = ()


def check(
    file: Path,
    *,
    client_timeout_s: float | None,
    load_balancer_idle_s: float | None,
    ignore: Collection[str],
    ask_vllm: bool,
    as_json: bool = False,
) -> None:
    """Run `serve-app check`."""
    edge_s = {"client_s": client_timeout_s, "load_balancer_idle_s": load_balancer_idle_s}
    result = _judged(file, edge_s, _known_rules(ignore), ask_vllm=ask_vllm)
    if as_json:
        is_valid = not result.problems
        mistakes = [asdict(problem) for problem in result.problems]
        typer.echo(json.dumps({"file": str(file), "valid": is_valid, "problems": mistakes, "notes": result.notes}, indent=2))
        if not is_valid:
            raise typer.Exit(1)
        return
    refuse(file, result.problems)
    first, *rest = result.summary
    typer.secho(first, fg="green")
    for line in rest:
        typer.echo(line)
    for note in result.notes:
        typer.secho(f"note: {note}", fg="yellow")


def _judged(file: Path, edge_s: Mapping[str, float | None], ignored: frozenset[str], *, ask_vllm: bool) -> CheckResult:
    """Check a file. Expensive checks, and checks that depend on others, run only if the checks before found nothing wrong.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or is of another kind.
    """
    text = read_text(file)
    if str(file) == "-" and not text.strip():
        raise ConfigError("standard input", "is empty", "the command before the pipe failed; its message says why")
    try:
        if are_manifests(text):
            wrong = list(manifest_problems(text, **edge_s, ignored=ignored))
            valid = f"{file} is valid: serve-app's configuration, and the order of the timeouts."
            return CheckResult(wrong, (valid, _REST), [] if wrong else list(upgrade_lines(text)))
        values = mapping_in(text, file)
    except ConfigError as exc:
        raise in_file(file, exc) from exc
    if hold_chart_values(values):
        way_out = f"check what they render: helm template demo helm/serve-app -f {file} | {as_typed()} check -"
        raise ConfigError(str(file), CHART_VALUES, way_out)
    if "tenants" in values and "models" not in values:
        return _of_tenants(file, text)
    if wrong := list(problems(values)):
        return CheckResult(wrong)
    settings = parse_settings(values)
    known = timeouts_of(settings, **edge_s)
    if wrong := [*file_problems(settings), *timeout_problems([known], ignored)]:
        return CheckResult(wrong)
    asked = local_checkpoints(settings) if ask_vllm and engine_arg_types() else {}
    if asked:
        typer.secho("asking vLLM, which takes 10 to 30 s (--no-vllm leaves it out)", err=True)
        if wrong := vllm_problems(settings, asked):
            return CheckResult(wrong)
    keys = _keys_of(settings)
    has_tenants = settings.ingress.tenants_file is not None
    tenants = [] if keys is None else [f"  {_tenants_in(keys)}" if has_tenants else f"  {len(keys)} API keys"]
    summary = (f"{file} is valid.", *map(_model_line, settings.models.values()), *tenants, *_summary(settings))
    ended = [] if keys is None else keys.invalid(time.time())
    return CheckResult((), summary, [*_notes(settings, asked), *ended])


_REST = "The rest is checked by Kubernetes: kubectl apply --dry-run=server -f FILE"


def _of_tenants(file: Path, text: str) -> CheckResult:
    """Check a tenants file without a configuration, and so without the names of its models."""
    from serve_app.config.tenants_file import TenantsFile, tenants_or_problems

    found = tenants_or_problems(text)
    if not isinstance(found, TenantsFile):
        return CheckResult(found)
    keys = found.keyring(shared=False)
    rest = f"  {_tenants_in(keys)}; whether their models are served, `{as_typed()} check` of the configuration says"
    return CheckResult((), (f"{file} is a valid tenants file.", rest), list(keys.invalid(time.time())))


def _tenants_in(keys: Keyring) -> str:
    return f"tenants: {keys.num_tenants}, with {len(keys)} API key{'s' * (len(keys) != 1)} in all"


def _keys_of(settings: Settings) -> Keyring | None:
    """Return the keys of the file that the settings name, which has no problems; None without a file on this machine."""
    from serve_app.config.keys_file import read_keyring

    file = settings.ingress.keys_file
    return read_keyring(settings) if file is not None and os.path.exists(file) else None


def _known_rules(names: Collection[str]) -> frozenset[str]:
    """Return the names of rules to ignore.

    Raises:
        ConfigError: There is no rule of that name.
    """
    rules = [rule.name for rule in RULES]
    for name in names:
        if name not in rules:
            raise ConfigError("--ignore", f"{name!r} is not a rule of the timeouts", did_you_mean(name, rules))
    return frozenset(names)


def _unknown_models(settings: Settings) -> Iterator[ConfigError]:
    from serve_app.checkpoints import EMBEDDED

    for model in settings.models.values():
        name = model.model.removeprefix("embedded:")
        if name != model.model and name not in EMBEDDED:
            hint = did_you_mean(name, EMBEDDED)
            yield ConfigError(path=dotted(("models", model.name, "model")), problem=f"no embedded model {name!r}", hint=hint)


def file_problems(settings: Settings, *, here: bool = False) -> list[ConfigError]:
    """Return what is wrong with the names of embedded models and with the files that the settings name, except checkpoints.

    A file of tenants or keys that is missing is a problem if its folder is on this machine. Without the folder, the file may be on other
    machines alone: `check` also runs where an image is built.

    Args:
        here: Whether the ingress will run on this machine, so that every file has to be here.
    """
    from serve_app.config.keys_file import keys_file_problems

    found = list(_unknown_models(settings))
    file = settings.ingress.keys_file
    if file is not None and (here or os.path.isdir(file.parent)):
        found += keys_file_problems(settings)
    if here:
        found += [
            ConfigError(key, f"{path} does not exist", "create it")
            for key, path in named_files(settings).items()
            if path != file and not os.path.exists(path)
        ]
    return found


def _notes(settings: Settings, asked: Collection[str]) -> Iterator[str]:
    """Yield what is missing on this machine, though the file is right. vLLM was ``asked`` about these models."""
    from serve_app.checkpoints import CheckpointError, resolve_model
    from serve_app.cli.fit import memory_notes

    if not engine_arg_types():
        yield "vLLM is not installed: engine_args and frontend_args are unchecked"
    elif unasked := [name for name in settings.models if name not in asked]:
        yield f"vLLM was not asked about {', '.join(unasked)}: only names, types and ranges of its arguments are checked"
    for model in settings.models.values():
        try:
            source = resolve_model(model.model, default_cache_dir())
        except CheckpointError as exc:
            yield str(exc)
        else:
            if is_hub_id(source):
                yield f"{source} was not looked for; {as_typed()} doctor asks this machine's cache and the hub"
            elif not os.path.exists(source):
                yield f"{source} does not exist on this machine"
    yield from _wide_notes(settings.models)
    yield from memory_notes(settings.models)
    yield from media_notes(settings)
    if missing := missing_nixl(settings):
        yield f"{missing} this Python; where replicas run, {INSTALL_NIXL}"
    if settings.ingress.needs_keys:
        for name, model in settings.models.items():
            if not model.yields_to_chats():
                key = f"models.{name}.engine_args.scheduling_policy"
                yield f"{key} is not priority: tenants' requests start in the order of arrival; remove it, and their shares count"
    adapters = [adapter.path for model in settings.models.values() for adapter in model.adapters.values()]
    for path in (*named_files(settings).values(), *adapters):
        if not os.path.exists(path):
            yield f"{path} does not exist on this machine; the nodes of the cluster need it"


def _wide_notes(models: Mapping[str, ModelSettings]) -> Iterator[str]:
    """Yield which models need nodes with more GPUs than nearly all have."""
    for name, model in models.items():
        if (gpus := model.gpus_per_node()) > MAX_GPUS_OF_USUAL_NODES:
            needs = (
                f"{dotted(('models', name))} needs a node with {gpus} GPUs, and nearly all have {MAX_GPUS_OF_USUAL_NODES} at most"
            )
            least = -(-model.gpus_per_replica // MAX_GPUS_OF_USUAL_NODES)
            nodes = next(n for n in range(least, model.gpus_per_replica + 1) if model.gpus_per_replica % n == 0)
            yield f"{needs}: else it waits for ever; nodes: {nodes} spreads it"


def _model_line(model: ModelSettings) -> str:
    what = f"vLLM on {model.device}"
    if model.simulated is not None:
        profile = model.simulated.profile
        what = f"vLLM with simulated {profile if isinstance(profile, str) else 'accelerator'}"
    replicas = _replicas(model.replicas.min, model.replicas.max)
    return f"  {model.name}: {model.model}, {what}, {replicas} with {_needs(model)}"


def _needs(model: ModelSettings) -> str:
    needs = [f"{model.num_cpus:g} CPU"]
    if model.gpus_per_replica:
        needs.append(f"{model.gpu_share() if model.nodes == 1 else model.gpus_per_node():g} GPU")
    elif model.simulated is None:
        needs.append(f"{model.kv_cache_gib:g} GiB of KV cache")
    whole = " + ".join([*needs, *(f"{amount:g} {name}" for name, amount in model.resources.items())])
    return whole if model.nodes == 1 else f"{whole} on each of {model.nodes} nodes"


def _summary(settings: Settings) -> Iterator[str]:
    ingress = settings.ingress
    replicas = _replicas(ingress.replicas.min, ingress.replicas.max)
    yield f"  ingress: http://{ingress.host}:{ingress.port}/v1, {replicas} with {ingress.num_cpus:g} CPU"
    cpus = ingress.num_cpus * ingress.replicas.max + sum(m.num_cpus * m.nodes * m.replicas.max for m in settings.models.values())
    gpus = math.ceil(sum(m.gpu_share() * m.replicas.max for m in settings.models.values()))
    limit = settings.autoscaling.max_gpus or gpus
    held = f", of {gpus} that all models at their maximum would have" if gpus > limit else ""
    and_gpus = f" and {min(gpus, limit)} GPU" if gpus else ""
    yield f"At full scale Ray reserves {cpus:g} CPU{and_gpus} for it{held}."
    if lacks := list(_lacks(settings)):
        yield f"{as_typed()} up does not start on this machine: {'; '.join(lacks)}."
        one = "" if any(model.nodes > 1 for model in settings.models.values()) else "on a machine that has all this, "
        yield f"It starts {one}on a Ray cluster (--address), or on Kubernetes by the Helm chart."
    elif (cores := os.cpu_count() or 1) < cpus:
        # `cluster.local_cluster` tells Ray that the machine has them all.
        yield f"A cluster needs that many CPUs; on this machine {as_typed()} up starts with {cores}, which its processes share."


def _lacks(settings: Settings) -> Iterator[str]:
    """Yield what this machine lacks for the smallest fleet. What it lacks of packages and models, `_notes` yields."""
    from serve_app.cli.doctor import gpus_here, needed_gpus

    needed = needed_gpus(settings)
    if needed and (has := len(gpus_here())) < needed:
        seen = f"{has} {'is' if has == 1 else 'are'}" if has else "none is"
        yield f"the smallest fleet needs {needed} GPU{'s' * (needed > 1)}, and {seen} seen here"
    yield from (f"{model.name} needs {model.nodes} nodes" for model in settings.models.values() if model.nodes > 1)
    if missing := sum(not os.path.exists(path) for path in named_files(settings).values()):
        yield f"{missing} {'files are' if missing > 1 else 'file is'} missing, see below"


def _replicas(low: int, high: int) -> str:
    amount = str(low) if low == high else f"{low} to {high}"
    return f"{amount} replica" if high == 1 else f"{amount} replicas, each"

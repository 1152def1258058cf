"""A job fetches weights to a shared volume, compares checksums and marks them, so that pods know when they are complete.

A mark is the file `.serve-app-complete` in the folder. It names the fetched weights (`hf:ORG/NAME@COMMIT`, or any text that the caller
chose), and is written last: a folder with another mark or no mark is not complete, whatever else it holds.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from serve_app.errors import CheckpointError

MARK = ".serve-app-complete"
SUMS = "SHA256SUMS"
POLL_S = 2.0
_HUB = "hf:"
_UNUSED = ("original/*", "*.pth", "*.onnx", "*.onnx_data", "*.msgpack", "*.h5")  # other formats of the same weights
_CHUNK_BYTES = 1 << 22

Say = Callable[[str], None]


def download(target: Path, mark: str, *, say: Say) -> None:
    """Fetch a repository of the Hugging Face hub into ``target``, compare all files with the hub's checksums, and mark it.

    The download continues where an earlier call stopped; nothing is done if the mark is there already. The hub's address, token and proxy
    come from huggingface_hub's own environment; its progress goes to standard error.

    Args:
        mark: `hf:ORG/NAME@COMMIT`.
    Raises:
        CheckpointError: The mark has another form, there is no such repository, no network or no room, or a file is not the hub's.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repository, at, revision = mark.removeprefix(_HUB).partition("@")
    if not (mark.startswith(_HUB) and repository and at and revision):
        raise CheckpointError(f"{mark!r} does not name a repository and a commit; write hf:ORG/NAME@COMMIT")
    if is_complete(target, mark):
        return say(f"{target} has {mark} already")
    try:
        _unmark(target)
        snapshot_download(repository, revision=revision, local_dir=target, ignore_patterns=list(_UNUSED))
        say(f"{mark}: fetched, comparing checksums")
        found = HfApi().verify_repo_checksums(repository, revision=revision, local_dir=target)
    except (HfHubHTTPError, OSError) as exc:
        raise CheckpointError(f"{mark} was not fetched: {str(exc).strip() or type(exc).__name__}") from exc
    if wrong := sorted(mismatch["path"] for mismatch in found.mismatches):
        for path in wrong:
            (target / path).unlink()  # otherwise the next call would take them for fetched
        raise CheckpointError(f"{mark}: {', '.join(wrong)} differed from the hub's checksums and are removed; fetch again")
    if missing := [path for path in found.missing_paths if not _is_unused(path)]:
        raise CheckpointError(f"{mark}: {', '.join(sorted(missing))} are missing; fetch again")
    say(f"{mark}: {found.checked_count} files match the hub's checksums")
    _mark(target, mark)


def verify(target: Path, mark: str, *, sha256: str, say: Say) -> None:
    """Compare the files of ``target`` with its SHA256SUMS, whose own checksum is ``sha256``, and mark it.

    Raises:
        CheckpointError: The list has another checksum, or a file in it is missing or differs.
    """
    if is_complete(target, mark):
        return say(f"{target} has {mark} already")
    try:
        _unmark(target)
        if (digest := _sha256(target / SUMS)) != sha256:
            raise CheckpointError(
                f"{target / SUMS} has the checksum {digest}, not {sha256}: it lists other files than you expect"
            )
        wanted = list(_listed(target / SUMS))
        for number, (expected, path) in enumerate(wanted, 1):
            say(f"{mark}: file {number} of {len(wanted)}, {path}, {(target / path).stat().st_size >> 20} MiB")
            if (digest := _sha256(target / path)) != expected:
                raise CheckpointError(f"{target / path} has the checksum {digest}, not {expected}; remove it and fetch again")
    except OSError as exc:
        raise CheckpointError(f"{exc.filename} cannot be read: {exc.strerror}") from exc
    _mark(target, mark)


def wait_for(marks: Sequence[tuple[Path, str]], *, timeout_s: float, say: Say) -> None:
    """Return once every folder has its mark.

    Raises:
        CheckpointError: ``timeout_s`` seconds have passed.
    """
    deadline = time.monotonic() + timeout_s
    reported: list[tuple[Path, str]] = []
    while missing := [(target, mark) for target, mark in marks if not is_complete(target, mark)]:
        if missing != reported:
            say("waiting for " + ", ".join(f"{mark} in {target}" for target, mark in missing))
            reported = missing
        if time.monotonic() >= deadline:
            target, mark = missing[0]
            raise CheckpointError(
                f"{target} did not get {mark} within {timeout_s:g} s; look at the log of the job that fetches it"
            )
        time.sleep(min(POLL_S, timeout_s))
    say("all weights are there")


def is_complete(target: Path, mark: str) -> bool:
    """Return whether ``target`` is complete with this mark."""
    try:
        return (target / MARK).read_text(encoding="utf-8") == mark
    except OSError:
        return False


def _mark(target: Path, mark: str) -> None:
    new = target / f"{MARK}.new"
    new.write_text(mark, encoding="utf-8")
    new.rename(target / MARK)


def _unmark(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    (target / MARK).unlink(missing_ok=True)


def _is_unused(path: str) -> bool:
    return any(PurePosixPath(path).match(pattern) for pattern in _UNUSED)


def _listed(sums: Path) -> Iterator[tuple[str, str]]:
    """Yield checksum and path of each line of sha256sum's output."""
    for number, line in enumerate(sums.read_text(encoding="utf-8").splitlines(), 1):
        digest, _, path = line.partition(" ")
        name = path.lstrip(" *")
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(
                f"{sums}, line {number}: {line!r} is not a checksum and a relative path; make the file with sha256sum"
            )
        yield digest, name


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()

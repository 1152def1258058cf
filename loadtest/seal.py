"""The seals are digests of recorded files, so that a later edit, deletion or reordering of rows is found.

During a run, seal.jsonl gets one `Seal` per file and batch: the SHA-256 of the whole file so far, so that the seals are a chain. At the
end the manifest names the last seal of each file, and the digest of its scenario, by which the run is judged. The seals protect against
accidents and careless edits; they are no signature. A person who can write all files of the folder can make new seals, so keep the
digests that the report prints in another place if that matters.
"""

import hashlib
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from loadtest.inputs import open_bytes
from loadtest.records import Manifest, read_lines

Sealed = Literal["rows.jsonl", "health.jsonl"]
"""The sealed files: only the recorder writes them, and every figure and every gate comes from them."""
SEALS = "seal.jsonl"
SCENARIO = "scenario"
"""Name of the scenario's digest in the manifest."""
_PIECE_BYTES = 1 << 20


class Seal(msgspec.Struct, frozen=True):
    file: Sealed
    num_bytes: int
    sha256: str
    """Digest of the file's first ``num_bytes``."""


def broken_seals(run: Path, manifest: Manifest) -> list[str]:
    """Return a sentence for each file that is not as recorded, and one if the scenario is not; none for runs without seals.

    In a run that never ended, data after the last seal (at most a second) cannot be checked. The rest of the manifest (how the run
    ended, which problems its generator found) has no seal.

    Raises:
        UsageError: seal.jsonl or a sealed file cannot be read.
    """
    seals = _seals(run)
    found = [_broken(run / name, [s for s in seals if s.file == name], manifest.sealed.get(name)) for name in get_args(Sealed)]
    if manifest.sealed.get(SCENARIO, digest := scenario_digest(manifest.scenario)) != digest:
        found.append("the scenario in manifest.json was changed")
    return [f"{problem} after it was recorded" for problem in found if problem]


def scenario_digest(scenario: dict[str, Any]) -> str:
    """Return the SHA-256 of a scenario as the manifest holds it."""
    return hashlib.sha256(msgspec.json.encode(scenario, order="deterministic")).hexdigest()


def without_digest(run: Path, manifest: Manifest) -> list[str]:
    """Return a sentence if a digest is missing: in runs of older versions, or because it was removed.

    Raises:
        UsageError: seal.jsonl cannot be read.
    """
    sealed = {seal.file for seal in _seals(run)} | manifest.sealed.keys()
    there = [name for name in get_args(Sealed) if (run / name).exists()]
    if missing := [name for name in (*there, SCENARIO) if name not in sealed]:
        return [f"the run has no digest of {', '.join(missing)}: later changes there cannot be detected"]
    return []


def _seals(run: Path) -> list[Seal]:
    return list(read_lines(run / SEALS, Seal)) if (run / SEALS).exists() else []


def _broken(path: Path, seals: list[Seal], last_sha256: str | None) -> str:
    if not seals and last_sha256 is None:
        return ""
    if not path.exists():
        return f"{path.name} was removed"
    digest, done = hashlib.sha256(), 0
    with open_bytes(path) as file:
        for seal in seals:
            while done < seal.num_bytes and (piece := file.read(min(_PIECE_BYTES, seal.num_bytes - done))):
                digest.update(piece)
                done += len(piece)
            if digest.hexdigest() != seal.sha256:
                before = max((s.num_bytes for s in seals if s.num_bytes < seal.num_bytes), default=0)
                return f"{path.name} was changed between its bytes {before} and {seal.num_bytes}"
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    if last_sha256 is not None and digest.hexdigest() != last_sha256:
        return f"{path.name} was changed, or data was added, after its byte {done}"
    return ""

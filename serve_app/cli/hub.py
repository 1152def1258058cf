"""This module asks whether the Hugging Face id of a model can be loaded here: from this machine's cache, or else from the hub.

A start would ask the same minutes later, in an ingress and in each replica, with retries.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import requests

from serve_app.checkpoints.complete import missing_weights
from serve_app.cli.probes import reason_of, within
from serve_app.config import ModelSettings

LIMIT_S = 4.0
"""Longest time for the hub's answer, name resolution included."""
_LOGIN = "export HF_TOKEN=TOKEN of an account that may read it, before the start"
_ELSEWHERE = "give a folder, or set HF_ENDPOINT to a mirror"


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """Whether the files of a model can be had. ``refused``: a start would fail. ``unknown``: it may fail."""

    state: Literal["cached", "found", "refused", "unknown"]
    said: str
    remedy: str = ""


def is_hub_id(model: str) -> bool:
    return not model.startswith(("/", "embedded:"))


def needs_weights(model: ModelSettings) -> bool:
    """Return whether the engine reads weights from the model's folder: a simulated one, and two of vLLM's load formats, do not."""
    return model.simulated is None and model.engine_args.get("load_format") not in ("dummy", "tensorizer")


def lacking_weights(model: ModelSettings, folder: Path) -> str:
    """Return which weights the engine would miss in the folder, a sentence; "" if none, or if it reads none from there."""
    return missing_weights(folder, str(model.engine_args.get("load_format") or "auto")) if needs_weights(model) else ""


def look_up(model: ModelSettings) -> HubAnswer:
    """Look for the model's configuration and weights in the cache of this machine, and ask the hub if they are not there; within `LIMIT_S`.

    `serve-app fit` and a download that was interrupted leave a configuration without weights.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    revision = str(model.engine_args.get("revision") or "main")
    repository = model.model.partition(":")[0]  # behind the colon is the quantization of a GGUF file
    config = try_to_load_from_cache(repository, "config.json", revision=revision)
    lack = ""
    if isinstance(config, str):
        # vLLM puts weights into this folder, and the configuration into the cache all the same.
        download_dir = str(model.engine_args.get("download_dir") or "")
        folder = _snapshot(Path(download_dir), repository, revision) if download_dir else Path(config).parent
        missing = lacking_weights(model, folder)
        if not missing:
            weights = f", its weights in {download_dir}" if download_dir and needs_weights(model) else ""
            return HubAnswer("cached", f"{repository} is in {constants.HF_HUB_CACHE}{weights}")
        lack = f"{repository} is not whole on this machine: {missing}"
    if constants.HF_HUB_OFFLINE:
        lack = lack or f"{repository} is not in {constants.HF_HUB_CACHE}"
        return HubAnswer("refused", f"{lack}, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE, or give the path of a folder")
    return _asked(constants.ENDPOINT, repository, revision, lack or f"{repository} is not on this machine")


def _snapshot(cache: Path, repository: str, revision: str) -> Path:
    """Return where a cache of the hub's client keeps a revision. The hub's own look-up finds a file of a known name alone."""
    from huggingface_hub.file_download import repo_folder_name

    folder = cache / repo_folder_name(repo_id=repository, repo_type="model")
    commit = folder / "refs" / revision
    return folder / "snapshots" / (commit.read_text().strip() if commit.is_file() else revision)


def _asked(endpoint: str, repository: str, revision: str, lack: str) -> HubAnswer:
    silent = f"{lack}, and {endpoint} has not answered within {LIMIT_S:g} s"
    return within(LIMIT_S, lambda: _answer_of(endpoint, repository, revision, lack), HubAnswer("unknown", silent, _ELSEWHERE))


def _answer_of(endpoint: str, repository: str, revision: str, lack: str) -> HubAnswer:
    from huggingface_hub import get_token

    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    away = f"{lack}, and {endpoint}"
    try:
        done = requests.head(f"{endpoint}/{repository}/resolve/{revision}/config.json", headers=headers, timeout=LIMIT_S)
    except (requests.Timeout, requests.exceptions.SSLError) as exc:  # the hub's own client may know other certificates
        return HubAnswer("unknown", f"{away} gives no answer: {reason_of(exc)}", _ELSEWHERE)
    except requests.RequestException as exc:
        return HubAnswer("refused", f"{away} cannot be reached: {reason_of(exc)}", _ELSEWHERE)
    code = done.headers.get("x-error-code", "")
    return _judged(done.status_code, code, f"{endpoint} has {repository}", repository, bool(token))


def _judged(status: int, code: str, found: str, repository: str, has_token: bool) -> HubAnswer:
    if status < 400 or code == "EntryNotFound":  # a repository of GGUF files may have no config.json
        return HubAnswer("found", f"{found}; it is fetched at the start")
    who = "the token of this machine" if has_token else "requests without a token"
    if code == "RevisionNotFound":
        return HubAnswer("refused", f"{repository} has no such revision", "correct engine_args.revision")
    if status in (401, 403):
        return HubAnswer("refused", f"the hub refuses {repository} to {who}: it is private, gated or misspelt", _LOGIN)
    if status == 404:
        return HubAnswer("refused", f"the hub has no {repository}", "correct the id ORG/NAME")
    return HubAnswer("unknown", f"the hub answers {status} for {repository}", _ELSEWHERE)

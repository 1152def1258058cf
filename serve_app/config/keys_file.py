"""This module reads the file of tenants or API keys that the settings name."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from serve_app.config.api_keys_file import CREATE_FILE_HINT, MAX_BYTES, read_api_keys
from serve_app.config.files import read_regular_file
from serve_app.config.settings import Settings
from serve_app.config.tenants_file import TENANTS_FILE, TenantsFile, in_one, tenants_or_problems
from serve_app.core.tenants import Keyring
from serve_app.errors import ConfigError


def read_keyring(settings: Settings, before: Keyring | None = None) -> Keyring:
    """Return the keys of the file that the settings name; they name one.

    If a changed file newly names a model that is not served, its keys count, because one may have been revoked; but the tenants with such
    models keep those that they had. At the start of an ingress such a model is no error: otherwise no ingress could start after a release
    that serves one model less. In both cases the keys' ``problem`` names such models.

    Args:
        before: The keys in force; None at the start.
    Raises:
        ConfigError: The file cannot be used.
    """
    ingress = settings.ingress
    if ingress.api_keys_file is not None:
        return read_api_keys(ingress.api_keys_file, shared=ingress.shared_prefix_cache)
    assert ingress.tenants_file is not None
    found = _read_tenants(ingress.tenants_file)
    if not isinstance(found, TenantsFile):
        raise in_one(found)
    unknown = list(found.unknown_models(settings, () if before is None else before.models()))
    problem = str(in_one(_in_file(ingress.tenants_file, (each for _, each in unknown)))) if unknown else ""
    for name in {name for name, _ in unknown}:
        if before is not None and (tenant := before.tenant(name)) is not None:
            models = None if tenant.models is None else tuple(sorted(tenant.models))
            found.tenants[name] = found.tenants[name].model_copy(update={"models": models})
    return found.keyring(shared=ingress.shared_prefix_cache, problem=problem)


def keys_file_problems(settings: Settings) -> list[ConfigError]:
    """Return what is wrong with the file of tenants or of API keys that the settings name; they name one."""
    if (file := settings.ingress.tenants_file) is not None:
        found = _read_tenants(file)
        return _in_file(file, (each for _, each in found.unknown_models(settings))) if isinstance(found, TenantsFile) else found
    try:
        read_keyring(settings)
    except ConfigError as exc:
        return [exc]
    return []


def _read_tenants(file: Path) -> TenantsFile | list[ConfigError]:
    """Return the tenants, or all problems, at least one. The file is read once: it may be replaced at any time."""
    try:
        found = tenants_or_problems(read_regular_file(file, MAX_BYTES))
    except ConfigError as exc:
        return [dataclasses.replace(exc, path=TENANTS_FILE, hint=exc.hint or CREATE_FILE_HINT)]
    return found if isinstance(found, TenantsFile) else _in_file(file, found)


def _in_file(file: Path, problems: Iterable[ConfigError]) -> list[ConfigError]:
    return [
        ConfigError(TENANTS_FILE, (f"{file}: {each.path}: " if each.path else f"{file} ") + each.problem, each.hint)
        for each in problems
    ]

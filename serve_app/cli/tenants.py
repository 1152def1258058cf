"""``serve-app tenants`` makes and changes the file `ingress.tenants_file`: each ingress follows its changes."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import stat
import tempfile
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.options import AsJson
from serve_app.cli.tenant_usage import usage
from serve_app.core.tenants import Priority
from serve_app.environment import as_typed

if TYPE_CHECKING:
    from serve_app.config.tenants_file import TenantsFile
    from serve_app.errors import ConfigError

app = typer.Typer(
    help="Make and change the file `ingress.tenants_file`, and show who used how much. Each change writes the whole file anew, "
    "without its comments.",
    no_args_is_help=True,
)
app.command()(usage)


def _in_utf8(given: str | list[str] | None) -> str | list[str] | None:
    """Return what the command line gave. The tenants file is UTF-8, and a shell passes any bytes."""
    from serve_app.config.checks import is_utf8

    for text in [given] if isinstance(given, str) else given or ():
        if not is_utf8(text):
            raise typer.BadParameter(f"{text!r} is not UTF-8")
    return given


File = Annotated[Path, typer.Option("--file", "-f", help="The tenants file.", envvar="SERVE_APP_TENANTS_FILE")]
Name = Annotated[str, typer.Argument(help="Name of the tenant.", show_default=False, callback=_in_utf8)]
Expires = Annotated[
    str, typer.Option(help="Last day of the new key (UTC), as 2027-01-31. Default: it does not expire.", callback=_in_utf8)
]
Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        help="infer or batch; may be repeated. Default: those of the tenant's valid keys; both for a new tenant.",
        callback=_in_utf8,
    ),
]
Weight = Annotated[
    float | None,
    typer.Option(
        help="Its share of GPU time while the engines are full, from 0.01 to 1000: twice the weight, twice the share. Default: 1."
    ),
]
Rank = Annotated[
    Priority | None,
    typer.Option(
        "--priority",
        help="Whose requests go first while the engines are full: interactive, then batch, then background. Default: interactive.",
    ),
]
FirstTokenS = Annotated[
    float | None,
    typer.Option(
        help="Seconds within which the first token has to come; otherwise the request is refused. Default: the model's limit."
    ),
]
TotalS = Annotated[float | None, typer.Option(help="Seconds within which an answer has to be complete. Default: no limit.")]
TokensPerMinute = Annotated[int | None, typer.Option(help="Most tokens of prompts and answers in any 60 seconds.", min=1)]

_SCOPES = ("infer", "batch")
_HEAD = "# The tenants of serve-app: docs/tenants.md. `serve-app tenants` writes this file anew; comments are lost.\n"


@app.command()
def create(
    name: Name,
    file: File,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that it may ask; may be repeated. Default: all.", callback=_in_utf8)
    ] = None,
    scope: Scopes = None,
    expires: Expires = "",
    weight: Weight = None,
    priority: Rank = None,
    first_token_s: FirstTokenS = None,
    total_s: TotalS = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of one answer.", min=1)] = None,
    max_context: Annotated[int | None, typer.Option(help="Most tokens of a prompt and its answer together.", min=2)] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Most requests in any 60 seconds.", min=1)] = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: Annotated[int | None, typer.Option(help="Most tokens of prompts and answers in a day of UTC.", min=1)] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(help="Most requests that run or wait for a replica at once.", min=1)
    ] = None,
) -> None:
    """Add a tenant with its first key, and print the key: this is the only time that the key is shown."""
    limits = _given(
        max_tokens=max_tokens,
        max_context=max_context,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        tokens_per_day=tokens_per_day,
        max_concurrent=max_concurrent,
    )
    deadlines = _given(first_token_s=first_token_s, total_s=total_s)
    with _changing(file, may_be_new=True) as tenants:
        if name in tenants:
            raise typer.BadParameter(
                f"{file} has a tenant {name!r} already; `{as_typed()} tenants rotate {name}` makes another key"
            )
        tenants[name] = {"keys": []} | _given(models=model, limits=limits, deadlines=deadlines, weight=weight, priority=priority)
        key = _add_key(tenants, name, scope, expires)
    _show(key, f"this is a key of {name}")


@app.command()
def rotate(
    name: Name,
    file: File,
    old_days: Annotated[
        int,
        typer.Option(
            help="Days after today (UTC) for which the old keys stay valid beside the new one; `revoke` ends a key at once.",
            min=0,
            max=36_500,
        ),
    ] = 7,
    scope: Scopes = None,
    expires: Expires = "",
) -> None:
    """Add a new key to a tenant, print it, and let its valid keys expire soon. The new key has their scopes."""
    with _changing(file) as tenants:
        keys, last = _keys(tenants, name, file), str(_today() + timedelta(days=old_days))
        valid = [key for key in keys if not _ended(key)]
        scopes = scope or sorted({each for key in valid or keys for each in key.get("scopes", _SCOPES)}, key=_SCOPES.index)
        for key in valid:
            key["expires"] = min(str(key.get("expires", last)), last)
        new = _add_key(tenants, name, scopes, expires)
    _show(
        new,
        f"this is a key of {name}; its keys {', '.join(key['id'] for key in valid) or '(none)'} expire on {last} or before",
    )


@app.command()
def revoke(
    name: Name,
    file: File,
    key: Annotated[list[str] | None, typer.Option(help="Id of a key; may be repeated. Default: all keys of the tenant.")] = None,
) -> None:
    """End keys at once. Their clients get 401, which says that the key was revoked; their batches send no new lines."""
    with _changing(file) as tenants:
        keys = _keys(tenants, name, file)
        known = {each["id"]: each for each in keys}
        for each in key or ():
            if each not in known:
                raise typer.BadParameter(_unknown_key(name, each, known), param_hint="--key")
        new = [each for each in key or known if "revoked" not in known[each]]
        for each in new:
            known[each]["revoked"] = str(_today())
    typer.secho(f"revoked: {', '.join(new) or 'no key'}", fg="green", err=True)
    if old := [f"{each} on {known[each]['revoked']}" for each in key or known if each not in new]:
        typer.secho(f"revoked before: {', '.join(old)}", err=True)
    if all(_ended(each) for each in known.values()):
        typer.secho(f"the tenant has no valid key now; `{as_typed()} tenants rotate` makes one", err=True)


@app.command("list")
def list_tenants(file: File, as_json: AsJson = False) -> None:
    """Show tenants, keys, rights and limits; weight and priority where they are not the default. A key is shown by its id."""
    tenants = _read(file)
    if as_json:
        shown = {
            name: {**tenant, "keys": [{k: v for k, v in key.items() if k != "sha256"} for key in tenant["keys"]]}
            for name, tenant in tenants.items()
        }
        typer.echo(json.dumps(shown, indent=2))
        return
    for name, tenant in tenants.items():
        values = tenant.get("limits", {}) | tenant.get("deadlines", {})
        limits = ", ".join(f"{limit} {value}" for limit, value in values.items()) or "no limits of its own"
        models = "all models" if tenant.get("models") is None else f"models {', '.join(tenant['models']) or 'none'}"
        typer.echo(f"{name}: {', '.join([models, *_order(tenant), limits])}")
        for key in tenant["keys"]:
            scopes = "+".join(sorted(key.get("scopes", _SCOPES), key=_SCOPES.index))
            typer.echo(f"  {key['id']:<22}  {scopes:<12}  {_ended(key) or _until(key)}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the tenants file, for editors."""
    from serve_app.config.tenants_file import tenants_json_schema

    typer.echo(json.dumps(tenants_json_schema(), indent=2))


def _unknown_key(name: str, given: str, known: dict[str, dict[str, Any]]) -> str:
    """Return the error for an id that the tenant's keys do not have. It does not show ``given``, which may be a key itself."""
    digest = hashlib.sha256(given.encode()).hexdigest()
    if ids := [each for each, key in known.items() if key["sha256"] == digest]:
        return f"this is the key itself, whose id is {ids[0]}; give the id"
    return f"the tenant {name!r} has no key of this id; the ids of its keys are {', '.join(known) or 'none'}"


def _given(**values: Any) -> dict[str, Any]:
    """Return the values that are neither None nor empty. A 0 stays, so that the check of the file refuses it."""
    return {key: value for key, value in values.items() if value not in (None, [], {})}


def _order(tenant: dict[str, Any]) -> Iterator[str]:
    """Yield what `list` shows of the order in which the tenant's requests start: weight and priority that are not the default."""
    if (weight := tenant.get("weight", 1)) != 1:
        yield f"weight {weight:g}"
    if (priority := tenant.get("priority", "interactive")) != "interactive":
        yield f"priority {priority}"


def _today() -> date:
    return datetime.now(UTC).date()


def _ended(key: dict[str, Any]) -> str:
    """Return why a key is not valid today, "" if it is."""
    if key.get("revoked"):
        return f"revoked on {key['revoked']}"
    return f"expired on {key['expires']}" if str(key.get("expires") or "9999") < str(_today()) else ""


def _until(key: dict[str, Any]) -> str:
    return f"valid to {key['expires']}" if key.get("expires") else "valid"


def _keys(tenants: dict[str, Any], name: str, file: Path) -> list[dict[str, Any]]:
    from serve_app.config.checks import did_you_mean
    from serve_app.config.tenants_file import may_be_a_key

    if name not in tenants:
        shown = "of this name" if may_be_a_key(name) else repr(name)
        raise typer.BadParameter(
            f"{file} has no tenant {shown}; {did_you_mean(name, tenants) or f'{as_typed()} tenants list shows all'}"
        )
    keys: list[dict[str, Any]] = tenants[name]["keys"]
    return keys


def _add_key(tenants: dict[str, Any], name: str, scopes: list[str] | None, expires: str) -> str:
    """Add a key to the tenant, and return the key.

    Its id is the tenant's name with the first 8 hex digits of the key's SHA-256. An id such as NAME-1 could come
    back after its key was removed from the file, and the new key would get the removed key's batches and bill.
    """
    if re.fullmatch(r"[0-9-]{10}", expires) and expires < str(_today()):
        raise typer.BadParameter(f"{expires} is over: the key would never be valid", param_hint="--expires")
    key = f"sk-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry: dict[str, Any] = {"id": f"{name[:54]}-{digest[:8]}", "sha256": digest}
    tenants[name]["keys"].append(entry | ({"expires": expires} if expires else {}) | ({"scopes": scopes} if scopes else {}))
    return key


def _show(key: str, said: str) -> None:
    """Print the key alone on standard output, so that a script can take it from there."""
    typer.echo(key)
    then = "The key is shown only now: the file has its digest. Services whose ingress.tenants_file names the file take it in seconds."
    typer.secho(f"{said}. {then}", fg="green", err=True)


def _read(file: Path, *, may_be_new: bool = False) -> dict[str, Any]:
    """Return the file's tenants, checked, each with its ``keys``.

    Raises:
        ConfigError: The file cannot be read, or is no valid file of tenants.
    """
    from serve_app.config import read_text
    from serve_app.errors import ConfigError

    if may_be_new and not os.path.exists(file):
        return {}
    try:
        text = read_text(file)
    except ConfigError as exc:
        raise ConfigError("", exc.problem, f"name a file by --file that `{as_typed()} tenants create` has made") from None
    found = _parsed(file, text).model_dump(mode="json", exclude_unset=True, exclude_none=True)["tenants"]
    return {name: {"keys": [], **tenant} for name, tenant in found.items()}


def _parsed(file: Path, text: str) -> "TenantsFile":
    """Return the tenants in the text.

    Raises:
        ConfigError: The text has problems; the name of the file comes first.
    """
    from serve_app.config.tenants_file import parse_tenants
    from serve_app.errors import ConfigError

    try:
        return parse_tenants(text)
    except ConfigError as exc:
        raise _in(file, exc) from None


def _in(file: Path, problem: "ConfigError") -> "ConfigError":
    return dataclasses.replace(problem, path=f"{file}: {problem.path}" if problem.path else str(file))


def _refuse_wrong(file: Path, text: str) -> None:
    """Raise the first problem of what the file would become. `serve-app check` could not show the others: they are not written."""
    from serve_app.config.tenants_file import tenants_or_problems

    if isinstance(found := tenants_or_problems(text), list):
        raise _in(file, found[0])


@contextlib.contextmanager
def _changing(file: Path, *, may_be_new: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the tenants of the file, and write what they have become in the file's place. A new file is readable by its owner alone.

    Two commands at once change the file one after the other: both lock the folder. The file is replaced as a whole, so that no ingress
    reads a half of it.

    Raises:
        ConfigError: The file cannot be used or written, or what was asked makes an invalid file; then the file stays as it is.
    """
    import yaml

    from serve_app.errors import ConfigError

    if str(file) == "-":
        raise typer.BadParameter("standard input cannot be changed; name a file", param_hint="--file")
    file = Path(os.path.realpath(file))
    try:
        with _locked(file.parent) as folder:
            tenants = _read(file, may_be_new=may_be_new)
            yield tenants
            text = _HEAD + yaml.safe_dump({"tenants": tenants}, sort_keys=False, width=1000)
            _refuse_wrong(file, text)
            _replace(file, text)
            os.fsync(folder)
    except OSError as exc:
        hint = f"{file.parent} has to be a folder with room that this user may write; or name another file by --file"
        if isinstance(exc, FileNotFoundError) and not os.path.lexists(file.parent):
            hint = f"make its folder: mkdir -p {shlex.quote(str(file.parent))}"
        raise ConfigError("", f"{file} cannot be written: {exc.strerror}", hint) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(folder)


def _replace(file: Path, text: str) -> None:
    number, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # mode 600
    try:
        with os.fdopen(number, "w", encoding="utf-8") as new:
            if os.path.exists(file):  # an ingress of another user has to read the new file, too
                was = file.stat()
                os.fchown(number, was.st_uid, was.st_gid)
                os.fchmod(number, stat.S_IMODE(was.st_mode))
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise

"""`serve-app tenants` makes keys that the ingress takes, shows each once, and leaves a file that it refuses as it was."""

import errno
import hashlib
import json
import os
import stat
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from serve_app.cli.main import app
from serve_app.config.tenants_file import parse_tenants
from serve_app.core.tenants import Caller, Tenant
from serve_app.errors import ConfigError, InvalidApiKey

TODAY = datetime.now(UTC).date()
SHORT = "tenants: {a: {keys: [{id: a-1, sha256: 12}]}}"


def run(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["tenants", *arguments, "-f", str(file)], env={"COLUMNS": "300"})


def made(file: Path, *arguments: str) -> str:
    """Return the key that the command prints."""
    result = run(file, *arguments)
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1), result.output
    return result.stdout.strip()


def caller(file: Path, key: str, day: date = TODAY) -> Caller:
    now = datetime.combine(day, datetime.min.time(), UTC).timestamp()
    return parse_tenants(file.read_text()).keyring(shared=False).caller(key.encode(), now)


def id_of(key: str, tenant: str = "team") -> str:
    return f"{tenant}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.yaml"


def test_a_created_tenant_may_ask_by_the_key_that_was_printed_once(file: Path) -> None:
    options = ["--model", "chat", "--model", "embed", "--scope", "infer", "--max-tokens", "8192", "--max-context", "32768"]
    key = made(file, "create", "search-team", *options, "--expires", "2099-01-31")
    tenant, found = caller(file, key)
    assert tenant == Tenant("search-team", frozenset({"chat", "embed"}), 8192, 32768)
    assert (found.id, [*found.scopes], found.expires) == (id_of(key, "search-team"), ["infer"], "2099-01-31")
    assert key not in file.read_text()
    assert "Services whose ingress.tenants_file names the file take it in seconds." in run(file, "create", "another").stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = made(file, "create", "other")
    assert caller(file, other).tenant.models is None
    assert caller(file, key).tenant == tenant
    assert [path.name for path in file.parent.iterdir()] == ["tenants.yaml"]


def test_one_command_writes_a_whole_entry_and_its_values_outlive_further_commands(file: Path) -> None:
    order = ["--weight", "2.5", "--priority", "batch", "--first-token-s", "10", "--total-s", "300.5"]
    limits = ["--max-tokens", "8192", "--max-context", "32768", "--requests-per-minute", "600"]
    quotas = ["--tokens-per-minute", "400000", "--tokens-per-day", "9000000", "--max-concurrent", "16"]
    key = made(file, "create", "team", "--model", "chat", *order, *limits, *quotas)
    made(file, "create", "other", "--weight", "1", "--priority", "background")
    tenant = Tenant(
        "team",
        models=frozenset({"chat"}),
        max_tokens=8192,
        max_context=32768,
        quotas={"requests_per_minute": 600, "tokens_per_minute": 400000, "tokens_per_day": 9000000, "max_concurrent": 16},
        first_token_s=10,
        total_s=300.5,
        weight=2.5,
        priority="batch",
    )
    assert caller(file, key).tenant == tenant
    assert caller(file, made(file, "rotate", "other")).tenant == Tenant("other", priority="background")
    assert caller(file, key).tenant == tenant


def test_the_list_shows_a_weight_and_a_priority_that_are_not_the_default(file: Path) -> None:
    made(file, "create", "heavy", "--weight", "4")
    made(file, "create", "nightly", "--weight", "0.25", "--priority", "background", "--max-tokens", "5")
    made(file, "create", "usual", "--weight", "1", "--priority", "interactive")
    assert [line for line in run(file, "list").stdout.splitlines() if not line.startswith(" ")] == [
        "heavy: all models, weight 4, no limits of its own",
        "nightly: all models, weight 0.25, priority background, max_tokens 5",
        "usual: all models, no limits of its own",
    ]


def test_a_rotated_key_works_beside_the_new_one_until_it_expires(file: Path) -> None:
    old = made(file, "create", "team", "--scope", "batch")
    new = made(file, "rotate", "team", "--old-days", "3")
    assert (caller(file, new).key.id, [*caller(file, new).key.scopes]) == (id_of(new), ["batch"])
    assert caller(file, old, TODAY + timedelta(days=3)).key.id == id_of(old)
    with pytest.raises(InvalidApiKey, match=f"the API key {id_of(old)} has expired on "):
        caller(file, old, TODAY + timedelta(days=4))
    made(file, "rotate", "team", "--old-days", "30")
    with pytest.raises(InvalidApiKey, match="has expired"):
        caller(file, old, TODAY + timedelta(days=4))


def test_a_changed_file_keeps_its_mode_and_a_key_with_an_empty_revocation_is_revoked(file: Path) -> None:
    key = made(file, "create", "team", "--scope", "infer")
    file.write_text(file.read_text().replace("scopes:", "revoked: null\n      scopes:"))
    file.chmod(0o640)
    assert run(file, "revoke", "team").exit_code == 0
    with pytest.raises(InvalidApiKey, match="was revoked on"):
        caller(file, key)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [*caller(file, made(file, "rotate", "team")).key.scopes] == ["infer"]


def test_a_revoked_key_is_not_valid_and_says_so(file: Path) -> None:
    first, second = made(file, "create", "team"), made(file, "rotate", "team")
    assert run(file, "revoke", "team", "--key", id_of(first)).exit_code == 0
    with pytest.raises(InvalidApiKey, match=f"the API key {id_of(first)} was revoked on {TODAY}"):
        caller(file, first)
    assert caller(file, second).key.id == id_of(second)
    assert run(file, "revoke", "team").exit_code == 0
    with pytest.raises(InvalidApiKey, match=f"{id_of(second)} was revoked"):
        caller(file, second)


@pytest.mark.parametrize("name", ["team", "a" * 63])
def test_the_id_of_a_removed_key_does_not_come_back(file: Path, name: str) -> None:
    """Otherwise the new key would own the batches of the removed one, which may have leaked, and its part of the bill."""
    removed = caller(file, made(file, "create", name)).key.id
    file.write_text(yaml.safe_dump({"tenants": {name: {}}}))
    assert caller(file, made(file, "rotate", name)).key.id != removed
    file.unlink()
    assert caller(file, made(file, "create", name)).key.id != removed


def test_the_list_shows_rights_and_ends_but_no_digest(file: Path) -> None:
    long = "a-tenant-with-a-long-name"
    first = id_of(made(file, "create", "team", "--model", "chat", "--max-tokens", "5"))
    second = id_of(made(file, "rotate", "team", "--old-days", "0", "--expires", "2099-01-31"))
    other = id_of(made(file, "create", long), long)
    run(file, "revoke", long)
    assert run(file, "list").stdout.splitlines() == [
        "team: models chat, max_tokens 5",
        f"  {first}           infer+batch   valid to {TODAY}",
        f"  {second}           infer+batch   valid to 2099-01-31",
        f"{long}: all models, no limits of its own",
        f"  {other}  infer+batch   revoked on {TODAY}",
    ]
    shown = json.loads(run(file, "list", "--json").stdout)
    assert shown["team"]["keys"][0] == {"id": first, "expires": str(TODAY)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "team"], "has a tenant 'team' already"),
        (["rotate", "tema"], "has no tenant 'tema'; did you mean team?"),
        (["revoke", "team", "--key", "k"], "the tenant 'team' has no key of this id; the ids of its keys are team-"),
        (["create", "a", "--scope", "read"], "tenants.a.keys[0].scopes[0]: is 'read', but should be 'infer' or 'batch'"),
        (["create", "a", "--expires", "soon"], "tenants.a.keys[0].expires: is 'soon', which is no date"),
        (["create", "a", "--weight", "0"], "tenants.a.weight: is 0.0, but should be greater than or equal to 0.01"),
        (["create", "a", "--weight", "nan"], "tenants.a.weight: is nan, but should be a finite number"),
        (["create", "a", "--weight", "high"], "Invalid value for '--weight'"),
        (["create", "a", "--priority", "high"], "'high' is not one of 'interactive', 'batch', 'background'"),
        (["create", "a", "--total-s", "0"], "tenants.a.deadlines.total_s: is 0.0, but should be greater than 0"),
        (
            ["create", "a", "--first-token-s", "9", "--total-s", "3"],
            "first_token_s: is 9, and total_s is 3: no time would be left",
        ),
        (["create", "Team A"], "the name 'Team A' is no name of a tenant"),
        (["create", "\udcff"], "Invalid value for 'name': '\\udcff' is not UTF-8"),
        (["rotate", "\udcff"], "Invalid value for 'name': '\\udcff' is not UTF-8"),
        (["create", "a", "--model", "b", "--model", "\udcff"], "Invalid value for '--model': '\\udcff' is not UTF-8"),
        (["create", "a", "--scope", "\udcff"], "Invalid value for '--scope': '\\udcff' is not UTF-8"),
        (["create", "a", "--expires", "\udcff"], "Invalid value for '--expires': '\\udcff' is not UTF-8"),
        (["create", "a", "--model", ""], "tenants.a.models[0]: is '', but should have at least 1 character"),
        (
            ["rotate", "team", "--old-days", "3000000"],
            "Invalid value for '--old-days': Input should be less than or equal to 36500",
        ),
    ],
)
def test_what_cannot_be_done_leaves_the_file_as_it_was(file: Path, arguments: list[str], said: str) -> None:
    made(file, "create", "team")
    before = file.read_text()
    result = run(file, *arguments)
    assert result.exit_code != 0
    assert said in (str(result.exception) if isinstance(result.exception, ConfigError) else result.output)
    assert "which `serve-app check` shows" not in str(result.exception)  # it reads the file, which has none of this
    assert file.read_text() == before
    assert [path.name for path in file.parent.iterdir()] == ["tenants.yaml"]


def test_no_error_shows_what_may_be_a_key(file: Path) -> None:
    key = made(file, "create", "team")
    commands = [["create", key], ["create", "a", "--scope", key], ["create", "a", "--expires", key]]
    for arguments in (*commands, ["rotate", key], ["revoke", key], ["revoke", "team", "--key", key + "x"]):
        result = run(file, *arguments)
        assert result.exit_code != 0
        assert key[-8:] not in f"{result.output}{result.exception}"
    result = run(file, "revoke", "team", "--key", key)
    assert (result.exit_code, key[-8:] in result.output) == (2, False)
    assert f"this is the key itself, whose id is {id_of(key)}; give the id" in result.output


def test_a_key_is_revoked_once(file: Path) -> None:
    key = id_of(made(file, "create", "team"))
    none = "the tenant has no valid key now; `serve-app tenants rotate` makes one\n"
    assert run(file, "revoke", "team").stderr == f"revoked: {key}\n{none}"
    assert run(file, "revoke", "team").stderr == f"revoked: no key\nrevoked before: {key} on {TODAY}\n{none}"


def test_a_tenant_with_another_key_keeps_it(file: Path) -> None:
    key = id_of(made(file, "create", "team"))
    made(file, "rotate", "team")
    assert run(file, "revoke", "team", "--key", key).stderr == f"revoked: {key}\n"


def test_standard_input_is_not_changed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    for command in (["create", "team"], ["rotate", "team"], ["revoke", "team"]):
        result = run(Path("-"), *command)
        assert (result.exit_code, "standard input cannot be changed; name a file" in result.output) == (2, True)
    assert not list(file.parent.iterdir())


def test_a_place_that_cannot_be_written_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, said in (
        ("none/tenants.yaml", f"cannot be written: No such file or directory; make its folder: mkdir -p {tmp_path}/none"),
        ("file/tenants.yaml", f"cannot be written: Not a directory; {tmp_path}/file has to be a folder with room that this user"),
        (".", "cannot be read: Is a directory; name a file by --file that `serve-app tenants create` has made"),
    ):
        result = run(tmp_path / place, "create", "team")
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception).startswith(f"{tmp_path / place} {said}")
    (tmp_path / "fleet.yaml").write_text("models: {chat: {model: /a}}")
    for command in (["create", "team"], ["list"]):
        result = run(tmp_path / "fleet.yaml", *command)
        assert str(result.exception).startswith(f"{tmp_path}/fleet.yaml: is the configuration of a fleet, not a tenants file; ")


def test_a_broken_file_is_not_replaced(file: Path) -> None:
    file.write_text(SHORT)
    for arguments in (["create", "b"], ["rotate", "a"], ["revoke", "a"], ["list"]):
        result = run(file, *arguments)
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception).startswith(f"{file}: tenants.a.keys[0].sha256: has 2 characters")
        assert file.read_text() == SHORT
    assert isinstance(run(file.with_name("none"), "rotate", "a").exception, ConfigError)


def check(file: Path, config: Path) -> tuple[int, str]:
    """Check a configuration that names the tenants file; return exit code and output."""
    model = {"model": "embedded:smollm2-135m-instruct"}
    config.write_text(yaml.safe_dump({"models": {"chat": model}, "ingress": {"tenants_file": str(file)}}))
    result = CliRunner().invoke(app, ["check", "--no-vllm", str(config)], env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_a_check_of_the_configuration_checks_the_tenants(file: Path, tmp_path: Path) -> None:
    made(file, "create", "team", "--model", "cat")
    code, output = check(file, tmp_path / "serve.yaml")
    assert code == 1
    assert "tenants.team.models[0]: is 'cat', no served model; did you mean chat?" in output
    file.unlink()
    code, output = check(file, tmp_path / "serve.yaml")
    assert (code, f"{file} cannot be read: No such file or directory; create it on every node" in output) == (1, True)
    elsewhere = tmp_path / "a-folder-of-other-machines" / "tenants.yaml"
    code, output = check(elsewhere, tmp_path / "serve.yaml")
    assert (code, f"{elsewhere} does not exist on this machine" in output) == (0, True)


def test_a_check_of_the_configuration_refuses_a_tenants_file_that_cannot_be_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(file, "create", "team")
    opened = os.open

    def open_(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path) == str(file):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *arguments, **options)

    # Not by the file's mode: root may read every file.
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "access", lambda path, *_, **__: path != file)
    code, output = check(file, tmp_path / "serve.yaml")
    assert code == 1
    assert f"{file} cannot be read: Permission denied; create it on every node of the ingress, readable for" in output

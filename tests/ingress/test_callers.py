"""The file of tenants, or of API keys, is read, checked, and followed when it changes."""

import asyncio
import errno
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import api_keys_file, parse_settings, tenants_file
from serve_app.config.keys_file import read_keyring
from serve_app.core.tenants import Key, Keyring, Tenant
from serve_app.errors import ConfigError, FileUnreadable, InvalidApiKey
from serve_app.ingress.http import callers
from serve_app.ingress.http.callers import Tenants
from tests.config.bombs import bomb
from tests.doubles.fleet import in_loop, until
from tests.ingress.tenants import digest, of_file, of_keys

FIRST, SECOND = "first-key-0123456789", "second-key-0123456789"
BOMB = "tenants: {t: {}}\n" + bomb("[*{0}, *{0}]")


def write(path: Path, text: str) -> Tenants:
    path.write_text(text)
    return of_keys(path)


def replace(path: Path, text: str, tenants: Tenants | None = None) -> None:
    """Change the file as Kubernetes does: the name leads to another one from one moment to the next. Then let the tenants follow."""
    other = path.with_name("other")
    other.write_text(text)
    os.replace(other, path)
    if tenants is not None:
        tenants.follow_changes()


def allowed(keys: Tenants, *candidates: str) -> list[str]:
    passed = []
    for key in candidates:
        try:
            keys.check(f"Bearer {key}".encode())
        except InvalidApiKey:
            continue
        passed.append(key)
    return passed


def test_plain_keys_and_digests_are_taken_and_comments_are_not(tmp_path: Path) -> None:
    digest = hashlib.sha256(SECOND.encode()).hexdigest()
    keys = write(tmp_path / "keys", f"# of 2026-11\n  {FIRST}  \n\nsha256:{digest.upper()}\n")
    candidates = [FIRST, SECOND, digest, f"sha256:{digest}", "# of 2026-11", "", FIRST[:-1], FIRST + "x"]
    assert allowed(keys, *candidates) == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (None, "no API key was given"),
        (b"", "the Authorization header is not of the scheme Bearer"),
        (f"Basic {FIRST}".encode(), "the Authorization header is not of the scheme Bearer"),
        (FIRST.encode(), "the Authorization header is not of the scheme Bearer"),
        (b"Bearer", "the API key is not known"),
        (b"Bearer \xff\x00", "the API key is not known"),
    ],
)
def test_a_request_without_a_key_learns_what_to_send(tmp_path: Path, header: bytes | None, said: str) -> None:
    way_out = "send the header `Authorization: Bearer KEY` with a key of this server"
    with pytest.raises(InvalidApiKey, match=f"^{re.escape(f'{said}; {way_out}')}$"):
        write(tmp_path / "keys", FIRST).check(header)


def test_the_scheme_is_written_in_any_case(tmp_path: Path) -> None:
    write(tmp_path / "keys", FIRST).check(f"bearer  {FIRST}".encode())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no key; a line is a key"),
        (b"# nothing\n\n", "holds no key; a line is a key"),
        (b"tooshort\n", "line 1 of .* has 8 characters; 16 or more without spaces are needed"),
        (FIRST.encode() + b"\na key that has spaces", "line 2 of .* has 21 characters"),
        (b"sha256:abcdef0123456789", "line 1 of .* is no SHA-256"),
        (b"\xff", "cannot be read: not UTF-8 at byte 0"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_printing_a_key(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refused:
        of_keys(file)
    assert refused.value.path == "ingress.api_keys_file"
    assert not any(word in str(refused.value) for word in ("tooshort", "has spaces", "abcdef"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keys cannot be read: No such file or directory"):
        of_keys(tmp_path / "keys")


def test_a_changed_file_counts(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", FIRST)
    replace(tmp_path / "keys", f"{FIRST}\n{SECOND}", keys)
    assert allowed(keys, FIRST, SECOND) == [FIRST, SECOND]
    replace(tmp_path / "keys", SECOND, keys)
    assert allowed(keys, FIRST, SECOND) == [SECOND]


@in_loop
async def test_requests_are_answered_by_the_old_keys_while_a_changed_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "_LOOK_S", 0.01)
    old, new = (Keyring([(Tenant("t"), [Key("k", hashlib.sha256(key.encode()).digest())])]) for key in (FIRST, SECOND))
    num_readings, go_on = 0, threading.Event()

    def read(_: Keyring | None) -> Keyring:
        nonlocal num_readings
        num_readings += 1
        return old if num_readings == 1 or not go_on.wait(30) else new

    path = tmp_path / "keys"
    path.write_text("")
    tenants = Tenants(path, read)
    watching = asyncio.create_task(tenants.watch())
    replace(path, "changed")
    while num_readings == 1:
        await asyncio.sleep(0.01)
    replace(path, "changed again")
    await asyncio.sleep(0.1)
    assert (allowed(tenants, FIRST, SECOND), num_readings) == ([FIRST], 2), "one reading at a time"
    go_on.set()
    while num_readings == 2 or allowed(tenants, FIRST, SECOND) != [SECOND]:
        await asyncio.sleep(0.01)
    watching.cancel()


class Looked(Exception):
    """Ends the follower at its next pause."""


@in_loop
async def test_a_change_counts_at_the_next_look_which_comes_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file changes when the follower has just begun to pause, which is the longest that a change can wait."""
    path, pauses = tmp_path / "keys", list[float]()
    tenants = write(path, FIRST)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise Looked
        replace(path, SECOND)

    monkeypatch.setattr(asyncio, "sleep", pause)
    with pytest.raises(Looked):
        await tenants.watch()
    assert allowed(tenants, FIRST, SECOND) == [SECOND]
    assert pauses[0] <= 1.0


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_file_of_too_many_keys_is_refused_with_their_number(
    num_more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tenants_file, api_keys_file):
        monkeypatch.setattr(module, "MAX_KEYS", 10)
    num_keys = 10 + num_more
    entries = [{"id": f"k{number}", "sha256": digest(str(number))} for number in range(num_keys)]
    half = num_keys // 2
    tenants = json.dumps({"tenants": {"one": {"keys": entries[:half]}, "other": {"keys": entries[half:]}}})
    lines = "\n".join(f"sha256:{entry['sha256']}" for entry in entries)
    files: list[Callable[[], Tenants]] = [partial(of_file, tmp_path / "t", tenants), partial(write, tmp_path / "k", lines)]
    for read in files:
        if not num_more:
            read()
            continue
        with pytest.raises(ConfigError, match=rf"{num_keys} keys( in all)?, and the limit is 10; remove keys that have"):
            read()


@pytest.mark.parametrize("broken", [None, "", "short"])
def test_a_broken_new_file_keeps_the_old_keys_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    file = tmp_path / "keys"
    keys = write(file, FIRST)
    file.unlink() if broken is None else replace(file, broken)
    keys.follow_changes()
    keys.follow_changes()
    assert allowed(keys, FIRST, SECOND, "short") == [FIRST]
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].endswith("; the 1 API keys read before stay in force")
    assert keys.last_change == (0 if broken is None else file.stat().st_mtime_ns, errors[0])
    replace(file, SECOND, keys)
    assert allowed(keys, FIRST, SECOND) == [SECOND]


def keyring(key: str) -> Keyring:
    return Keyring([(Tenant("t"), [Key("k", hashlib.sha256(key.encode()).digest())])])


def test_an_unreadable_file_is_reported_once_and_read_again_until_it_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file stays the same from its change on: neither a lack of descriptors nor the right to read it shows in its times."""
    away, forbidden = FileUnreadable("", "no descriptors"), FileUnreadable("", "no right")
    found: list[Keyring | ConfigError] = [keyring(FIRST), away, away, forbidden, ConfigError("", "a mistake"), keyring(SECOND)]

    def read(_: Keyring | None) -> Keyring:
        if isinstance(next_one := found.pop(0), Keyring):
            return next_one
        raise next_one

    (path := tmp_path / "keys").write_text("")
    tenants = Tenants(path, read)
    replace(path, "changed")
    for said in (["no descriptors"], [], ["no right"], ["a mistake"], []):
        caplog.clear()
        tenants.follow_changes()
        kept = [f"{each}; the 1 API keys read before stay in force" for each in said]
        assert [r.getMessage() for r in caplog.records] == kept
        assert (allowed(tenants, FIRST, SECOND), tenants.file_in_force) == ([FIRST], False)
    replace(path, "changed again", tenants)
    assert (allowed(tenants, FIRST, SECOND), tenants.file_in_force) == ([SECOND], True)


def test_an_unreadable_file_counts_when_it_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = write(tmp_path / "keys", FIRST)
    replace(tmp_path / "keys", SECOND)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lacks_descriptors)
        keys.follow_changes()
    assert (allowed(keys, FIRST, SECOND), keys.file_in_force) == ([FIRST], False)
    keys.follow_changes()
    assert (allowed(keys, FIRST, SECOND), keys.file_in_force) == ([SECOND], True)


def lacks_descriptors(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.write_text(BOMB)])
def test_no_file_stops_the_changes_that_come_after_it(tmp_path: Path, make: Callable[[Path], object]) -> None:
    def file_of(key: str) -> str:
        return json.dumps({"tenants": {"team": {"keys": [{"id": "k1", "sha256": digest(key)}]}}})

    (path := tmp_path / "tenants.yaml").write_text(file_of(FIRST))
    settings = parse_settings({"models": {"chat": {"model": "/a"}}, "ingress": {"tenants_file": str(path)}})
    tenants = Tenants(path, partial(read_keyring, settings))
    make(other := tmp_path / "other")
    os.replace(other, path)
    tenants.follow_changes()
    assert (allowed(tenants, FIRST, SECOND), tenants.file_in_force) == ([FIRST], False)
    replace(path, file_of(SECOND), tenants)
    assert (allowed(tenants, FIRST, SECOND), tenants.file_in_force) == ([SECOND], True)


@in_loop
async def test_a_reading_that_does_not_end_is_reported_and_counts_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(callers, "_LOOK_S", 0.01)
    monkeypatch.setattr(callers, "_LATE_S", 0.02)
    go_on, readings = threading.Event(), iter([keyring(FIRST), keyring(SECOND)])
    (path := tmp_path / "keys").write_text("")
    tenants = Tenants(path, lambda before: next(readings) if before is None or go_on.wait(30) else before)
    replace(path, "changed")
    watching = asyncio.create_task(tenants.watch())
    await until(lambda: not tenants.file_in_force)
    assert allowed(tenants, FIRST, SECOND) == [FIRST]
    said = f"{path} could not be read within 0.02 s; the 1 API keys read before stay in force"
    assert [r.getMessage() for r in caplog.records] == [said]
    monkeypatch.setattr(callers, "_LATE_S", 30.0)
    go_on.set()
    await until(lambda: tenants.file_in_force)
    assert allowed(tenants, FIRST, SECOND) == [SECOND]
    watching.cancel()


def test_a_look_that_was_late_without_a_change_reads_the_file_once_more(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", FIRST)
    keys._report_late()
    assert not keys.file_in_force
    keys.follow_changes()
    assert (allowed(keys, FIRST), keys.file_in_force) == ([FIRST], True)


def test_a_tenant_for_which_a_changed_file_names_an_unknown_model_keeps_its_models_and_has_the_keys_of_the_file(
    tmp_path: Path,
) -> None:
    def file_of(key: str, *models: str) -> str:
        return json.dumps({"tenants": {"team": {"models": models, "keys": [{"id": "k1", "sha256": digest(key)}]}}})

    def in_force() -> tuple[list[str], set[str], bool]:
        assert tenants.last_change[0] == path.stat().st_mtime_ns
        tenant = tenants._keys.tenant("team")
        assert tenant is not None
        return allowed(tenants, FIRST, SECOND), set(tenant.models or ()), tenants.file_in_force

    path = tmp_path / "tenants.yaml"
    served = {"models": {"chat": {"model": "embedded:smollm2-135m-instruct"}}, "ingress": {"tenants_file": str(path)}}
    path.write_text(file_of(FIRST, "chat", "removed"))
    tenants = Tenants(path, partial(read_keyring, parse_settings(served)))
    assert tenants.file_in_force
    replace(path, file_of(SECOND, "caht", "removed"), tenants)
    assert in_force() == ([SECOND], {"chat", "removed"}, False)
    assert tenants.last_change[1] == (
        f"ingress.tenants_file: {path}: tenants.team.models[0]: is 'caht', no served model; did you mean chat?; "
        "tenants with such models keep those they had; all else is in force, 1 API keys"
    )
    replace(path, file_of(SECOND, "removed"), tenants)
    assert in_force() == ([SECOND], {"removed"}, True)


def test_a_key_that_is_no_longer_valid_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def file_of(*revoked: str) -> str:
        keys = [{"id": key, "sha256": digest(key), "revoked": "2026-12-31"} for key in revoked]
        return json.dumps({"tenants": {"team": {"keys": keys}}})

    path = tmp_path / "tenants.yaml"
    tenants = of_file(path, file_of("a"))
    replace(path, file_of("a", "b"), tenants)
    replace(path, file_of("b"), tenants)
    said = f"{path}: the API key %s was revoked on 2026-12-31 (tenant team); its clients get 401"
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [said % "a", said % "b"]


def test_a_change_of_the_tenants_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def file_of(key: str, **more: Any) -> str:
        return json.dumps({"tenants": {"team": {"keys": [{"id": "k1", "sha256": digest(key), **more}]}}})

    path = tmp_path / "tenants.yaml"
    tenants = of_file(path, file_of(FIRST))
    assert allowed(tenants, FIRST, SECOND) == [FIRST]
    replace(path, file_of(SECOND, scopes=["read"]), tenants)
    assert allowed(tenants, FIRST, SECOND) == [FIRST]
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said.startswith("tenants.team.keys[0].scopes[0]: is 'read', but should be 'infer' or 'batch'")
    replace(path, file_of(FIRST, expires="2026-12-31"), tenants)
    assert allowed(tenants, FIRST) == []
    (warned,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == f"{path}: the API key k1 has expired on 2026-12-31 (tenant team); its clients get 401"
    replace(path, file_of(SECOND), tenants)
    assert allowed(tenants, FIRST, SECOND) == [SECOND]

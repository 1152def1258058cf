"""Files of keys and of tenants are read only if they are regular and small: nothing else can stop the reader."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.config import Settings, parse_settings
from serve_app.config.api_keys_file import MAX_BYTES
from serve_app.config.keys_file import keys_file_problems, read_keyring
from serve_app.errors import ConfigError

REGULAR = "is not a regular file; create it on every node of the ingress, readable for the ingress's user"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_BYTES + 1)


def settings(key: str, path: Path) -> Settings:
    return parse_settings({"models": {"chat": {"model": "/a"}}, "ingress": {key: str(path)}})


@pytest.mark.timeout(20)
@pytest.mark.parametrize("key", ["api_keys_file", "tenants_file"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (fifo, REGULAR),
        (link_to_a_device, REGULAR),
        (large, "has more than 4194304 bytes; remove what does not belong in it"),
        (Path.mkdir, "cannot be read: Is a directory; create it on every node of the ingress, readable for the ingress's user"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, key: str, make: Callable[[Path], None], said: str) -> None:
    make(path := tmp_path / "keys")
    assert [str(each) for each in keys_file_problems(settings(key, path))] == [f"ingress.{key}: {path} {said}"]


def test_a_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "tenants.yaml").write_text("tenants: {t: {}} #".ljust(MAX_BYTES, "-"))
    assert len(read_keyring(settings("tenants_file", path))) == 0
    path.write_text(path.read_text() + "-")
    with pytest.raises(ConfigError, match="has more than 4194304 bytes"):
        read_keyring(settings("tenants_file", path))

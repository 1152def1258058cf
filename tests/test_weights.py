"""Weights on a volume are marked when complete, and refused when damaged. The hub is a small HTTP server that answers as its API does."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serve_app.checkpoints.weights import MARK, is_complete, verify, wait_for
from serve_app.errors import CheckpointError
from tests.serving import serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b'{"model_type": "llama"}\n', "model.safetensors": b"weights" * 1000}


class FakeHub(ThreadingHTTPServer):
    """One repository, org/name, at one commit. ``lies`` are paths whose bytes differ from their checksum."""

    lies: frozenset[str] = frozenset()

    def entry(self, path: str) -> dict[str, object]:
        content = FILES[path]
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(content)}
        if path.endswith(".safetensors"):
            oid = hashlib.sha256(content).hexdigest()
            return entry | {"oid": "0" * 40, "lfs": {"oid": oid, "size": len(content), "pointerSize": 100}}
        blob = b"blob %d\0" % len(content) + content
        return entry | {"oid": hashlib.sha1(blob).hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == f"/api/models/org/name/revision/{COMMIT}":
            siblings = [{"rfilename": name} for name in FILES]
            self._answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"/api/models/org/name/tree/{COMMIT}":
            self._answer(json.dumps([self.server.entry(name) for name in FILES]).encode())
        elif (name := path.removeprefix(f"/org/name/resolve/{COMMIT}/")) in FILES:
            content = FILES[name]
            self._answer(content[::-1] if name in self.server.lies else content, etag=str(self.server.entry(name)["oid"]))
        else:
            self.send_error(404)

    def _answer(self, body: bytes, etag: str = "none") -> None:
        self.send_response(200)
        for name, value in (("content-length", str(len(body))), ("etag", f'"{etag}"'), ("x-repo-commit", COMMIT)):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving(FakeHub(("127.0.0.1", 0), _Handler)) as server:
        yield server


def fetch(hub: FakeHub, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own: huggingface_hub reads its environment when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-c", "from serve_app.cli.main import main; main()", "model", "download", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_download_is_marked_when_every_file_has_the_hubs_checksum(hub: FakeHub, tmp_path: Path) -> None:
    target, mark = tmp_path / "models" / "name", f"hf:org/name@{COMMIT}"
    done = fetch(hub, str(target), mark, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {name: (target / name).read_bytes() for name in FILES} == FILES
    assert is_complete(target, mark)
    assert "already" in fetch(hub, str(target), mark, home=tmp_path).stdout


def test_a_file_that_is_not_the_hubs_is_named_and_nothing_is_marked(hub: FakeHub, tmp_path: Path) -> None:
    hub.lies = frozenset({"model.safetensors"})
    done = fetch(hub, str(tmp_path / "name"), f"hf:org/name@{COMMIT}", home=tmp_path)
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr
    assert not (tmp_path / "name" / MARK).exists()
    hub.lies = frozenset()
    assert fetch(hub, str(tmp_path / "name"), f"hf:org/name@{COMMIT}", home=tmp_path).returncode == 0


def test_a_repository_that_is_not_there_is_one_clear_line(hub: FakeHub, tmp_path: Path) -> None:
    done = fetch(hub, str(tmp_path / "name"), f"hf:org/other@{COMMIT}", home=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1]
    assert f"hf:org/other@{COMMIT} was not fetched" in done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in FILES.items()]
    (tmp_path / "SHA256SUMS").write_text("".join(lines))
    return tmp_path


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_files_that_have_their_checksums_are_marked(folder: Path) -> None:
    said: list[str] = []
    verify(folder, "s3://b/p@x", sha256=checksum(folder / "SHA256SUMS"), say=said.append)
    assert is_complete(folder, "s3://b/p@x")
    assert not is_complete(folder, "s3://b/p@y")
    assert len(said) == len(FILES)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "config.json").write_bytes(b"{}"), "config.json has the checksum"),
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
        (lambda folder: (folder / "SHA256SUMS").write_text(""), "lists other files"),
    ],
)
def test_damage_is_named_and_an_old_mark_goes(folder: Path, damage: object, named: str) -> None:
    sha256 = checksum(folder / "SHA256SUMS")
    (folder / MARK).write_text("an older one")
    assert callable(damage)
    damage(folder)
    with pytest.raises(CheckpointError, match=named):
        verify(folder, "s3://b/p@x", sha256=sha256, say=print)
    assert not (folder / MARK).exists()


def test_a_list_that_leaves_the_folder_is_refused(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  ../secret\n")
    with pytest.raises(CheckpointError, match="line 1"):
        verify(folder, "x", sha256=checksum(folder / "SHA256SUMS"), say=print)


def test_waiting_ends_when_the_last_mark_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / MARK).write_text("one")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / MARK).write_text("two")

    wait_for([(tmp_path / "a", "one"), (tmp_path / "b", "two")], timeout_s=60, say=say)
    assert said == [f"waiting for two in {tmp_path / 'b'}", "all weights are there"]


def test_waiting_gives_up_with_the_folder_and_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"did not get two within 0 s"):
        wait_for([(tmp_path, "two")], timeout_s=0, say=print)

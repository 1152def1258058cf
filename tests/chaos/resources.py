"""This module takes a resource from a fleet's processes and gives it back: descriptors, disk, memory, threads, time of day."""

import contextlib
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.e2e.fleet import wait_until

CGROUPS = Path("/sys/fs/cgroup")
_END_LIMIT_S = 60.0
_HOG = "import sys; held = bytearray(int(sys.argv[1])); held[::4096] = bytes([1]) * len(held[::4096]); sys.stdin.read()"


@contextlib.contextmanager
def descriptors(pid: int, limit: int) -> Iterator[None]:
    """Let the process open no descriptor from this number on."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Make connections on which nothing comes."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(5.0)
            with contextlib.suppress(OSError):
                sock.connect(("127.0.0.1", port))
            made.append(sock)
        yield made


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[None]:
    """Mount a disk of this size on the folder. Only root may."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "serve-app-test", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill the disk of the folder to its last byte."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def cgroup(controller: str, name: str) -> Iterator[Path]:
    """Make a group of cgroup v1; what is in it at the end goes back to where it came from."""
    group = CGROUPS / controller / name
    group.mkdir()
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (CGROUPS / controller / "cgroup.procs").write_text(pid)
        wait_until(partial(_is_removed, group), limit_s=_END_LIMIT_S, what=f"nothing in {group}")


def _is_removed(group: Path) -> bool:
    """Remove the group, unless processes that were killed in it have not ended yet."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@contextlib.contextmanager
def memory_taken(group: Path, num_bytes: int) -> Iterator[subprocess.Popen[bytes]]:
    """Take memory in the group by a process of its own.

    The kernel ends it after an engine core, which is larger, and before the engine core's supervisor, which has to say why: with a limit of
    256 MiB, 500 counts as 128 MiB more than it has.
    """
    command = [
        "sh",
        "-c",
        'echo 500 > /proc/self/oom_score_adj; echo $$ > "$0/cgroup.procs" && exec "$@"',
        str(group),
        sys.executable,
        "-c",
        _HOG,
        str(num_bytes),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as hog:
        try:
            yield hog
        finally:
            hog.kill()


def compiled_clock(folder: Path) -> Path | None:
    """Return the library of clock_step.c; None without a compiler."""
    if (compiler := shutil.which("cc")) is None:
        return None
    library = folder / "clock_step.so"
    source = Path(__file__).with_name("clock_step.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def set_clock(step_file: Path, step_s: int) -> None:
    """Move the wall clock of the processes that have the library and this file."""
    with step_file.open("r+b" if step_file.exists() else "wb") as file:
        file.write(struct.pack("q", step_s))


def is_root() -> bool:
    return os.geteuid() == 0

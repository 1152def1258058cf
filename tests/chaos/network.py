"""This module makes a network for one test, in which packets to or from a port are dropped without notice to either side.

Linux keeps the network by thread: what a thread starts, processes and threads, has the network that the thread had. So the tests of
a module move themselves, start their fleet and their clients as always, and nobody else on the machine has their packets dropped.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

Rule = tuple[str, ...]


def why_not() -> str | None:
    """Return why no network of one's own can be had here; None if it can."""
    if not hasattr(_libc, "unshare") or not hasattr(_libc, "setns"):
        return "it needs Linux"
    if missing := [program for program in ("ip", "iptables") if shutil.which(program) is None]:
        return f"it needs {' and '.join(missing)}"
    if os.geteuid() != 0:
        return "it needs root, for a network namespace"
    try:
        with own_network():
            _iptables("-A", "INPUT", "-p", "tcp", "--sport", "9", "--dport", "9", "-j", "DROP")
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"it needs a network namespace with iptables in it: {exc}"
    return None


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Give this thread, and what it starts, a network that has nothing but its own loopback interface."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _check(_libc.unshare(_CLONE_NEWNET))
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
            yield
        finally:
            _check(_libc.setns(home, _CLONE_NEWNET))
    finally:
        os.close(home)


@contextlib.contextmanager
def dropped(*rules: Rule) -> Iterator[None]:
    """Drop the packets that any of these rules names, until the block ends."""
    with contextlib.ExitStack() as stack:
        for rule in rules:
            _iptables("-I", "INPUT", *rule, "-j", "DROP")
            stack.callback(_iptables, "-D", "INPUT", *rule, "-j", "DROP")
        yield


def to_port(port: int) -> Rule:
    return "-p", "tcp", "--dport", str(port)


def from_port(port: int) -> Rule:
    return "-p", "tcp", "--sport", str(port)


@dataclass(frozen=True)
class Connections:
    """Those that a process has to a port, by its own ends of them."""

    port: int
    own_ports: tuple[int, ...]

    @classmethod
    def of(cls, pid: int, port: int) -> "Connections":
        found = psutil.Process(pid).net_connections(kind="tcp")
        return cls(port, tuple(c.laddr.port for c in found if c.raddr and c.raddr.port == port))

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Have the kernel count, behind all that is dropped, the packets on them that push data."""
        with contextlib.ExitStack() as stack:
            for own in self.own_ports:
                rule = (*from_port(self.port), "--dport", str(own), "--tcp-flags", "PSH", "PSH")
                _iptables("-A", "INPUT", *rule)
                stack.callback(_iptables, "-D", "INPUT", *rule)
            yield

    def num_received(self) -> int:
        """Return how many packets with data have come on them since they are counted."""
        lines = [line.split() for line in _iptables("-L", "INPUT", "-n", "-v", "-x").splitlines()]
        ends = [{f"spt:{self.port}", f"dpt:{own}"} for own in self.own_ports]
        return sum(int(line[0]) for line in lines if any(end <= set(line) for end in ends))


def _iptables(*arguments: str) -> str:
    return subprocess.run(["iptables", "-w", *arguments], check=True, capture_output=True, text=True).stdout


def _check(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

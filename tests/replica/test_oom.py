"""The kernel ends the right process when memory runs out.

Stand-ins hold memory in a cgroup whose limit is the machine; the kernel decides.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.replica.oom import ABOVE_FIRST, ABOVE_OTHERS

CGROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_MIB = 512
END_LIMIT_S = 120.0
_STAND_IN = """
import sys, time
from serve_app.replica.oom import OomOrder
rank, held_mib, grows_to_mib = sys.argv[1:]
if rank:
    OomOrder().set_rank(int(rank))
sys.stdin.readline()
held = [bytes([1]) * (1 << 20) for _ in range(int(held_mib))]
print("holds", flush=True)
sys.stdin.readline()
while len(held) < int(grows_to_mib):
    held.append(bytes([1]) * (1 << 20))
sys.stdin.readline()
"""


class Machine:
    """A cgroup of ``LIMIT_MIB``, and the processes in it."""

    def __init__(self, cgroup: Path) -> None:
        self._cgroup = cgroup
        self.processes: list[subprocess.Popen[bytes]] = []

    def process(self, rank: str, mib: int, *, grows_to_mib: int = 0) -> subprocess.Popen[bytes]:
        """Start a process that holds ``mib``. With a rank it stands for a replica, without one for an ingress, or a neighbour's process."""
        command = [sys.executable, "-c", _STAND_IN, rank, str(mib), str(grows_to_mib)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.processes.append(process)
        (self._cgroup / "cgroup.procs").write_text(str(process.pid))
        tell(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        return process

    def killed(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() == -9]


def tell(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


@pytest.fixture
def machine() -> Iterator[Machine]:
    cgroup = CGROUPS / f"serve-app-test-{os.getpid()}"
    try:
        cgroup.mkdir()
        (cgroup / "memory.limit_in_bytes").write_text(str(LIMIT_MIB << 20))
    except OSError as exc:
        pytest.skip(f"needs memory cgroups of version 1 that this user may make: {exc}")
    machine = Machine(cgroup)
    try:
        yield machine
    finally:
        for process in machine.processes:
            with process:
                process.kill()
        with contextlib.suppress(OSError):
            cgroup.rmdir()


def test_a_neighbour_that_takes_the_memory_goes_and_all_of_the_service_stays(machine: Machine) -> None:
    for rank, mib in (("", 64), ("0", 32), ("1", 32)):
        machine.process(rank, mib)
    neighbour = machine.process("", 1, grows_to_mib=LIMIT_MIB)
    tell(neighbour)
    neighbour.wait(END_LIMIT_S)
    assert machine.killed() == [neighbour]


def test_another_replica_goes_before_the_first_one_that_is_larger(machine: Machine) -> None:
    machine.process("", 80)
    machine.process("0", 218)
    another = machine.process("1", 1, grows_to_mib=LIMIT_MIB)
    tell(another)
    another.wait(END_LIMIT_S)
    assert machine.killed() == [another]


def test_the_first_replica_goes_before_an_ingress_that_is_larger(machine: Machine) -> None:
    machine.process("", 280)
    first = machine.process("0", 1, grows_to_mib=LIMIT_MIB)
    tell(first)
    first.wait(END_LIMIT_S)
    assert machine.killed() == [first]


def test_the_processes_of_a_replica_follow_its_rank() -> None:
    follower = "import sys; from serve_app.replica.oom import OomOrder; order = OomOrder()\n"
    follower += "import subprocess; child = None\n"
    follower += "for rank in (1, 0):\n"
    follower += "    order.set_rank(rank)\n"
    follower += "    child = child or subprocess.Popen(['sleep', '60'])\n"
    follower += "    print([open(f'/proc/{pid}/oom_score_adj').read().strip() for pid in ('self', child.pid)])\n"
    follower += "child.kill()"
    inherited = int(Path("/proc/self/oom_score_adj").read_text())
    ended = subprocess.run([sys.executable, "-c", follower], capture_output=True, text=True, check=True, timeout=END_LIMIT_S)
    assert ended.stdout.splitlines() == [str([str(inherited + above)] * 2) for above in (ABOVE_OTHERS, ABOVE_FIRST)]

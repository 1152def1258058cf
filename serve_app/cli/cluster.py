"""This module runs the command line's own Ray cluster: in a temporary folder on free ports, found again by its name."""

import atexit
import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from pydantic import TypeAdapter, ValidationError

from serve_app.cli.early_end import ended_by_signals
from serve_app.cli.options import INTERRUPTED
from serve_app.cli.reaper import Reaper, end_processes
from serve_app.config import Settings, default_cache_dir
from serve_app.config.settings import is_application_name
from serve_app.engine_args import PROCESS_ENVIRONMENT
from serve_app.environment import as_typed
from serve_app.errors import ClusterFailed, ClusterSilent

T = TypeVar("T")
RAY_LIMIT_S = 30.0
RAY_STARTS = 2
"""How often our own Ray node is started before `up` gives up."""
_CONNECT_LIMIT_S = 10.0
_END_POLL_S = 0.1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
OBJECT_STORE_BYTES = 100 << 20
"""Size of the object store of our own Ray cluster, in /dev/shm. Requests do not pass through it."""

_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's memory monitor ends workers by the age of their tasks, not by who took the memory. It has ended the lease board, the controller,
    # all replicas and the ingress one after the other. The kernel counts caches as free, and chooses by size and by `replica/oom.py`.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's default of 1000 makes the kernel end its workers before anything else of the machine, and all of them alike.
    "RAY_worker_oom_score_adjustment": "0",
}
"""The environment of our own Ray cluster. Variables that are set already win."""


def identity(pid: int) -> str:
    """Return the identity of a process: the boot of the machine and the clock tick of the process's start.

    No other process of this machine has or had the same identity, though it may have the same number. The identity is "" if there is no
    such process, or it has ended, even if its parent has not waited for it. psutil's ``create_time()`` would not do: it follows each step
    of the clock.
    """
    try:
        # The fields behind the name are: state, parent, ...
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state, start_ticks = fields[0], fields[19]
    return "" if state in "ZX" else f"{_BOOT_ID.read_text().strip()}/{start_ticks}"


@dataclass(frozen=True)
class RunState:
    """The data by which other commands find a running ``serve-app up``: one JSON file per application name."""

    name: str
    pid: int
    ray_address: str
    ray_token: str
    url: str
    process: str = ""
    """`identity` of the process."""
    created: float = 0.0
    """Start of the process in seconds since the epoch, which version 0.1.0 and older wrote in place of ``process``."""

    @classmethod
    def of_this_process(cls, name: str, ray_address: str, ray_token: str, url: str) -> Self:
        return cls(name, os.getpid(), ray_address, ray_token, url, identity(os.getpid()))

    def is_alive(self) -> bool:
        """Return whether this very process still runs, and not another process with the same number."""
        found = identity(self.pid)
        if self.process:
            return found == self.process
        with contextlib.suppress(psutil.NoSuchProcess):
            return found != "" and abs(psutil.Process(self.pid).create_time() - self.created) < 1.0
        return False

    @staticmethod
    def path(name: str) -> Path:
        return default_cache_dir() / "run" / f"{name}.json"

    def save(self) -> None:
        path = self.path(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.touch(mode=0o600)  # the file holds the cluster's token
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    @classmethod
    def load(cls, name: str) -> "RunState | None":
        """Return the state of a living run; the file of a killed run is removed.

        Return None also for a name that no application can have: it may be a path to any file.

        Raises:
            ClusterFailed: The file cannot be read, or holds something else.
        """
        if not is_application_name(name):
            return None
        path = cls.path(name)
        try:
            state = _STATE.validate_json(path.read_bytes(), strict=True)
        except FileNotFoundError:
            return None
        except OSError as exc:
            hint = "if another user started that application, set SERVE_APP_CACHE to a folder of your own"
            raise ClusterFailed(problem=f"{path} cannot be read: {exc.strerror}", hint=hint) from exc
        except ValidationError as exc:
            raise ClusterFailed(problem=f"{path} is not a file of serve-app up", hint="remove it, or move it away") from exc
        if state.is_alive():
            return state
        with contextlib.suppress(PermissionError):  # the folder is another user's
            path.unlink(missing_ok=True)
        return None


_STATE = TypeAdapter(RunState)


def find_run(name: str) -> RunState:
    """Return the running application of that name.

    Raises:
        ClusterFailed: No application of that name runs here.
    """
    state = RunState.load(name)
    if state is None:
        others = _running_here()
        hint = f"running here: {', '.join(others)}" if others else f"start it with: {as_typed()} up -f FILE"
        hint = f"an address comes after --url: --url {name}" if "://" in name else hint
        raise ClusterFailed(problem=f"no application named {name!r} runs on this machine", hint=hint)
    return state


def _running_here() -> list[str]:
    """Return the names of the applications that run here. Files that cannot be read are skipped."""
    found = []
    for path in sorted(RunState.path("any").parent.glob("*.json")):
        with contextlib.suppress(ClusterFailed):
            found += [state.name] if (state := RunState.load(path.stem)) else []
    return found


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Return what ``call`` returns. It runs in a thread, because without a raylet Ray's calls wait for ever and ignore Ctrl-C.

    Raises:
        ClusterSilent: No answer within ``limit_s`` seconds.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(limit_s)
    except TimeoutError:
        raise ClusterSilent(problem=f"Ray has not answered for {limit_s:g} s", hint="its processes may be dead") from None


@contextlib.contextmanager
def local_cluster(settings: Settings) -> Iterator[str]:
    """Start a Ray cluster on loopback for this configuration, yield its address, and remove all of it at the end.

    A SIGINT or SIGTERM while Ray starts prints a line, kills Ray's processes and ends this process.
    """
    temp_dir = tempfile.mkdtemp(prefix="serve-app-")
    reaper = Reaper(Path(temp_dir))
    # Workers inherit the driver's environment; replicas get the same by runtime_env on a cluster we did not start.
    os.environ.update({k: os.environ.get(k, v) for k, v in PROCESS_ENVIRONMENT.items()})
    os.environ.update({k: os.environ.get(k, v) for k, v in _RAY_ENVIRONMENT.items()})
    # vLLM leaves its workers' sockets and rendezvous files in the temporary folder. Ray opens its own folder to all users.
    os.environ["TMPDIR"] = temp_dir
    _use_token(secrets.token_hex(32))
    try:
        with ended_by_signals(lambda: _end_start(reaper)):
            context = _start_ray(settings, temp_dir, reaper)
    except ClusterFailed:
        atexit.register(os._exit, 1)  # Ray's own handlers would wait for the processes that are killed here
        _kill_start(reaper)
        raise
    import ray

    try:
        yield str(context.address_info["address"])
    finally:
        mine = reaper.others()
        try:
            refuse_dead_ray()
            within(RAY_LIMIT_S, ray.shutdown)
        except Exception:
            # Ray is dead: its shutdown would end this process before the error is printed, or wait, or crash at exit.
            atexit.register(os._exit, 1)
        atexit.unregister(ray.shutdown)
        end_processes(mine)
        reaper.finish()


def _end_start(reaper: Reaper) -> None:
    print("ending Ray, which was still starting: a second or two, longer on a busy machine", file=sys.stderr, flush=True)
    _kill_start(reaper)
    os._exit(INTERRUPTED)


def _kill_start(reaper: Reaper) -> None:
    """Kill what a start of Ray has begun: nothing serves yet that would have to end in order."""
    end_processes(reaper.others(), grace_s=0)
    reaper.finish()


def _start_ray(settings: Settings, temp_dir: str, reaper: Reaper) -> Any:
    """Return what ``ray.init`` returns for a new Ray node in the folder ``ray`` of ``temp_dir``.

    Ray gives its raylet 30 s to register, whatever else the machine does, and has no setting for this limit. On a busy machine the raylet
    may need longer, so Ray is started once more.

    Raises:
        ClusterFailed: Ray has not started ``RAY_STARTS`` times in a row. The processes of the last start are left.
    """
    import ray

    folder = f"{temp_dir}/ray"
    for attempt in range(1, RAY_STARTS + 1):
        try:
            return ray.init(
                address="local",
                num_cpus=_num_cpus(settings),
                num_gpus=_gpus_for_ray(settings),
                include_dashboard=False,
                log_to_driver=False,
                logging_level="warning",
                namespace=settings.name,
                _temp_dir=folder,
                _node_ip_address="127.0.0.1",
                object_store_memory=OBJECT_STORE_BYTES,
            )
        except Exception as exc:  # Ray raises plain exceptions
            problem = f"Ray did not start: {str(exc).rstrip('.')}"
            if attempt == RAY_STARTS:
                raise ClusterFailed(problem=problem, hint="on a busy machine, start again") from exc
            print(f"{problem}; trying once more", file=sys.stderr, flush=True)
            end_processes(reaper.others(), grace_s=0)
            shutil.rmtree(folder, ignore_errors=True)


def refuse_dead_ray() -> None:
    """Raise ClusterFailed if this process's own Ray node has lost its control store or raylet: then Ray replaces nothing any more."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() in ("gcs_server", "raylet") and process.status() == psutil.STATUS_ZOMBIE:
                raise ClusterFailed(problem=f"Ray's {process.name()} has ended (killed, or out of memory?)", hint="start again")


def _use_token(token: str) -> None:
    """Set Ray's own authentication, which Ray reads when it is imported; its default is one token per user, in a file."""
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})


def ray_token() -> str:
    """Return the token with which this process speaks to Ray; empty if this process has no token of its own."""
    return os.environ.get("RAY_AUTH_TOKEN", "")


def _num_cpus(settings: Settings) -> int:
    """Return the CPUs that Ray is to count: as many as all replicas may ask for, whatever the machine has."""
    wanted = sum(m.num_cpus * (m.replicas.max + m.surge()) for m in settings.models.values())
    wanted += settings.ingress.num_cpus * settings.ingress.replicas.max * 2  # in an update, old and new ingresses run at once
    return max(os.cpu_count() or 1, int(wanted) + 1)


def simulated_gpus(settings: Settings) -> int | None:
    """Return the number of GPUs to declare to Ray; None: Ray counts the real GPUs.

    If every model that holds GPUs is simulated, so are the GPUs: ``autoscaling.max_gpus``, or else as many as all models may hold at once
    during updates.
    """
    holders = [m for m in settings.models.values() if m.gpus_per_replica]
    if not holders or any(m.simulated is None for m in holders):
        return None
    return settings.autoscaling.max_gpus or math.ceil(sum(m.gpu_share() * (m.replicas.max + m.surge()) for m in holders))


def _gpus_for_ray(settings: Settings) -> int | None:
    """Return `simulated_gpus`. If there are any, remove the restriction of real GPUs from this process's environment."""
    if (num_gpus := simulated_gpus(settings)) is not None:
        # Ray refuses to start with more GPUs than the variable names, and this fleet uses no real GPU.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return num_gpus


def connect(address: str, namespace: str, token: str = "") -> None:
    """Connect this process to a running cluster.

    Raises:
        ClusterFailed: Nothing answers there.
    """
    _refuse_closed_port(address)
    if token:
        _use_token(token)
    os.environ["RAY_LOG_TO_STDERR"] = "0"  # KubeRay's pods have 1, which would mix Ray's lines with ours on stdout
    import ray

    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="error", configure_logging=False)
    except (
        ConnectionError,
        RuntimeError,
        ValueError,
        ray.exceptions.RaySystemError,
    ) as exc:  # RaySystemError: the GCS is too slow
        tokenless = "RAY_AUTH_MODE" not in os.environ
        hint = "if the cluster was started with Ray's token authentication, set RAY_AUTH_MODE=token" if tokenless else ""
        raise ClusterFailed(problem=f"no Ray cluster answers at {address}: {exc}", hint=hint) from exc


def _refuse_closed_port(address: str) -> None:
    """Refuse an address HOST:PORT where nothing listens; Ray itself would try for more than a minute. `auto` and `ray://` are left to Ray.

    Raises:
        ClusterFailed: Nothing takes a connection there.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_LIMIT_S).close()
    except (OSError, OverflowError) as exc:
        hint = "name the GCS of a Ray cluster that runs, HOST:PORT with Ray's port 6379, or leave --address out"
        raise ClusterFailed(problem=f"no Ray cluster answers at {address}: {exc}", hint=hint) from exc


def connect_to_run(name: str, address: str) -> str:
    """Connect this process to the cluster at ``address``, or else to that of the `serve-app up` here; return the application's URL.

    The URL is "" for a given address, because the cluster does not know it.

    Raises:
        ClusterFailed: Nothing answers there, or no application of that name runs here.
    """
    if address:
        connect(address, name)
        return ""
    state = find_run(name)
    connect(state.ray_address, name, state.ray_token)
    return state.url


def interrupt(run: RunState) -> None:
    """Ask a ``serve-app up`` to end as Ctrl-C would, and wait until it has ended. A second request cuts no streams: only SIGINT does.

    Raises:
        ClusterFailed: The process belongs to another user.
    """
    try:
        os.kill(run.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as exc:
        raise ClusterFailed(problem=f"process {run.pid} belongs to another user", hint="ask them to stop it") from exc
    while run.is_alive():
        time.sleep(_END_POLL_S)


def members(settings_name: str) -> list[dict[str, Any]]:
    """Return the leases of the connected cluster's application as plain data; empty when its board does not answer."""
    import ray

    from serve_app.membership import board_name

    try:
        board = ray.get_actor(board_name(settings_name), namespace=settings_name)
        leases = ray.get(board.members.remote(), timeout=5)
    except (ValueError, ray.exceptions.RayError):
        return []
    return [lease.row() for lease in leases]

"""This module has what the benchmarks of quotas share: fleets with tenants, requests at given times, and figures of what was admitted."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.tenant_fleet import key_of, write_tenants
from serve_app.checkpoints import make_tiny_llama
from tests.doubles.fleet import MODEL


def most_in_a_minute(amounts: Iterable[tuple[float, int]]) -> int:
    """Return the largest sum of the amounts of any 60 seconds; each amount has the time in seconds at which it was used."""
    window: deque[tuple[float, int]] = deque()
    most = total = 0
    for at, amount in sorted(amounts):
        window.append((at, amount))
        total += amount
        while window[0][0] <= at - 60:
            total -= window.popleft()[1]
        most = max(most, total)
    return most


def exact(demand: Iterable[tuple[float, int]], limit: int) -> int:
    """Return how much a demand gets from one exact sliding count: requests at these times, in order, each of its amount."""
    window: deque[tuple[float, int]] = deque()
    used = total = 0
    for at, amount in demand:
        while window and window[0][0] <= at - 60:
            used -= window.popleft()[1]
        if used + amount <= limit:
            window.append((at, amount))
            used += amount
            total += amount
    return total


async def at_times(times: Sequence[float], send: Callable[[int], Coroutine[Any, Any, None]]) -> list[float]:
    """Start ``send(i)`` at the i-th time, in seconds from now, whatever became of the earlier ones.

    Returns:
        When each was started, on the monotonic clock. The call returns when all have ended.
    """
    began_at, sent = time.monotonic(), list[float]()
    async with asyncio.TaskGroup() as tg:
        for i, at in enumerate(times):
            await asyncio.sleep(max(0.0, began_at + at - time.monotonic()))
            sent.append(time.monotonic())
            tg.create_task(send(i))
    return sent


def client(seconds: float = 60.0) -> httpx.AsyncClient:
    """Return a client that opens a connection for each request, so that the kernel spreads them over the ingresses."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=seconds, limits=limits, trust_env=False)


def authorization(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(tenant)}"}


def config_of(
    folder: Path,
    port: int,
    *,
    ingresses: int,
    limits: Mapping[str, Mapping[str, int]],
    simulated: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the configuration of a fleet with two simulated accelerators, whose files lie in ``folder``.

    Args:
        limits: The limits of each tenant by its name; without a tenant the fleet asks for no keys.
        simulated: Further settings of the simulated accelerators.
    """
    ingress: dict[str, Any] = {"port": port, "num_cpus": 0.1, "replicas": {"min": ingresses, "max": ingresses}}
    if limits:
        write_tenants(folder / "tenants.yaml", {name: {"limits": dict(limit)} for name, limit in limits.items()})
        ingress["tenants_file"] = str(folder / "tenants.yaml")
    return {
        "name": f"quotas-{port}",
        "models": {
            MODEL: {
                "model": str(make_tiny_llama(folder / "text")),
                "num_cpus": 0.1,
                "simulated": {"profile": "a10g-llama-8b", **(simulated or {})},
                "replicas": {"min": 2, "max": 2},
                "engine_args": {"max_model_len": 512},
            }
        },
        "ingress": ingress,
    }

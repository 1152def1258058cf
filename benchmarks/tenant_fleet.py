"""This module describes fleets with tenants for the benchmarks: keys, the tenants file, two models that differ in fairness alone.

The model `FCFS` names `scheduling_policy: fcfs`; the model `FAIR` has the policy that serve-app gives models of fleets with tenants.
All else is equal. Each model has engines of its own, so that one fleet can play the same load on both, one after the other.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.routing_live import long_model
from serve_app.books.ledger_lines import LedgerLine, ledger_files
from serve_app.books.usage import was_answered

FCFS, FAIR = "fcfs", "fair"
SIDES = (FCFS, FAIR)
REPLICAS, PLACES = 2, 16
"""Replicas of a model, and `max_num_seqs` of each: a step of 16 answers takes 34 ms on the simulated A10G, and 1 ms of CPU."""
_ENGINE = {"max_model_len": 4096, "max_num_seqs": PLACES, "max_num_batched_tokens": 512}


class Served(msgspec.Struct):
    """The ledger's sums of one tenant in a window. ``prompt`` and ``cached`` are tokens of the requests whose first token came in it."""

    gpu_s: float = 0.0
    prompt: int = 0
    cached: int = 0
    requests: int = 0
    replicas: dict[str, float] = {}
    """GPU-seconds by replica."""


def key_of(tenant: str) -> str:
    return f"sk-of-the-tenant-{tenant}"


def write_tenants(path: Path, tenants: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a tenants file: each tenant has the key of `key_of`, and the given settings beside it."""
    entries = {
        name: {"keys": [{"id": name, "sha256": hashlib.sha256(key_of(name).encode()).hexdigest()}], **settings}
        for name, settings in tenants.items()
    }
    path.write_text(yaml.safe_dump({"tenants": entries}))


def config_of(
    folder: Path, port: int, *, sides: Iterable[str] = SIDES, ingresses: int = 1, tenants: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the configuration of a fleet with a model for each side; make its checkpoint and tenants file in the folder."""
    write_tenants(folder / "tenants.yaml", tenants)
    model = {
        "model": str(long_model(folder / "tiny")),
        "num_cpus": 0.1,
        "simulated": {"profile": "a10g-llama-8b"},
        "replicas": {"min": REPLICAS, "max": REPLICAS},
    }
    policies: dict[str, dict[str, Any]] = {FCFS: {"scheduling_policy": "fcfs"}, FAIR: {}}
    return {
        "name": f"fairness-{port}",
        "models": {side: {**model, "engine_args": {**_ENGINE, **policies[side]}} for side in sides},
        "ingress": {
            "port": port,
            "num_cpus": 0.1,
            "replicas": {"min": ingresses, "max": ingresses},
            "tenants_file": str(folder / "tenants.yaml"),
            "ledger": {"dir": str(folder / "ledger")},
        },
        "timeouts": {"drain_s": 5, "no_replica_s": 5},
    }


def read_ledger(folder: Path) -> Iterator[LedgerLine]:
    """Yield the requests of all ingresses so far. The last line of a file may not be complete yet."""
    decoder = msgspec.json.Decoder(LedgerLine)
    for path in ledger_files(folder):
        for line in path.read_bytes().splitlines():
            if line.startswith(b'{"seq"') and line.endswith(b"}"):
                yield decoder.decode(line)


def served(lines: Iterable[LedgerLine], model: str, begin: float, end: float) -> dict[str, Served]:
    """Return what engines did for each tenant from ``begin`` to ``end``, in seconds since the epoch.

    A request that was answered only partly within the window has that part of its GPU-seconds, as if they were spread evenly from its
    first token to its end.
    """
    found: dict[str, Served] = {}
    for line in lines:
        if line.model != model or not was_answered(line) or line.first_token_s is None:
            continue
        first, last = line.time + line.first_token_s, line.time + line.total_s
        sums = found.setdefault(line.tenant or "", Served())
        gpu_s = (line.gpu_s if line.gpu_s is not None else math.nan) * _part(first, last, begin, end)
        sums.gpu_s += gpu_s
        for replica in line.replicas[-1:]:
            sums.replicas[replica] = sums.replicas.get(replica, 0.0) + gpu_s
        if begin <= first < end:
            sums.prompt += line.prompt_tokens
            sums.cached += line.cached_tokens or 0
            sums.requests += 1
    return found


def _part(first: float, last: float, begin: float, end: float) -> float:
    """Return which share of the time from ``first`` to ``last`` is within the window."""
    if last <= first:
        return float(begin <= first < end)
    return max(0.0, min(last, end) - max(first, begin)) / (last - first)

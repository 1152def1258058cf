"""These tests check the engines of a batch: neighbours and padding change no request's tokens; times are the timing model's."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.static_batching.batches import step_ends_s
from benchmarks.static_batching.engines import BatchRequest, SimulatedEngine, TransformersEngine
from benchmarks.static_batching.settings import StaticSettings, parse_static
from serve_app.checkpoints import make_tiny_llama
from tests.e2e.fleet import answers, wait_until

START_S = 120.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("checkpoints") / "tiny")


def _settings(tiny: Path, **change: Any) -> StaticSettings:
    values = {"name": "m", "model": str(tiny), "max_batch_size": 4, "max_prompt_tokens": 64, "max_output_tokens": 32}
    return parse_static({**values, **change})


def _simulated(tiny: Path, time_scale: float) -> StaticSettings:
    return _settings(tiny, simulated={"profile": "h100-llama-8b", "time_scale": time_scale})


def _requests(*sizes: tuple[int, int]) -> list[BatchRequest]:
    now = time.perf_counter()
    return [BatchRequest(list(range(10, 10 + size)), max_tokens, ignore_eos=True, arrived_at=now) for size, max_tokens in sizes]


@pytest.mark.parametrize("kind", [SimulatedEngine, TransformersEngine])
def test_a_batch_gives_everybody_the_tokens_they_get_alone(kind: Any, tiny: Path) -> None:
    engine = kind(_simulated(tiny, 1e-6) if kind is SimulatedEngine else _settings(tiny), tiny)
    batch = _requests((9, 12), (3, 5), (20, 1))
    together = asyncio.run(engine.run(batch, 12))
    alone = [asyncio.run(engine.run([request], request.max_tokens)).token_ids[0] for request in batch]
    assert [ids[: r.max_tokens] for ids, r in zip(together.token_ids, batch, strict=True)] == alone
    assert len(together.step_ends_s) == 12
    assert together.step_ends_s == sorted(together.step_ends_s)


def test_simulated_batches_follow_each_other_without_a_gap_and_take_what_the_timing_model_says(tiny: Path) -> None:
    settings = _simulated(tiny, 10.0)
    engine, profile = SimulatedEngine(settings, tiny), settings.profile
    assert profile is not None

    async def two() -> list[Any]:
        full = _requests(*[(16, 8)] * 4)
        return [await engine.run(full, 8), await engine.run(full, 8)]

    first, second = asyncio.run(two())
    assert first.step_ends_s == [10.0 * end for end in step_ends_s(profile, [16] * 4, 8)]
    assert second.started_at == pytest.approx(first.started_at + first.step_ends_s[-1], abs=1e-6)


@pytest.fixture
def server(tiny: Path, tmp_path: Path) -> Iterator[tuple[str, Path, int]]:
    """A running static server: its URL, its file, its process id."""
    file = tmp_path / "static.yaml"
    file.write_text(yaml.safe_dump(_simulated(tiny, 1.0).model_dump(mode="json")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.static_batching", str(file), "--port", str(port)]
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(f"{url}/settings"), limit_s=START_S, what="the static server is up")
        yield url, file, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.slow
@pytest.mark.engine
def test_requests_share_a_batch_behind_serves_proxy_and_sighup_changes_it(server: tuple[str, Path, int], tiny: Path) -> None:
    url, file, pid = server

    def ask(size: int) -> Any:
        body = {"model": "m", "prompt": list(range(10, 20)), "max_tokens": size}
        return httpx.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": f"r{size}"}, timeout=60).json()

    ask(1)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, [30, 31, 32, 29, 28, 27, 26, 25]))
    assert [a["usage"]["completion_tokens"] for a in replies] == [30, 31, 32, 29, 28, 27, 26, 25]
    assert len({a["choices"][0]["text"][:10] for a in replies}) == 1
    batches = json.loads(httpx.get(f"{url}/batches", timeout=10).content)
    members = [m["id"] for b in batches for m in b["members"]]
    assert sorted(members) == sorted(["r1", *(f"r{n}" for n in (30, 31, 32, 29, 28, 27, 26, 25))])
    assert max(len(b["members"]) for b in batches) <= 4
    assert all(len(b["step_ends_s"]) == max(m["output_tokens"] for m in b["members"]) for b in batches)

    file.write_text(yaml.safe_dump(_settings(tiny, max_batch_size=2).model_dump(mode="json")))
    os.kill(pid, signal.SIGHUP)

    def changed() -> bool:
        return bool(httpx.get(f"{url}/settings", timeout=60).json()["batch_size"] == 2)

    wait_until(changed, limit_s=START_S, what="the new settings are there")
    assert ask(3)["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": [10_000_000]}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "bad_request")

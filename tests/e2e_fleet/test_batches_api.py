"""These tests take the database of two API batches away, or make it refuse writes, on a fleet of simulated replicas."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.batch.postgres_server import PostgresServer, database_url, postgres
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet

__all__ = ["database_url", "postgres"]
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8052
KEYS = "first-key-of-a-client", "second-key-of-a-client"
NUM_LINES = 150
AWAY_S, READ_ONLY_S, LIMIT_S = 30.0, 10.0, 600.0
AWAY = "the storage of files and batches does not answer; nothing is lost; retry in 5 s"


@pytest.fixture
def running(configure: Configure, tmp_path: Path, database_url: str) -> Iterator[Fleet]:
    config = configure(
        PORT,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": 4.0, "no_replica_s": 60.0},
        simulated={"profile": "a10g-llama-8b", "eos_probability": 0.0},
    )
    (tmp_path / "url").write_text(database_url)
    (tmp_path / "keys").write_text("\n".join(KEYS))
    batch = {"database_file": str(tmp_path / "url"), "files": f"file://{tmp_path}/files", "concurrency": 8}
    config["ingress"] |= {"batch": batch, "api_keys_file": str(tmp_path / "keys")}
    with fleet(config, tmp_path) as running:
        yield running


class Client:
    """OpenAI's client with one API key, and its batch."""

    def __init__(self, url: str, key: str) -> None:
        self.api = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60.0)
        self.batch_id = ""

    def begin(self) -> None:
        lines = [
            {
                "custom_id": f"id-{i}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": MODEL, "prompt": f"prompt {i}", "max_tokens": 60, "ignore_eos": True},
            }
            for i in range(NUM_LINES)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = self.api.files.create(file=("in.jsonl", content), purpose="batch")
        self.batch_id = self.api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id

    def batch(self) -> Batch:
        return self.api.batches.retrieve(self.batch_id)

    def num_completed(self) -> int:
        counts = self.batch().request_counts
        return 0 if counts is None else counts.completed

    def has_completed(self) -> bool:
        return self.batch().status == "completed"

    def chat(self) -> int:
        """Return how many tokens a client that is no batch gets."""
        answer = self.api.completions.create(model=MODEL, prompt="x", max_tokens=4, extra_body={"ignore_eos": True})
        assert answer.usage is not None
        return answer.usage.completion_tokens

    def answers(self) -> list[dict[str, Any]]:
        """Return the lines of the output; there is no file of errors."""
        batch = self.batch()
        assert batch.error_file_id is None
        return [json.loads(line) for line in self.api.files.content(batch.output_file_id or "").text.splitlines()]


@contextlib.contextmanager
def away(postgres: PostgresServer) -> Iterator[None]:
    postgres.stop()
    try:
        yield
    finally:
        postgres.start()


@contextlib.contextmanager
def read_only(postgres: PostgresServer) -> Iterator[None]:
    postgres.take_no_writes()
    try:
        yield
    finally:
        postgres.take_writes()


def answered_lines(running: Fleet) -> float:
    return running.ingresses()[0].get(("serve_app_batch_lines_total", (("outcome", "answered"),)), 0.0)


def refused(call: Callable[[], object]) -> tuple[int, str, str]:
    with pytest.raises(openai.InternalServerError) as error:
        call()
    body = error.value.response.json()["error"]
    return error.value.status_code, body["type"], body["message"]


def test_two_batches_outlive_a_database_that_is_away_and_then_takes_no_writes(running: Fleet, postgres: PostgresServer) -> None:
    clients = [Client(running.url, key) for key in KEYS]
    with ThreadPoolExecutor() as threads:
        list(threads.map(Client.begin, clients))
    wait_until(lambda: all(client.num_completed() >= 5 for client in clients), limit_s=LIMIT_S, what="both run", every_s=0.5)

    with away(postgres):
        until, before = time.monotonic() + AWAY_S, answered_lines(running)
        while time.monotonic() < until:
            for client in clients:
                assert refused(client.batch) == (503, "storage_away", AWAY)
                assert client.chat() == 4
        assert answered_lines(running) > before, "lines are asked on"
    told = [client.num_completed() for client in clients]

    with read_only(postgres):
        until = time.monotonic() + READ_ONLY_S
        while time.monotonic() < until:
            for client, least in zip(clients, told, strict=True):
                assert client.num_completed() >= least
                upload = partial(client.api.files.create, file=("in.jsonl", b"{}\n"), purpose="batch")
                assert refused(upload) == (503, "storage_away", AWAY)

    for client in clients:
        wait_until(client.has_completed, limit_s=LIMIT_S, what="all lines are answered", every_s=0.5)
        lines = client.answers()
        assert [line["custom_id"] for line in lines] == [f"id-{i}" for i in range(NUM_LINES)]
        assert {line["response"]["body"]["usage"]["completion_tokens"] for line in lines} == {60}
    assert answered_lines(running) == 2 * NUM_LINES, "no line was asked twice"

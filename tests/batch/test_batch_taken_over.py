"""An ingress continues the batch of another one that was killed, over the same database."""

import json
from collections import Counter
from functools import partial
from pathlib import Path

import openai
import pytest

from tests.batch.postgres_server import PostgresServer, database_url, postgres
from tests.batch.test_batch_killed import CONCURRENCY, answers_in, eventually, started, was_asked, write_input
from tests.ports import free_port

__all__ = ["database_url", "postgres"]

pytestmark = pytest.mark.timeout(120)
NUM_LINES, DELAY_S, LEASE_S = 400, 0.1, 5


def test_another_ingress_finishes_the_batch_of_one_that_was_killed(
    tmp_path: Path, database_url: str, postgres: PostgresServer
) -> None:
    (tmp_path / "url").write_text(database_url)
    files = f"file://{tmp_path}/files"
    settings = json.dumps({"database_file": str(tmp_path / "url"), "files": files, "lease_s": LEASE_S})
    write_input(tmp_path / "in.jsonl", NUM_LINES)
    asked, ports = tmp_path / "asked", (free_port(), free_port())
    processes = [started(tmp_path, ports[0], settings, delay_s=DELAY_S)]
    try:
        one, other = (openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) for port in ports)
        eventually(lambda: one.files.list().has_more is False, processes[0])
        file = one.files.create(file=(tmp_path / "in.jsonl").open("rb"), purpose="batch")
        batch = one.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        eventually(partial(was_asked, asked, 0), processes[0])
        processes.append(started(tmp_path, ports[1], settings, delay_s=DELAY_S))  # now the first one runs the batch
        eventually(partial(was_asked, asked, NUM_LINES // 3), processes[0])
        eventually(lambda: other.batches.retrieve(batch.id).status == "in_progress", processes[1])
        processes[0].kill()
        eventually(lambda: other.batches.retrieve(batch.id).status == "completed", processes[1])
        ended = other.batches.retrieve(batch.id)
        assert ended.output_file_id is not None
        answers = answers_in(other.files.content(ended.output_file_id).text)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert ended.request_counts is not None
    assert ended.request_counts.to_dict() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    assert answers == [(f"id-{i}", f"PROMPT {i}") for i in range(NUM_LINES)], "each line once, in the order of the input"
    # What was under way, and what had come since the last publication, which is each second.
    num_twice = Counter(asked.read_text().splitlines()).total() - NUM_LINES
    assert 0 < num_twice <= CONCURRENCY + 3 * CONCURRENCY / DELAY_S
    assert postgres.ask("SELECT (SELECT count(*) FROM answers) + (SELECT count(*) FROM leases WHERE holder <> '')") == [(0,)]

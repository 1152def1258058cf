"""A batch comes to its end although the ingress that runs it is killed, again and again."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import openai
import pytest

from tests.ports import free_port

pytestmark = pytest.mark.timeout(120)

T = TypeVar("T")
NUM_LINES, CONCURRENCY, DELAY_S = 1500, 8, 0.02


def started(folder: Path, port: int, settings: str = "", *, delay_s: float = DELAY_S) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.batch.small_ingress", str(folder), str(port), str(delay_s), settings]
    return subprocess.Popen(command)


def eventually(call: Callable[[], T], process: "subprocess.Popen[bytes]") -> T:
    """Return what the call returns once it is true; a server that is not there yet is waited for."""
    while process.poll() is None:
        try:
            if found := call():
                return found
        except openai.APIConnectionError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the ingress ended with {process.returncode}")


def write_input(path: Path, num_lines: int) -> None:
    lines = [
        {
            "custom_id": f"id-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "tiny", "messages": [{"role": "user", "content": f"prompt {i}"}]},
        }
        for i in range(num_lines)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def answers_in(output: str) -> list[tuple[str, str]]:
    found = [json.loads(line) for line in output.splitlines()]
    return [(line["custom_id"], line["response"]["body"]["choices"][0]["message"]["content"]) for line in found]


def was_asked(asked: Path, num: int) -> bool:
    return asked.exists() and asked.read_text().count("\n") > num


def test_a_batch_whose_ingress_is_killed_again_and_again_has_one_answer_for_each_line(tmp_path: Path) -> None:
    chance, port, asked = random.Random(1), free_port(), tmp_path / "asked"
    write_input(tmp_path / "in.jsonl", NUM_LINES)
    process = started(tmp_path, port)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        eventually(lambda: client.files.list().has_more is False, process)
        file = client.files.create(file=(tmp_path / "in.jsonl").open("rb"), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        for _ in range(3):
            until = chance.randint(50, 300) + (asked.read_text().count("\n") if asked.exists() else 0)
            eventually(partial(was_asked, asked, until), process)
            process.kill()
            process.wait()
            assert len(asked.read_text().splitlines()) < NUM_LINES, "it was killed in the middle"
            process = started(tmp_path, port)
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed", process)
        ended = client.batches.retrieve(batch.id)
        assert ended.output_file_id is not None
        answers = answers_in(client.files.content(ended.output_file_id).text)
    finally:
        process.kill()
        process.wait()
    assert ended.request_counts is not None
    assert ended.request_counts.to_dict() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    assert ended.error_file_id is None
    assert answers == [(f"id-{i}", f"PROMPT {i}") for i in range(NUM_LINES)], "each line once, in the order of the input"
    asked_twice = Counter(asked.read_text().splitlines())
    # What was under way, and what a commit each 5 ms had not reached.
    assert asked_twice.total() - NUM_LINES <= 3 * (CONCURRENCY + CONCURRENCY * 0.1 / DELAY_S)
    left = sorted(path.name for path in (tmp_path / "store" / "work").iterdir())
    assert left == [], "no journal, nothing half written"

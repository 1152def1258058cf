"""The memory of ``serve-app batch run`` does not grow with the number of lines."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_LINES = 100_000
MOST_GROWTH = 1.15
ANSWER = json.dumps({"choices": [{"text": "a"}], "usage": {"total_tokens": 2, "completion_tokens": 1}}).encode()
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER


class QuickService:
    """Answers each request at once, in a thread with an event loop of its own: `tests.batch.service` needs a thread a connection."""

    def __init__(self) -> None:
        self.num_asked = 0
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=512))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
                self.num_asked += 1
                writer.write(RESPONSE)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def quick() -> Iterator[QuickService]:
    running = QuickService()
    yield running
    running.close()


def test_a_hundred_thousand_tiny_lines_take_the_memory_of_ten_thousand(quick: QuickService, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f'{{"id": "{i}", "prompt": "{i}"}}\n' for i in range(NUM_LINES)))
    command = [sys.executable, "-m", "serve_app.cli.main", "batch", "run", str(source), "-o", str(output), "--no-chat"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen([*command, "--url", quick.url, "--model", "m"], stderr=said, env={**os.environ})
    rss: list[tuple[float, int]] = []
    while process.poll() is None:
        try:
            rss.append((quick.num_asked / NUM_LINES, psutil.Process(process.pid).memory_info().rss))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
    assert process.wait() == 0, (tmp_path / "said").read_text()
    assert quick.num_asked == NUM_LINES
    assert sum(1 for _ in output.open()) == NUM_LINES
    early = max(held for share, held in rss if 0.0 < share <= 0.1)
    latest = max(held for share, held in rss if share >= 0.1)
    print(f"at most {early >> 20} MiB up to 10 % of the lines, {latest >> 20} MiB up to the end")
    assert latest <= MOST_GROWTH * early

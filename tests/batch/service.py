"""`Service` is a small HTTP server in place of a service: it counts the requests, and fails as a test wants it to."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Service:
    """Answers a chat with the prompt in capitals, by the model that was asked. ``verdict`` may give another status for a prompt.
    Its errors have the type ``error_type``.

    ``statuses_of_models`` are those of the next questions for the models. ``asked`` counts the prompts, ``most_at_once`` is the largest
    number of requests that it held, and ``keys`` are those that it was shown.
    """

    def __init__(self, port: int = 0) -> None:
        self.asked: Counter[str] = Counter()
        self.verdict: Callable[[str], int] = lambda prompt: 200
        self.error_type = ""
        self.delay_s = 0.0
        self.statuses_of_models: list[int] = []
        self.models = ["tiny"]
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.most_at_once = 0
        self._num_held = 0
        self._lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status = service.statuses_of_models.pop(0) if service.statuses_of_models else 200
                self._send(status, {"data": [{"id": name} for name in service.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                service.keys.add(self.headers.get("authorization", ""))
                service.bodies.append(body)
                prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
                with service.hold(prompt):
                    time.sleep(service.delay_s)
                if (status := service.verdict(prompt)) == 200:
                    usage = {"total_tokens": 5, "prompt_tokens": 2, "completion_tokens": 3}
                    choice = {"message": {"content": prompt.upper()}, "text": prompt.upper()}
                    self._send(200, {"model": body["model"], "choices": [choice], "usage": usage})
                else:
                    self._send(status, {"error": {"message": f"no: {status}", "type": service.error_type}})

            def _send(self, status: int, value: object) -> None:
                text = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.send_header("retry-after", "0.1")
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                """A process that is killed breaks its connections off, and that is no news."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512

            def handle_error(self, *_: object) -> None:
                """See `log_message`."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @contextmanager
    def hold(self, prompt: str) -> Iterator[None]:
        with self._lock:
            self.asked[prompt] += 1
            self._num_held += 1
            self.most_at_once = max(self.most_at_once, self._num_held)
        try:
            yield
        finally:
            with self._lock:
                self._num_held -= 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def block_of_the_docs(service: Service, word: str) -> str:
    """Return the Python block of docs/batch.md that holds the word; it asks this service."""
    page = (Path(__file__).parents[2] / "docs" / "batch.md").read_text()
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if word in block]
    return str(block).replace("http://127.0.0.1:8010", service.url)

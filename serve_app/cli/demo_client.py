"""`DemoClient` is the client of ``serve-app demo``: streamed chats, a closed loop, and a look at which replica holds a stream."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from serve_app.cli.demo_answers import DemoAnswer
from serve_app.config import Settings
from serve_app.environment import as_typed
from serve_app.errors import ClusterFailed

_ANSWER_LIMIT_S = 300.0
_POLL_S = 0.25

OnText = Callable[[str], None]


class _Streams:
    """The answers that threads read at the moment, for another thread to cut."""

    def __init__(self) -> None:
        self._responses: set[requests.Response] = set()
        self._cut = Event()

    @property
    def is_cut(self) -> bool:
        return self._cut.is_set()

    @contextlib.contextmanager
    def reading(self, response: requests.Response) -> Iterator[None]:
        """Register an answer while it is read. An answer that begins after the cut is cut as well."""
        self._responses.add(response)
        try:
            if self.is_cut:
                raise requests.ConnectionError("the load was stopped")
            yield
        finally:
            self._responses.discard(response)

    def cut(self) -> None:
        """End the answers under way: their readers see closed connections."""
        self._cut.set()
        for response in tuple(self._responses):
            # `close` would not wake a thread that waits for the next bytes. ValueError, RuntimeError: the answer has just ended.
            with contextlib.suppress(ValueError, RuntimeError):
                response.raw.shutdown()


class DemoClient:
    """A client of the first model of a running application."""

    def __init__(self, settings: Settings) -> None:
        model = next(iter(settings.models.values()))
        self.num_replicas = model.replicas.min
        self.model = model.name
        self._url = settings.ingress.local_url

    def wait_for_replicas(self, limit_s: float) -> None:
        """Wait until the ingress has a link to every replica.

        Raises:
            ClusterFailed: Some links are missing after ``limit_s``.
        """
        deadline = time.monotonic() + limit_s
        while (count := len(self._held())) < self.num_replicas:
            if time.monotonic() > deadline:
                problem = f"{count} of {self.num_replicas} replicas after {limit_s:.0f} s"
                raise ClusterFailed(problem=problem, hint=f"{as_typed()} up shows more; its logs stay while it runs")
            time.sleep(_POLL_S)

    def holders(self) -> list[str]:
        """Return the replicas that hold an unfinished request."""
        return [replica_id for replica_id, held in self._held().items() if held]

    def _held(self) -> dict[str, float]:
        """Return replica id -> unfinished requests, as the ingress reports them.

        Raises:
            ClusterFailed: No ingress answers.
        """
        try:
            text = self._send("GET", "/metrics").text
        except requests.RequestException as exc:
            problem = f"the ingress does not answer: {type(exc).__name__}"
            raise ClusterFailed(problem, hint=f"{as_typed()} up shows more; its logs stay while it runs") from exc
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
        mine = (s for s in samples if s.name == "serve_app_replica_held" and s.labels["model"] == self.model)
        return {s.labels["replica"]: s.value for s in mine}

    def chat(
        self, question: str, *, max_tokens: int, on_text: OnText | None = None, streams: _Streams | None = None
    ) -> DemoAnswer:
        """Stream one greedy answer; ``on_text`` gets every piece as it comes. Problems are recorded in the answer.

        The answer is registered with ``streams`` while it is read.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer, sent_at, streams = DemoAnswer(), time.monotonic(), streams or _Streams()
        try:
            with self._send("POST", "/v1/chat/completions", json=body, stream=True) as response, streams.reading(response):
                if not response.ok:
                    answer.error = f"{response.status_code}: {response.text}"
                    return answer
                # Lines of bytes: `decode_unicode` would also split at U+2028 and U+0085, which JSON has unescaped in its strings.
                for line in response.iter_lines():
                    if not (text := answer.take(line.decode(errors="replace"))):
                        continue
                    answer.ttft_s = answer.ttft_s or time.monotonic() - sent_at
                    if on_text is not None:
                        on_text(text)
        except requests.RequestException as exc:
            answer.lost = f"{type(exc).__name__}: {exc}"
        return answer

    def _send(self, method: str, path: str, **options: Any) -> requests.Response:
        return requests.request(method, f"{self._url}{path}", timeout=_ANSWER_LIMIT_S, **options)

    def load(self, question: str, *, num_streams: int, seconds: float) -> tuple[list[DemoAnswer], float]:
        """Keep ``num_streams`` answers streaming for ``seconds``; return them and the time until the last one ended.

        An interruption, such as Ctrl-C, cuts the answers under way.
        """
        started, streams = time.monotonic(), _Streams()

        def loop(stream: int) -> list[DemoAnswer]:
            answers: list[DemoAnswer] = []
            while time.monotonic() - started < seconds and not streams.is_cut:
                answers.append(self.chat(f"{question} ({stream}.{len(answers) + 1})", max_tokens=64, streams=streams))
            return answers

        threads = ThreadPoolExecutor(num_streams)
        try:
            by_stream = list(threads.map(loop, range(num_streams)))
        finally:
            streams.cut()
            # Not waited for: an answer whose head has not come yet cannot be cut. It ends with the fleet, which stops next.
            threads.shutdown(wait=False)
        return [answer for answers in by_stream for answer in answers], time.monotonic() - started

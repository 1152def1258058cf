"""The client side of ``serve-app demo``: streamed chats, a closed loop, and which replica holds a stream."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serve_app.cli.demo_answers import Answer
from serve_app.config import Settings
from serve_app.errors import ClusterFailed

_ANSWER_LIMIT_S = 300.0
_POLL_S = 0.25

OnText = Callable[[str], Awaitable[None]]


class Client:
    """Talks to the first model of a running application."""

    def __init__(self, settings: Settings) -> None:
        model = next(iter(settings.models.values()))
        self.num_replicas = model.replicas.min
        self.model = model.name
        self._http = httpx.AsyncClient(base_url=settings.ingress.local_url, timeout=_ANSWER_LIMIT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def wait_for_replicas(self, limit_s: float) -> None:
        """Wait until the ingress has a link to every replica.

        Raises:
            ClusterFailed: Not within ``limit_s``.
        """
        deadline = time.monotonic() + limit_s
        while (count := len(await self._held())) < self.num_replicas:
            if time.monotonic() > deadline:
                problem = f"{count} of {self.num_replicas} replicas after {limit_s:.0f} s"
                raise ClusterFailed(problem=problem, hint="serve-app up shows more; its logs stay while it runs")
            await asyncio.sleep(_POLL_S)

    async def holders(self) -> list[str]:
        """Return the replicas that hold an unfinished request."""
        return [replica_id for replica_id, held in (await self._held()).items() if held]

    async def _held(self) -> dict[str, float]:
        """Return replica id -> unfinished requests, as the ingress that answers says.

        Raises:
            ClusterFailed: None answers.
        """
        try:
            text = (await self._http.get("/metrics")).text
        except httpx.HTTPError as exc:
            problem = f"the ingress does not answer: {type(exc).__name__}"
            raise ClusterFailed(problem, hint="serve-app up shows more; its logs stay while it runs") from exc
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
        mine = (s for s in samples if s.name == "serve_app_replica_held" and s.labels["model"] == self.model)
        return {s.labels["replica"]: s.value for s in mine}

    async def chat(self, question: str, *, max_tokens: int, on_text: OnText | None = None) -> Answer:
        """Stream one greedy answer; ``on_text`` gets every piece as it comes. What goes wrong is in the answer."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer, sent_at = Answer(), time.monotonic()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    answer.error = f"{response.status_code}: {(await response.aread()).decode()}"
                    return answer
                async for line in response.aiter_lines():
                    if not (text := answer.take(line)):
                        continue
                    answer.ttft_s = answer.ttft_s or time.monotonic() - sent_at
                    if on_text is not None:
                        await on_text(text)
        except httpx.HTTPError as exc:
            answer.lost = f"{type(exc).__name__}: {exc}"
        return answer

    async def load(self, question: str, *, num_streams: int, seconds: float) -> tuple[list[Answer], float]:
        """Keep ``num_streams`` answers streaming for ``seconds``; return them and the time until the last one ended."""
        answers: list[Answer] = []
        started = time.monotonic()

        async def loop(stream: int) -> None:
            turn = 0
            while time.monotonic() - started < seconds:
                turn += 1
                answers.append(await self.chat(f"{question} ({stream}.{turn})", max_tokens=64))

        async with asyncio.TaskGroup() as group:
            for stream in range(num_streams):
                group.create_task(loop(stream))
        return answers, time.monotonic() - started

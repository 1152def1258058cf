"""This module runs many requests at once, acts on the fleet while they stream, and keeps the answers in comparable form."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

ANSWER_LIMIT_S = 400.0
PROMPT = "the quick brown fox jumps over"


@dataclass(frozen=True)
class Ask:
    """One request: a path below the server's URL and a JSON body."""

    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass
class Answer:
    """``events`` are the data lines of a stream, or the one body. ``cut``: the connection ended before the answer did."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    cut: bool = False
    ended: bool = False
    times: list[float] = field(default_factory=list)
    """When the request was sent and when each line of its stream arrived, by the monotonic clock."""

    def longest_silence_s(self) -> float:
        return max((later - earlier for earlier, later in pairwise(self.times)), default=0.0)

    def errors(self) -> list[Any]:
        return [e["error"] for e in self.events if isinstance(e, dict) and "error" in e]

    def text(self) -> str:
        return "".join(_text(c) for c in _choices(self.events))

    def is_complete(self) -> bool:
        """Return whether every choice ended with a finish reason and the stream with its end mark."""
        if self.status != 200 or self.cut or self.errors() or (len(self.events) > 1 and self.events[-1] != "[DONE]"):
            return False
        return all(choice["finish_reason"] for choice in self.folded()["choices"].values())

    def folded(self) -> dict[str, Any]:
        """Return all that a client gets, ids, times and log probabilities apart.

        How tokens are spread over events depends on who was faster, engine or front end; their order within a choice does not.
        """
        choices: dict[int, dict[str, Any]] = {}
        for choice in _choices(self.events):
            whole = choices.setdefault(choice["index"], {"text": "", "tokens": [], "finish_reason": None})
            assert whole["finish_reason"] is None, "an event after the finish reason"
            whole["text"] += _text(choice)
            whole["tokens"] += [token for token, _ in _logprobs(choice)]
            whole["finish_reason"] = choice["finish_reason"]
        others = [{k: v for k, v in e.items() if k not in ("id", "created")} for e in self.events if _is_other(e)]
        usage = [e["usage"] for e in self.events if isinstance(e, dict) and e.get("usage") and e.get("choices")]
        end = [e for e in self.events if isinstance(e, str)]
        return {"status": self.status, "choices": choices, "others": others, "usage": usage[-1:], "end": end}

    def logprobs(self) -> list[float]:
        """Return the log probability of each token, by choice."""
        choices = sorted(_choices(self.events), key=lambda c: int(c["index"]))
        return [value for choice in choices for _, value in _logprobs(choice)]


def _is_other(event: Any) -> bool:
    return isinstance(event, dict) and not event.get("choices")


def _choices(events: Sequence[Any]) -> list[dict[str, Any]]:
    return [choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())]


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("delta") or choice.get("message") or {}
    return str(choice.get("text") or message.get("content") or "")


def _logprobs(choice: dict[str, Any]) -> list[tuple[str, float]]:
    given = choice.get("logprobs") or {}
    if given.get("content"):
        return [(t["token"], t["logprob"]) for t in given["content"]]
    return list(zip(given.get("tokens") or (), given.get("token_logprobs") or (), strict=True))


def completion(model: str, *, prompt: str | list[int] = PROMPT, max_tokens: int = 400, **body: Any) -> Ask:
    """Return a greedy streamed completion that runs to ``max_tokens``; ``body`` overrides and adds."""
    base = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return Ask("/v1/completions", {**base, **body})


def chat(model: str, *, prompt: str = PROMPT, max_tokens: int = 400, **body: Any) -> Ask:
    """As `completion`, as a chat."""
    base = completion(model, max_tokens=max_tokens).body
    del base["prompt"]
    return Ask("/v1/chat/completions", {**base, "messages": [{"role": "user", "content": prompt}], **body})


class Volley:
    """Requests that run at once. ``answers`` grow while it plays."""

    def __init__(self, url: str, asks: Sequence[Ask]) -> None:
        self.answers = [Answer() for _ in asks]
        self._url = url
        self._asks = list(asks)
        self._progress = asyncio.Condition()

    async def play(
        self, meanwhile: Callable[[], None] | None = None, *, after_events: int = 5, limit_s: float = ANSWER_LIMIT_S
    ) -> list[Answer]:
        """Return the answers. ``meanwhile`` runs in a thread once each stream has brought ``after_events`` events."""
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
                for ask, answer in zip(self._asks, self.answers, strict=True):
                    group.create_task(self._one(ask, answer))
                if meanwhile is not None:
                    await self._all_have(after_events)
                    await asyncio.to_thread(meanwhile)
        except TimeoutError:
            state = [(ask.body, a.status, len(a.events), a.events[-1:]) for ask, a in zip(self._asks, self.answers, strict=True)]
            raise AssertionError(f"no end within {limit_s:.0f} s: {state}") from None
        return self.answers

    async def _all_have(self, num_events: int) -> None:
        streamed = [a for ask, a in zip(self._asks, self.answers, strict=True) if ask.streams]
        async with self._progress:
            await self._progress.wait_for(lambda: all(a.ended or len(a.events) >= num_events for a in streamed))

    async def _one(self, ask: Ask, answer: Answer) -> None:
        # A client each: connections are spread over the ingresses when they are made. Without TLS, loading the
        # certificates would only hold every other stream up for 30 ms.
        async with httpx.AsyncClient(base_url=self._url, timeout=ANSWER_LIMIT_S, verify=False) as client:
            answer.times.append(time.monotonic())
            try:
                async with client.stream("POST", ask.path, json=ask.body) as response:
                    answer.status, answer.headers = response.status_code, dict(response.headers)
                    if response.headers["content-type"].startswith("text/event-stream"):
                        await self._read_events(response, answer)
                    else:
                        answer.events.append(json.loads(await response.aread()))
            except httpx.TransportError:
                answer.cut = True
        answer.ended = True
        async with self._progress:
            self._progress.notify_all()

    async def _read_events(self, response: httpx.Response, answer: Answer) -> None:
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            answer.times.append(time.monotonic())
            answer.events.append(data if data == "[DONE]" else json.loads(data))
            async with self._progress:
                self._progress.notify_all()


def play(
    url: str,
    asks: Sequence[Ask],
    meanwhile: Callable[[], None] | None = None,
    *,
    after_events: int = 5,
    limit_s: float = ANSWER_LIMIT_S,
) -> list[Answer]:
    """Play one volley to its end."""

    async def run() -> list[Answer]:
        return await Volley(url, asks).play(meanwhile, after_events=after_events, limit_s=limit_s)

    return asyncio.run(run())


class Load:
    """Streams in a closed loop, in a thread, until the block ends; those that run then are finished."""

    def __init__(self, url: str, ask: Ask, *, num_streams: int) -> None:
        self.answers: list[Answer] = []
        self._url = url
        self._ask = ask
        self._enough = threading.Event()
        self._failed: list[AssertionError] = []
        self._threads = [threading.Thread(target=self._loop) for _ in range(num_streams)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()
        if self._failed:
            raise self._failed[0]

    def _loop(self) -> None:
        while not self._enough.is_set() and not self._failed:
            try:
                self.answers += play(self._url, [self._ask])
            except AssertionError as exc:  # an answer without an end
                self._failed.append(exc)


def assert_same(answers: list[Answer], undisturbed: list[Answer]) -> None:
    assert all(a.is_complete() for a in answers)
    assert [a.folded() for a in answers] == [a.folded() for a in undisturbed]

"""`Service` asks the HTTP API on behalf of the pages: for the models, the fleet, and an answer as a stream of events."""

import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

_CONNECT_S = 5.0
_ANSWER_S = 5.0
"""Time limit of answers that are not streamed."""
_SILENCE_S = 120.0
"""A stream that sends nothing for this long is given up. The service sends `: waiting` after each silence of
`timeouts.stream_silence_s`, 5 s by default; where the tenant has a `first_token_s`, the first may take 32 s."""

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
"""The exceptions from reading JSON of an unexpected form."""


class ServiceProblem(Exception):
    """The service refused, failed or does not answer. The exception's text is a sentence for the person at the page."""

    def __init__(self, text: str, *, needs_key: bool = False) -> None:
        super().__init__(text)
        self.needs_key = needs_key
        """Whether the service asked for an API key, or for another one."""


@dataclass(frozen=True)
class Delta:
    """The next piece of one choice. The last piece has the reason of the choice's end as ``finish``.

    ``thought`` is a reasoning model's text before its answer; the next prompt's conversation does not include it.
    """

    choice: int
    text: str
    finish: str | None = None
    thought: str = ""


@dataclass(frozen=True)
class Usage:
    """The number of tokens of all choices together, as the service counted them."""

    output_tokens: int


@dataclass(frozen=True)
class Waiting:
    """The stream is open and sends nothing: its request waits for a replica, or for its next token."""


Event = Delta | Usage | Waiting


class Service:
    """The service at ``url``, used within one event loop. ``key`` of each call is the API key, empty for none."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            limits=httpx.Limits(
                max_connections=None
            ),  # each open answer holds a connection, so a limit would make further pages wait
        )

    async def models(self, key: str) -> list[str]:
        """Return the names of the served models, including adapters.

        Raises:
            ServiceProblem: The service refuses or does not answer.
        """
        listing = await self._get("/v1/models", key)
        with self._as_problems():
            return [str(card["id"]) for card in listing["data"]]

    async def fleet(self, key: str) -> dict[str, Any]:
        """Return the report of `/fleet`.

        Raises:
            ServiceProblem: The service refuses or does not answer.
        """
        return await self._get("/fleet", key)

    async def requests(self, key: str) -> dict[str, Any]:
        """Return the ways of the caller's latest requests: the answer to `/fleet/requests`, which an older service lacks.

        Raises:
            ServiceProblem: The service refuses or does not answer.
        """
        return await self._get("/fleet/requests", key)

    async def close(self) -> None:
        await self._http.aclose()

    async def _get(self, path: str, key: str) -> dict[str, Any]:
        with self._as_problems():
            answer = await self._http.get(path, headers=_headers(key))
            if answer.is_error:
                raise _refusal(answer)
            return dict(_parsed(answer.text))

    async def stream(self, path: str, body: Mapping[str, Any], key: str) -> AsyncGenerator[Event, None]:
        """Yield the events of a streamed answer. Closing this generator closes the connection, which aborts the answer on the engine.

        Raises:
            ServiceProblem: The service refuses, fails during the answer, or does not answer.
        """
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        limits = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        with self._as_problems():
            async with self._http.stream("POST", path, json=asked, headers=_headers(key), timeout=limits) as answer:
                if answer.is_error:
                    await answer.aread()
                    raise _refusal(answer)
                async for line in lines_of(answer.aiter_bytes()):
                    if line == "data: [DONE]":
                        return
                    for event in events_of(line):
                        yield event
        raise ServiceProblem("The connection ended before the answer was complete.")

    @contextlib.contextmanager
    def _as_problems(self) -> Iterator[None]:
        """Turn failures of the connection, and answers of an unexpected form, into sentences."""
        try:
            yield
        except httpx.TimeoutException as exc:
            raise ServiceProblem(f"{self.url} did not answer in time.") from exc
        except httpx.ConnectError as exc:
            raise ServiceProblem(f"Nothing answers at {self.url}. Is the service running?") from exc
        except (httpx.HTTPError, UnicodeEncodeError) as exc:
            raise ServiceProblem(f"The connection to {self.url} failed: {exc}") from exc
        except MALFORMED as exc:
            raise ServiceProblem(f"{self.url} did not answer as an OpenAI-style API does: {exc!r}") from exc


async def lines_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the lines of a server-sent stream without their ends.

    httpx's `aiter_lines` also splits at U+2028, U+2029 and U+0085, which may be unescaped in JSON strings.
    """
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def events_of(line: str) -> list[Event]:
    """Return the events in one line of a server-sent stream.

    Raises:
        ServiceProblem: The line is the service's error event.
        ValueError, LookupError, TypeError, AttributeError: The line does not have the form of an OpenAI-style API.
    """
    if line.startswith(":"):
        return [Waiting()]
    if not line.startswith("data: "):
        return []
    chunk = _parsed(line.removeprefix("data: "))
    if (error := chunk.get("error")) is not None:
        code = error.get("code")  # other services send a word, such as "rate_limit_exceeded"
        raise ServiceProblem(_in_words(code if isinstance(code, int) else 500, error, error.get("retry_after_s")))
    events: list[Event] = [_delta(choice) for choice in chunk.get("choices", ())]
    if (usage := chunk.get("usage")) is not None:
        events.append(Usage(int(usage["completion_tokens"])))
    return events


_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def _parsed(text: str) -> Any:
    """Return the value of JSON, with U+FFFD for half a surrogate pair, which has no UTF-8: Gradio could not send it to the browser."""
    if _SURROGATE.search(text):
        plain = json.dumps(json.loads(text), ensure_ascii=False)
        text = plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(text)


def _delta(choice: Mapping[str, Any]) -> Delta:
    """Return the piece in ``choice``. A completion has its text in `text`, and a chat in `delta`, with the thought in its own field."""
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or ""
    thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
    return Delta(int(choice["index"]), text, choice.get("finish_reason"), thought)


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key.strip()}"} if key.strip() else {}


def _refusal(answer: httpx.Response) -> ServiceProblem:
    try:
        error = _parsed(answer.text)["error"]
        text = _in_words(answer.status_code, error, answer.headers.get("retry-after"))
        return ServiceProblem(text, needs_key=answer.status_code == 401)
    except MALFORMED:
        return ServiceProblem(f"The service answered {answer.status_code} {answer.reason_phrase}.")


_MEANINGS = {
    404: "That is not served here.",
    422: "The request is quarantined.",
    429: "There are too many requests at once.",
    503: "The service has no room for the request now.",
}


def _in_words(status: int, error: Mapping[str, Any], retry_after_s: Any) -> str:
    """Return the meaning of the status, the service's own message, and when to try again."""
    if status == 401:  # the service's message is for programs
        return "The API key is missing or wrong: type it into the field API key. (401)"
    meaning = _MEANINGS.get(status, "The service refused the request." if status < 500 else "The service failed.")
    again = f" Try again in {retry_after_s} s." if retry_after_s else ""
    return f"{meaning} {str(error.get('message', '')).rstrip('.')}. ({status}){again}"

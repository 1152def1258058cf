"""`BatchClient` asks a service: as many requests at once as it takes, each until it has an answer or a final reason for none.

The command line, Beam and Ray Data share this client, so that all of them treat full, failing and lost services alike.
"""

import asyncio
import contextlib
import logging
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from serve_app.batch.connections import Connections, Poster
from serve_app.environment import as_typed
from serve_app.errors import BatchError, DeadlinePassed, KeyRefused, ServiceAway

logger = logging.getLogger(__name__)

KEYS = ("SERVE_APP_API_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold the API key; the first variable that is set counts."""
_KEY_HINT = f"set {KEYS[0]}"
_URL_HINT = f"check the URL, or start it: {as_typed()} up -f FILE"
_FIRST_WINDOW = 16
_MAX_WAIT_S = 30.0
_BACK_PRESSURE = (429, 503)
_REFUSED_KEY = (401, 403)
_TRIED_AGAIN = (408, 500, 502, 504)


@dataclass(frozen=True)
class Limits:
    """The limits of a client.

    ``concurrency`` is the most requests at once. ``tries`` is how often one request is sent that the service fails; a service that is full
    or away does not count as a failure. ``patience_s``: the client gives up when nothing at all was answered for so long after a refusal.
    ``timeout_s`` is the time limit of one request. ``tokens_per_minute`` bounds prompts and answers together.
    """

    concurrency: int = 256
    tries: int = 5
    patience_s: float = 600.0
    timeout_s: float = 900.0
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "tries"):
            if not (value := getattr(self, name)) >= 1:
                raise ValueError(f"Limits.{name} is {value!r}; it must be at least 1")
        if not self.timeout_s > 0:
            raise ValueError(f"Limits.timeout_s is {self.timeout_s!r}; it must be above 0")
        if not self.patience_s >= 0:
            raise ValueError(f"Limits.patience_s is {self.patience_s!r}; it must be at least 0")
        if self.tokens_per_minute is not None and not self.tokens_per_minute >= 1:
            raise ValueError(f"Limits.tokens_per_minute is {self.tokens_per_minute!r}; it must be at least 1, or None")


@dataclass(frozen=True, slots=True)
class Reply:
    """The service's reply to one request.

    ``request_id`` is the service's name of the request. ``num_sent``: how often the request was sent, >= 1.
    """

    body: dict[str, Any]
    request_id: str
    num_sent: int

    def usage(self, name: str) -> int:
        """Return a count of tokens, such as ``total_tokens``; 0 if the reply has no such count."""
        usage = self.body.get("usage")
        return int(usage.get(name) or 0) if isinstance(usage, dict) else 0


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a request has no answer.

    ``code`` and ``message`` are those of an error file. ``status``, ``body`` and ``request_id`` are of the last HTTP answer: ``status`` is
    None if there was none, ``body`` None if it was no JSON object.
    """

    code: str
    message: str
    status: int | None = None
    num_sent: int = 0
    body: dict[str, Any] | None = None
    request_id: str = ""


class BatchClient:
    """A client of one service, within one event loop. ``window`` requests run at once; more wait for a place, first come first served.

    The window begins at 16, grows while nothing is refused, and shrinks by 30 % when the service has no place.
    """

    def __init__(self, http: Poster, limits: Limits) -> None:
        self.window = float(min(_FIRST_WINDOW, limits.concurrency))
        self._http, self._limits = http, limits
        self._num_running = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._refused_since: float | None = None
        """When the service first refused a request, or was away, since its last answer."""
        self._trouble = ""
        self._shrunk_at = 0.0
        self._is_full = False
        self._tokens_at: float | None = None

    @property
    def trouble(self) -> str:
        """Why the service answers nothing now; empty while it answers."""
        return "" if self._refused_since is None else self._trouble

    async def ask(self, path: str, body: bytes) -> Reply | Failure:
        """Send the request to ``path`` until it is answered or has finally failed.

        Raises:
            ServiceAway: No request of this client was answered for ``patience_s``.
            KeyRefused: The service refuses the API key, and would refuse each other request, too.
        """
        async with self._place():
            return await self._ask(path, body)

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self._queue or self._num_running >= int(self.window):
            ticket = asyncio.get_running_loop().create_future()
            self._queue.append(ticket)
            try:
                await ticket
            except asyncio.CancelledError:
                if not ticket.cancelled():  # the request had been admitted already
                    self._leave()
                raise
        else:
            self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        if self._num_running == 0:  # the service is not at fault for silence while nothing was asked
            self._refused_since = None
        self._num_running += 1

    def _leave(self) -> None:
        self._num_running -= 1
        while self._queue and self._num_running < int(self.window):
            if not (ticket := self._queue.popleft()).done():
                self._enter()
                ticket.set_result(None)

    async def _ask(self, path: str, body: bytes) -> Reply | Failure:
        num_sent = tries = 0
        while True:
            await self._wait_for_tokens()
            num_sent += 1
            value: dict[str, Any] | None = None
            request_id = ""
            try:
                response = await self._http.post(path, content=body, headers={"content-type": "application/json"})
            except httpx.TimeoutException:
                tries, status, said, wait_s = tries + 1, None, f"no answer within {self._limits.timeout_s:g} s", 1.0
            except (httpx.TransportError, httpx.StreamError) as exc:  # the service is away, or went away while it answered
                self._refuse_to_wait_for_ever(exc)
                await asyncio.sleep(_spread(1.0))
                continue
            else:
                status, value, wait_s = response.status_code, _object(response), 2.0**tries
                request_id = _request_id(response, value or {})
                if status == 200 and value is not None:
                    return self._answered(Reply(value, request_id, num_sent))
                said = _reason(response, value)
                if status in _BACK_PRESSURE:
                    self._shrink()
                    self._refuse_to_wait_for_ever(said)
                    await asyncio.sleep(_spread(_retry_after_s(response)))
                    continue
                if status in _REFUSED_KEY:
                    raise KeyRefused(f"the service answers {status}: {said}", _KEY_HINT)
                tries += 1
                if (status not in _TRIED_AGAIN and status != 200) or _type(value) == DeadlinePassed.code:
                    tries = self._limits.tries
            if tries >= self._limits.tries:
                self._refused_since = None
                return Failure("request_failed", said, status, num_sent, value, request_id)
            await asyncio.sleep(_spread(min(wait_s, _MAX_WAIT_S)))

    def _answered(self, reply: Reply) -> Reply:
        self._refused_since = None
        self._spend(reply.usage("total_tokens"))
        if self._is_full:
            self.window = min(self.window + 1.0 / self.window, self._limits.concurrency)
        elif self._num_running >= int(self.window):
            self.window = min(self.window + 1.0, self._limits.concurrency)
        return reply

    def _shrink(self) -> None:
        """Shrink the window because the service has no place: once a second at most, because refusals of one moment are one sign."""
        self._is_full = True
        if (now := time.monotonic()) - self._shrunk_at > 1.0:
            self._shrunk_at = now
            self.window = max(1.0, self.window * 0.7)

    def _refuse_to_wait_for_ever(self, why: object) -> None:
        now, why = time.monotonic(), str(why) or type(why).__name__
        self._trouble = why
        if self._refused_since is None:  # not since the last answer: a slow answer is no silence
            self._refused_since = now
        waited_s = now - self._refused_since
        if waited_s > self._limits.patience_s:
            said = f"nothing was answered for {waited_s:.0f} s: {why}"
            raise ServiceAway(said, "check the service and start again")

    def _spend(self, num_tokens: int) -> None:
        if self._limits.tokens_per_minute is not None:
            begin = max(self._tokens_at or 0.0, time.monotonic() - 1.0)
            self._tokens_at = begin + 60.0 * num_tokens / self._limits.tokens_per_minute

    async def _wait_for_tokens(self) -> None:
        while self._tokens_at is not None and (wait_s := self._tokens_at - time.monotonic()) > 0:
            await asyncio.sleep(min(wait_s, 1.0))


def connect(url: str, key: str, limits: Limits) -> Connections:
    """Return the connections to the service at ``url``, with or without ``/v1`` at its end. ``key`` may be empty.

    Raises:
        BatchError: The URL begins with neither http:// nor https://.
        KeyRefused: The key has characters that no header may have.
    """
    if not url.startswith(("http://", "https://")):
        raise BatchError(f"the URL is {url!r}", "give one that begins with http:// or https://")
    if not all("!" <= char <= "~" for char in key):  # the message must not show the key
        raise KeyRefused("the API key has a character that no header may have", f"{_KEY_HINT} without blanks and line ends")
    return Connections(_base(url), _authorization(key), timeout_s=limits.timeout_s)


def key_of_environment() -> str:
    """Return the API key of this process's environment, empty if there is none."""
    return next((value for name in KEYS if (value := os.environ.get(name))), "")


def key_of_file(path: Path) -> str:
    """Return the first plain-text API key of a file, which may be the ingress's file of keys (`ingress.api_keys_file`).

    Raises:
        KeyRefused: The file cannot be read, or all its lines are empty, comments or digests.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise KeyRefused(f"the API key cannot be read: {path}: {exc}", "name a text file that can be read") from exc
    keys = [line for line in lines if line and not line.startswith(("#", "sha256:"))]
    if not keys:
        raise KeyRefused(f"{path} holds no key in plain text", "name a file with a key; a digest cannot be sent")
    return keys[0]


def only_model(url: str, key: str, limits: Limits) -> str:
    """Return the name of the service's only model; waits for a service that is away or full.

    Raises:
        ServiceAway: The service was away or full for ``limits.patience_s``.
        KeyRefused: The service refuses the key.
        BatchError: The answer is not that of a service, or the service has several models.
    """
    address, began_at, has_said = f"{_base(url)}/v1/models", time.monotonic(), False
    while isinstance(found := _ask_for_models(address, key), str):
        if time.monotonic() - began_at >= limits.patience_s:
            raise ServiceAway(found, _URL_HINT)
        if not has_said:
            logger.warning("%s; waiting for the service, %g s at most", found, limits.patience_s)
            has_said = True
        time.sleep(_spread(1.0))
    if len(found) != 1:
        raise BatchError(f"{url} serves {', '.join(found)}", "name one of them as the model")
    return found[0]


def _ask_for_models(address: str, key: str) -> list[str] | str:
    """Return the names of the models, or why the service does not list them now."""
    try:
        answer = httpx.get(address, headers=_authorization(key), timeout=30.0)
        if answer.status_code in (*_BACK_PRESSURE, *_TRIED_AGAIN):
            return f"{address} answers {answer.status_code}"
        answer.raise_for_status()
        cards = answer.json()["data"]
        return [str(card["id"]) for card in cards if card.get("parent") is None]  # a LoRA adapter has its model as parent
    except httpx.HTTPStatusError as exc:
        said = f"{address} answers {exc.response.status_code}"
        is_key = exc.response.status_code in _REFUSED_KEY
        raise (KeyRefused(said, _KEY_HINT) if is_key else BatchError(said, "check the URL")) from exc
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, ValueError, KeyError, TypeError) as exc:
        raise BatchError(f"{address} does not answer as a service does: {exc}", _URL_HINT) from exc
    except httpx.HTTPError as exc:
        return f"{address} does not answer: {exc or type(exc).__name__}"


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _spread(wait_s: float) -> float:
    return wait_s * random.uniform(0.75, 1.25)  # not a secret


def _retry_after_s(response: httpx.Response) -> float:
    with contextlib.suppress(ValueError):
        return min(max(float(response.headers.get("retry-after", "1")), 0.1), _MAX_WAIT_S)
    return 1.0


def _object(response: httpx.Response) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        if isinstance(value := response.json(), dict):
            return value
    return None


def _request_id(response: httpx.Response, value: dict[str, Any]) -> str:
    return str(response.headers.get("x-request-id", value.get("id", "")))


def _type(value: dict[str, Any] | None) -> str:
    """Return the type of the service's error, "" if there is none."""
    error = (value or {}).get("error")
    return str(error.get("type", "")) if isinstance(error, dict) else ""


def _reason(response: httpx.Response, value: dict[str, Any] | None) -> str:
    """Return the service's own error message. ``value`` is the response's JSON, None if there is none."""
    error = (value or {}).get("error")
    said = error.get("message") if isinstance(error, dict) else None
    return str(said or f"HTTP {response.status_code}: {response.text[:200]}")

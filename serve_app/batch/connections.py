"""`Connections` holds the HTTP connections of a batch: one for each request at a time, at a small cost of CPU for each request.

The connections are aiohttp's. Responses and errors are httpx's, as those of the transport inside an ingress (`in_process.py`) are.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx

_OF_THE_WIRE = ("content-encoding", "content-length")
"""Headers that describe the bytes on the wire. `read` returns other bytes if a gateway compresses the answer unasked."""


class Poster(Protocol):
    """An object that sends requests: `httpx.AsyncClient`, or `Connections`."""

    async def post(self, url: str, /, *, content: bytes, headers: Mapping[str, str]) -> httpx.Response: ...


class Connections:
    """Connections of one event loop, the loop of the first `post`.

    httpx's connections are not used: httpx spends 0.5 ms of CPU on a request, and looks at all of its connections each time.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], *, timeout_s: float, connect_s: float = 10.0) -> None:
        """Connect nothing yet.

        Args:
            headers: The headers of each request.
            timeout_s: The longest silence in a request's answer, from one byte to the next.
            connect_s: The longest time to open a connection.
        """
        self._base_url, self._headers = base_url, {**headers, "accept-encoding": "identity"}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, /, *, content: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """Send the request and return the whole response.

        Raises:
            httpx.TimeoutException: The answer took too long.
            httpx.TransportError: There is no connection, or the connection broke.
        """
        try:
            async with self._opened().post(self._base_url + url, data=content, headers=headers, allow_redirects=False) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_THE_WIRE}
                return httpx.Response(answer.status, headers=kept, content=await answer.read())
        except aiohttp.ConnectionTimeoutError as exc:
            raise httpx.NetworkError(str(exc)) from exc
        except TimeoutError as exc:  # of the answer: nothing else in the block has a time limit
            raise httpx.ReadTimeout(str(exc)) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise httpx.NetworkError(str(exc) or type(exc).__name__) from exc

    def _opened(self) -> aiohttp.ClientSession:
        """Return the session, made by the first call. Call it in a running event loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, ssl=httpx.create_ssl_context())
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                timeout=self._timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                # Not `trust_env`: it looks for proxies in a thread with each request, and for other credentials in ~/.netrc.
                proxy=_proxy_for(self._base_url),
            )
        return self._session

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # closed transports end in the next turn of the loop

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for the URL (``HTTP_PROXY``, ``NO_PROXY``, ...); None for none."""
    found = urlsplit(url)
    return None if proxy_bypass(found.hostname or "") else getproxies().get(found.scheme)

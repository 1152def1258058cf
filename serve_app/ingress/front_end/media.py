"""The ingress fetches media that a request names by URL only from public addresses, unless the model's configuration allows others.

vLLM checks the host's name against `media.domains` before it fetches. A name may resolve to another address at each look, so the address
is checked here where the connection is made.
"""

import ipaddress
import socket
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from vllm.connections import HTTPConnection, global_http_connection
from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from yarl import URL

from serve_app.engine_args import PRIVATE_ADDRESSES


class AddressRefused(OSError):
    """A host of media has an address inside of the cluster or machine."""


class PublicResolver(AbstractResolver):
    """Resolves names as ``resolver`` does, and refuses a name if any of its addresses is not public."""

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        for each in found:
            refuse_private(each["host"])
        return found

    async def close(self) -> None:
        await self._resolver.close()


def refuse_private(address: str) -> None:
    """Raise AddressRefused unless the address is public; an IPv4 address inside of an IPv6 address is judged itself."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    inner = parsed.ipv4_mapped or parsed.sixtofour if isinstance(parsed, ipaddress.IPv6Address) else None
    if not (inner or parsed).is_global or (inner or parsed).is_multicast:
        raise AddressRefused("the host of a media URL has no public address")  # without it: errors must not map the network


class PublicConnection(HTTPConnection):
    """vLLM's HTTP client, with connections to public addresses only."""

    def __init__(self) -> None:
        super().__init__()
        self._session: aiohttp.ClientSession | None = None

    async def get_async_client(self) -> aiohttp.ClientSession:
        if self._session is None:
            tcp = aiohttp.TCPConnector(resolver=PublicResolver(aiohttp.ThreadedResolver()), use_dns_cache=False)
            self._session = aiohttp.ClientSession(connector=tcp)
        return self._session

    async def get_async_response(self, url: str, **kwargs: Any) -> Any:
        host = URL(url).host or ""
        try:
            literal = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            literal = None  # a name, which the resolver judges
        if literal is not None:
            refuse_private(str(literal))
        return await super().get_async_response(url, **kwargs)

    def get_sync_client(self) -> Any:
        raise AddressRefused("media are fetched in the event loop only")


_PUBLIC = PublicConnection()


class CheckedMediaConnector(MediaConnector):
    """vLLM's reader of media, which connects to public addresses only, unless `PRIVATE_ADDRESSES` is among its domains."""

    def __init__(self, media_io_kwargs: Any = None, *, allowed_media_domains: list[str] | None = None, **kwargs: Any) -> None:
        connection = global_http_connection if PRIVATE_ADDRESSES in (allowed_media_domains or ()) else _PUBLIC
        super().__init__(media_io_kwargs, connection, allowed_media_domains=allowed_media_domains, **kwargs)


def check_addresses() -> None:
    """Let vLLM read media by `CheckedMediaConnector`."""
    MEDIA_CONNECTOR_REGISTRY.register("http")(CheckedMediaConnector)

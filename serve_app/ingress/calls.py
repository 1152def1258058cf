"""Utility calls to engine cores that are under way. Each ends by the Result, by the loss of its link, or by a time limit."""

import asyncio
import itertools
from typing import Any

import msgspec

from serve_app.errors import CallFailed
from serve_app.ingress.link import ReplicaLink
from serve_app.protocol.errors import ProtocolError
from serve_app.protocol.messages import Result

_CALL_TIMEOUT_S = 60.0


class PendingCalls:
    """The calls of one fleet client, over all its links."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._pending: dict[int, tuple[ReplicaLink, asyncio.Future[str | Result]]] = {}

    async def call(self, link: ReplicaLink, method: str, args: bytes) -> Any:
        """Return what ``method`` of the engine core returns; ``args`` is the MessagePack of its arguments.

        Raises:
            CallFailed: The replica refused or failed it, was lost, or did not answer in time.
        """
        call_id = next(self._ids)
        future: asyncio.Future[str | Result] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = (link, future)
        try:
            link.write(link.connection.send_call(call_id, method, args))
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                result = await future
        except ProtocolError as exc:
            raise CallFailed(method, link.replica_id, str(exc)) from exc
        except TimeoutError:
            raise CallFailed(method, link.replica_id, f"no answer in {_CALL_TIMEOUT_S:g} s") from None
        finally:
            del self._pending[call_id]
        if isinstance(result, str) or result.error:
            raise CallFailed(method, link.replica_id, result if isinstance(result, str) else result.error)
        return msgspec.msgpack.decode(result.value)

    def settle(self, link: ReplicaLink, result: Result) -> None:
        """End the call that ``result`` answers; one that is over, or another link's, is left alone."""
        asked, future = self._pending.get(result.call_id, (None, None))
        if asked is link and future is not None and not future.done():
            future.set_result(result)

    def link_lost(self, link: ReplicaLink, cause: str) -> None:
        for asked, future in self._pending.values():
            if asked is link and not future.done():
                future.set_result(f"the link was lost: {cause}")

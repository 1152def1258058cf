"""The dialer keeps a link to every replica that has a lease: it dials, logs why a dial failed, and dials again."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from serve_app.ingress.fleet.link import ReplicaLink, dial
from serve_app.links.protocol.errors import ProtocolError
from serve_app.links.tls import LinkTls
from serve_app.membership import Lease

logger = logging.getLogger(__name__)

_REDIAL_S = 0.5


class Dialer:
    """The dials of one model. ``new_link`` makes the protocol of a connection; ``is_linked`` says whether a replica has a link already."""

    def __init__(
        self,
        new_link: Callable[[str], ReplicaLink],
        is_linked: Callable[[str], bool],
        *,
        timeout_s: float,
        tls: LinkTls | None,
    ) -> None:
        self._new_link = new_link
        self._is_linked = is_linked
        self._timeout_s = timeout_s
        self._tls = tls
        self._dialing: dict[str, asyncio.Task[None]] = {}
        self._members: dict[str, Lease] = {}

    def set_members(self, leases: Iterable[Lease]) -> None:
        self._members = {lease.member_id: lease for lease in leases}
        self.dial_missing()

    def dial_missing(self) -> None:
        for replica_id in self._members:
            if replica_id not in self._dialing and not self._is_linked(replica_id):
                task = asyncio.create_task(self._dial(replica_id), name=f"dial {replica_id}")
                self._dialing[replica_id] = task
                task.add_done_callback(partial(self._dialed, replica_id))

    def stop(self) -> "asyncio.Future[list[BaseException | None]]":
        """Dial no more replicas. The returned future is done when the running dials have ended."""
        self._members = {}  # or a lost link would be dialed again
        for task in self._dialing.values():
            task.cancel()
        return asyncio.gather(*self._dialing.values(), return_exceptions=True)

    def _dialed(self, replica_id: str, task: "asyncio.Task[None]") -> None:
        del self._dialing[replica_id]
        if task.cancelled():
            return
        if (exc := task.exception()) is not None:
            logger.error("dialing replica %s failed", replica_id, exc_info=exc)
        else:
            self.dial_missing()  # the link may have been lost before this task was over

    async def _dial(self, replica_id: str) -> None:
        """Dial until a link is open or the lease is gone. Equal failures in a row are logged once."""
        said = ""
        while (lease := self._members.get(replica_id)) is not None:
            try:
                new_link = partial(self._new_link, replica_id)
                tls = None if self._tls is None else self._tls.context()
                link = await dial((lease.host, lease.port), new_link, timeout_s=self._timeout_s, tls=tls)
                if link.is_open():
                    return
                reason = f"replica {link.replica_id} answered, and the link was closed at once"
            except (OSError, ProtocolError, TimeoutError) as exc:
                reason = str(exc) or type(exc).__name__
            if reason != said:
                said = reason
                logger.warning("no link to replica %s at %s:%d: %s", replica_id, lease.host, lease.port, said)
            await asyncio.sleep(_REDIAL_S)

"""Replica links are all links of one model at one ingress; this module dials them, applies their capabilities and counts their ends."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from serve_app.config import ProtocolSettings
from serve_app.core.events import LinkEnd
from serve_app.core.lost_replicas import LostReplicas, cause_of
from serve_app.ingress.books.metrics import count_lost_link
from serve_app.ingress.fleet.dialer import Dialer
from serve_app.ingress.fleet.link import ReplicaLink
from serve_app.links.protocol.connection import IngressConnection
from serve_app.links.protocol.messages import Capabilities, Message
from serve_app.links.tls import LinkTls
from serve_app.membership import Lease

logger = logging.getLogger(__name__)


class ReplicaLinks:
    """Open links by replica. ``on_open`` and ``on_lost`` are called once for each link; ``on_lost`` is not called after `eject`."""

    def __init__(
        self,
        settings: ProtocolSettings,
        *,
        ingress_id: str,
        model: str,
        token: bytes,
        tls: LinkTls | None,
        on_open: Callable[[ReplicaLink], None],
        on_messages: Callable[[ReplicaLink, Sequence[Message]], None],
        on_lost: Callable[[ReplicaLink, LinkEnd], None],
        on_room: Callable[[ReplicaLink], None],
    ) -> None:
        self.capabilities: Capabilities | None = None
        """The capabilities of a linked replica; while none is linked, those of the last one that was."""
        self.seeds_by_position: bool | None = None
        """Whether all linked replicas do; while none is linked, whether the last ones did. None before the first."""
        self.lost = LostReplicas(model)
        self._settings = settings
        self._ingress_id = ingress_id
        self._model = model
        self._token = token
        self._on_open = on_open
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._on_room = on_room
        self._links: dict[str, ReplicaLink] = {}
        self._dialer = Dialer(self._new_link, self._links.__contains__, timeout_s=settings.handshake_timeout_s, tls=tls)
        self._fingerprint = ""
        self._vllm_version = ""
        self._vllm_config: Any = None
        self._max_model_len = 0  # the configured length

    def bind(self, *, vllm_config: Any, fingerprint: str, vllm_version: str) -> None:
        """Set the values that every handshake needs. ``vllm_config`` then follows the capabilities of the linked replicas."""
        self._vllm_config, self._fingerprint, self._vllm_version = vllm_config, fingerprint, vllm_version
        self._max_model_len = vllm_config.model_config.max_model_len

    def __iter__(self) -> Iterator[ReplicaLink]:
        return iter(list(self._links.values()))

    def __getitem__(self, replica_id: str) -> ReplicaLink:
        return self._links[replica_id]

    def get(self, replica_id: str) -> ReplicaLink | None:
        return self._links.get(replica_id)

    def set_members(self, leases: Iterable[Lease]) -> None:
        """Dial new replicas. A replica whose lease is gone keeps its link while it sends messages: an open link is better evidence."""
        self._dialer.set_members(leases)

    def ping(self) -> None:
        for link in self._links.values():
            if link.is_open():
                link.write(link.connection.ping())

    def eject(self, replica_id: str, reason: str) -> None:
        """End the link at once and send no goodbye, because the peer may not read."""
        if (link := self._links.pop(replica_id, None)) is not None:
            self._apply_capabilities()
            logger.warning("replica %s of %s ejected: %s", replica_id, self._model, reason)
            count_lost_link(self._model, LinkEnd.UNRESPONSIVE)
            self.lost.lose(replica_id, LinkEnd.UNRESPONSIVE, cause_of(LinkEnd.UNRESPONSIVE), time=time.time())
            link.abort(reason)
            self._dialer.dial_missing()

    async def stop(self) -> None:
        """Send a goodbye on every link, and dial no more replicas."""
        dials = self._dialer.stop()
        self.close()
        await dials

    def close(self) -> None:
        for link in self:
            link.close("ingress_stopped", "the ingress stopped")

    def _new_link(self, replica_id: str) -> ReplicaLink:
        connection = IngressConnection(
            ingress_id=self._ingress_id,
            model=self._model,
            fingerprint=self._fingerprint,
            vllm_version=self._vllm_version,
            token=self._token,
            nonce=os.urandom(32),
            max_frame_bytes=self._settings.max_frame_bytes,
        )
        return ReplicaLink(
            connection,
            on_open=partial(self._link_opened, replica_id),
            on_messages=self._on_messages,
            on_lost=self._link_lost,
            on_room=self._on_room,
            send_buffer_bytes=self._settings.send_buffer_bytes,
            stuck_after_s=self._settings.heartbeat_timeout_s,
        )

    def _link_opened(self, expected: str, link: ReplicaLink) -> None:
        if link.replica_id != expected:  # the lease outlived its replica, and another replica now has its port
            link.close("wrong_replica", f"replica {expected} was expected here")
            return
        if (old := self._links.pop(link.replica_id, None)) is not None:
            old.abort("replaced by a new link")
        self._links[link.replica_id] = link
        self._apply_capabilities()
        self.lost.link(link.replica_id)
        logger.info("replica %s of %s joined", link.replica_id, self._model)
        self._on_open(link)

    def _link_lost(self, link: ReplicaLink, end: LinkEnd, cause: str) -> None:
        if self._links.get(link.replica_id) is not link:
            return
        del self._links[link.replica_id]
        self._apply_capabilities()
        logger.warning("replica %s of %s lost: %s", link.replica_id, self._model, cause)
        count_lost_link(self._model, end)
        self.lost.lose(link.replica_id, end, cause_of(end, link.goodbye), time=time.time())
        self._on_lost(link, end)
        self._dialer.dial_missing()

    def _apply_capabilities(self) -> None:
        """Apply the device's limits that linked replicas report; the ingress's own platform does not know them."""
        linked = [peer.capabilities for link in self._links.values() if (peer := link.connection.peer) is not None]
        if not linked:
            return  # the last known capabilities are a better guess than none
        self.capabilities = linked[-1]
        self.seeds_by_position = all(each.seeds_by_position for each in linked)
        config = self._vllm_config
        # Start from the configured length each time, so that a short limit ends when its replica has gone.
        config.model_config.max_model_len = min(self._max_model_len, *(c.max_model_len for c in linked))
        config.cache_config.block_size = linked[-1].block_size
        config.cache_config.num_gpu_blocks = linked[-1].num_kv_blocks

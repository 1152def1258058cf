"""`KvMovingExecutor` is the part of the simulated executor that moves KV: a `SimulatedConnector` from other engines, vLLM's
`OffloadingConnector` to the host's memory and back, and a `MultiConnector` does both.

The executor reports the ends of reads when a step begins, with and without tokens, as vLLM's workers on GPUs do. So a busy engine goes on
with a request in the step after that one. While all requests wait, vLLM's loop steps the engine every millisecond.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import KVConnectorOutput
from vllm.version import __version__ as VLLM_VERSION

from serve_app.simulated.connector import NewReads, SimulatedConnector, SimulatedHandshake
from serve_app.simulated.exchange import Exchange
from serve_app.simulated.host_tier import HostTier
from serve_app.simulated.kv_transfers import Clock, KvTransfers, Report
from serve_app.simulated.profiles import Profile
from serve_app.simulated.tcp_exchange import TcpExchange
from serve_app.simulated.transfer import DEFAULT_LINK, LINKS, link_from

_HOST_LINK = LINKS["pcie-4"]
"""Assumption: what connects every simulated accelerator to the memory of its host."""


class KvMovingExecutor(Executor):
    """An executor of a simulated device, whose subclass computes."""

    profile: Profile
    _time_scale: float
    transfers: KvTransfers | None = None
    """None without `SimulatedConnector`."""
    host_tier: HostTier | None = None
    """None without `OffloadingConnector`."""
    _connectors: Sequence[Any] = ()
    """The scheduler's connectors, in vLLM's order."""

    def _settings(self) -> Mapping[str, Any]:
        """Return a dump of `SimulatedSettings`."""
        raise NotImplementedError

    def init_kv_output_aggregator(self, connector: Any) -> None:
        """Make the worker's half of each of the scheduler's connectors. vLLM calls this when it has them."""
        super().init_kv_output_aggregator(connector)
        self._connectors = connector.sub_connectors if isinstance(connector, MultiConnector) else [connector]
        clock, exchange = self._clock_and_exchange()
        block_bytes = self.cache_config.block_size * self.profile.model.kv_bytes_per_token
        for each in self._connectors:
            if isinstance(each, SimulatedConnector):
                self.transfers = KvTransfers(
                    each.engine_id,
                    exchange(),
                    link=link_from(self._settings().get("link", DEFAULT_LINK)),
                    time_scale=self._time_scale,
                    block_bytes=block_bytes,
                    lease_s=each.lease_s,
                    clock=clock,
                )
                each.bind(self.transfers)
            elif isinstance(each, OffloadingConnector):
                self.host_tier = HostTier(_HOST_LINK, time_scale=self._time_scale, block_bytes=block_bytes, clock=clock)

    def _clock_and_exchange(self) -> tuple[Clock, Callable[[], Exchange]]:
        """Return the time of the transfers, and a function that makes what reaches other engines."""
        return time.monotonic, lambda: TcpExchange(envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT)

    def get_kv_connector_handshake_metadata(self) -> list[dict[tuple[int, int], Any]]:
        """Return a hash that is the same for all engines with the same vLLM and model, whose KV has the same layout.

        Our engine core asks before there is a scheduler (`_label_of_kv`), and so before there are transfers.
        """
        transfer = self.vllm_config.kv_transfer_config
        connectors = [] if transfer is None else [transfer.kv_connector]
        if MultiConnector.__name__ in connectors:
            connectors = [each["kv_connector"] for each in transfer.kv_connector_extra_config["connectors"]]
        if SimulatedConnector.__name__ not in connectors:
            return []
        digest = hashlib.sha256(f"simulated {VLLM_VERSION} {self.profile.model}".encode())
        return [{(0, 0): SimulatedHandshake(digest.hexdigest())}]

    def _move_kv(self, batch: SchedulerOutput) -> tuple[KVConnectorOutput | None, float]:
        """Begin a step's reads and copies.

        Returns:
            What has ended, None if nothing has; and the seconds, not scaled, for which the step waits for blocks.
        """
        if not self._connectors:
            return None, 0.0
        began: Any = batch.kv_connector_metadata
        wait_s = 0.0
        for each in began.metadata if isinstance(began, MultiKVConnectorMetadata) else (began,):
            if isinstance(each, NewReads) and self.transfers is not None:
                for read in each.reads:
                    self.transfers.read(read)
            elif isinstance(each, OffloadingConnectorMetadata) and self.host_tier is not None:
                wait_s = self.host_tier.begin(each)
        return self._ended_transfers(), wait_s

    def _ended_transfers(self) -> KVConnectorOutput | None:
        ended = Report() if self.transfers is None else self.transfers.report()
        loaded, copies = (set[str](), None) if self.host_tier is None else self.host_tier.report()
        if not ended.sent and not ended.received and copies is None:
            return None
        report: Any = copies
        if copies is not None and len(self._connectors) > 1:
            parts = tuple(copies if isinstance(each, OffloadingConnector) else None for each in self._connectors)
            report = MultiKVConnectorWorkerMetadata(parts)
        return KVConnectorOutput(
            finished_sending=ended.sent,
            finished_recving=ended.received | loaded,
            failed_recving=ended.failed,
            kv_connector_worker_meta=report,
        )

    def next_read_at(self) -> float | None:
        """Return when the first of the running reads and loads ends, by the clock of the transfers; None without any.

        An engine whose requests all wait for them computes nothing before that; its next step from then on reports the end.
        """
        ends = (
            None if self.transfers is None else self.transfers.next_read_at(),
            None if self.host_tier is None else self.host_tier.next_load_at(),
        )
        return min((at for at in ends if at is not None), default=None)

    def _end_transfers(self) -> None:
        if self.transfers is not None:
            self.transfers.close()


def in_virtual_time(executor: type[KvMovingExecutor], clock: Clock, exchange: Exchange) -> type[KvMovingExecutor]:
    """Return the executor with another clock and exchange of its transfers: for several engines in one process, in virtual time."""
    return type(f"Virtual{executor.__name__}", (executor,), {"_clock_and_exchange": lambda self: (clock, lambda: exchange)})

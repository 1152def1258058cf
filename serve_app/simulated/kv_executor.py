"""`KvMovingExecutor` is the part of the simulated executor that moves KV, if the engine has a `SimulatedConnector`.

The executor reports the ends of reads when a step begins, with and without tokens, as vLLM's workers on GPUs do. So a busy engine goes on
with a request in the step after that one. While all requests wait, vLLM's loop steps the engine every millisecond.
"""

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from vllm import envs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import KVConnectorOutput
from vllm.version import __version__ as VLLM_VERSION

from serve_app.simulated.connector import NewReads, SimulatedConnector, SimulatedHandshake
from serve_app.simulated.exchange import Exchange
from serve_app.simulated.kv_transfers import Clock, KvTransfers
from serve_app.simulated.profiles import Profile
from serve_app.simulated.tcp_exchange import TcpExchange
from serve_app.simulated.transfer import DEFAULT_LINK, link_from


class KvMovingExecutor(Executor):
    """An executor of a simulated device, whose subclass computes."""

    profile: Profile
    _time_scale: float
    transfers: KvTransfers | None = None
    """None without `SimulatedConnector`."""

    def _settings(self) -> Mapping[str, Any]:
        """Return a dump of `SimulatedSettings`."""
        raise NotImplementedError

    def init_kv_output_aggregator(self, connector: Any) -> None:
        """Make the worker's half of the scheduler's connector. vLLM calls this when it has both."""
        super().init_kv_output_aggregator(connector)
        if isinstance(connector, SimulatedConnector):
            clock, exchange = self._clock_and_exchange()
            self.transfers = KvTransfers(
                connector.engine_id,
                exchange,
                link=link_from(self._settings().get("link", DEFAULT_LINK)),
                time_scale=self._time_scale,
                block_bytes=self.cache_config.block_size * self.profile.model.kv_bytes_per_token,
                lease_s=connector.lease_s,
                clock=clock,
            )
            connector.bind(self.transfers)

    def _clock_and_exchange(self) -> tuple[Clock, Exchange]:
        """Return the time of the transfers, and how they reach other engines."""
        return time.monotonic, TcpExchange(envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT)

    def get_kv_connector_handshake_metadata(self) -> list[dict[tuple[int, int], Any]]:
        """Return a hash that is the same for all engines with the same vLLM and model, whose KV has the same layout.

        Our engine core asks before there is a scheduler (`_label_of_kv`), and so before there are transfers.
        """
        transfer = self.vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != SimulatedConnector.__name__:
            return super().get_kv_connector_handshake_metadata()
        digest = hashlib.sha256(f"simulated {VLLM_VERSION} {self.profile.model}".encode())
        return [{(0, 0): SimulatedHandshake(digest.hexdigest())}]

    def _move_kv(self, batch: SchedulerOutput) -> KVConnectorOutput | None:
        """Begin a step's reads, and return what has ended; None if nothing has."""
        if self.transfers is None:
            return None
        if isinstance(batch.kv_connector_metadata, NewReads):
            for read in batch.kv_connector_metadata.reads:
                self.transfers.read(read)
        ended = self.transfers.report()
        if not ended.sent and not ended.received:
            return None
        return KVConnectorOutput(finished_sending=ended.sent, finished_recving=ended.received, failed_recving=ended.failed)

    def next_read_at(self) -> float | None:
        """Return when the first of the running reads ends, by the clock of the transfers; None without any.

        An engine whose requests all wait for reads computes nothing before that; its next step from then on reports the read.
        """
        return None if self.transfers is None else self.transfers.next_read_at()

    def _end_transfers(self) -> None:
        if self.transfers is not None:
            self.transfers.close()


def in_virtual_time(executor: type[KvMovingExecutor], clock: Clock, exchange: Exchange) -> type[KvMovingExecutor]:
    """Return the executor with another clock and exchange of its transfers: for several engines in one process, in virtual time."""
    return type(f"Virtual{executor.__name__}", (executor,), {"_clock_and_exchange": lambda self: (clock, exchange)})

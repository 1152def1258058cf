"""`HostTier` is the worker's half of vLLM's `OffloadingConnector` in a simulated engine: copies of KV to the host's memory and back.

The scheduler's half is vLLM's own, with its lookups, its eviction and its fences, so the hits are those that a real engine would have.
Nothing is copied: a copy is over when its simulated time is, and the tokens of a simulated model are a hash of the ids.
"""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)

from serve_app.simulated.kv_transfers import Clock
from serve_app.simulated.transfer import Link, LinkQueue, transfer_s


@dataclass(frozen=True, slots=True)
class _Copy:
    ends_at: float
    seconds: float
    num_bytes: int
    loads: str
    """The request that waits for it; "" for a copy to the host."""


class HostTier:
    """The copies of one engine. Copies of one direction follow each other.

    Args:
        link: Between the accelerator and the host's memory, in each direction.
        time_scale: Factor of all times of the link.
        block_bytes: Bytes of a block's KV in all layers.
        clock: The engine's time.
    """

    def __init__(self, link: Link, *, time_scale: float, block_bytes: int, clock: Clock) -> None:
        self._link, self._time_scale, self._block_bytes, self._clock = link, time_scale, block_bytes, clock
        self._to_host, self._from_host = LinkQueue(), LinkQueue()
        self._copies: dict[int, _Copy] = {}

    def begin(self, jobs: OffloadingConnectorMetadata) -> float:
        """Begin the copies of a step. Return the seconds, not scaled, for which the step waits for blocks that others are to get now."""
        for number, job in jobs.store_jobs.items():
            self._add(number, job, self._to_host, len(job.src_spec.block_ids))
        for number, job in jobs.load_jobs.items():
            self._add(number, job, self._from_host, len(job.dst_spec.block_ids), loads=job.req_id)
        ends = [self._copies[number].ends_at for number in jobs.jobs_to_flush or () if number in self._copies]
        return max(0.0, max(ends, default=0.0) - self._clock()) / self._time_scale

    def _add(self, number: int, job: TransferJob, queue: LinkQueue, num_blocks: int, loads: str = "") -> None:
        num_bytes = num_blocks * self._block_bytes
        seconds = self._time_scale * transfer_s(self._link, num_bytes)
        begins_at = queue.add(self._clock(), seconds)
        self._copies[number] = _Copy(begins_at + seconds, seconds, num_bytes, loads)

    def report(self) -> tuple[set[str], OffloadingWorkerMetadata | None]:
        """Return the requests whose KV is back on the accelerator, and all copies that ended since the last report; None for none."""
        now = self._clock()
        ended = [number for number, copy in self._copies.items() if copy.ends_at <= now]
        if not ended:
            return set(), None
        loaded, report = set[str](), OffloadingWorkerMetadata()
        for number in ended:
            copy = self._copies.pop(number)
            report.mark_completed(number)
            stats = report.transfer_stats.load if copy.loads else report.transfer_stats.store
            stats.record(copy.num_bytes, copy.seconds)
            if copy.loads:
                loaded.add(copy.loads)
        return loaded, report

    def next_load_at(self) -> float | None:
        """Return when the first load ends for which a request waits; None without any."""
        return min((copy.ends_at for copy in self._copies.values() if copy.loads), default=None)

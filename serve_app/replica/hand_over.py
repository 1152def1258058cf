"""These schedulers are vLLM's and ours, and can end a running request in such a way that another engine reads its KV (`HandOver`).

vLLM moves KV from an engine that computed a prompt to one that makes the answer. Here a request that is in its answer counts as such a
prompt: the other engine gets all tokens so far as its prompt, reads the KV of all but the last one, and computes that one itself.

When a request can be ended: vLLM counts tokens of steps that still run as computed. Without them, the KV is whole if it lacks only the last
token. Steps that still run write behind it, in a place that the other engine computes anyway. So this is right under async scheduling, too.

This needs vLLM's ``running``, ``_inflight_prefills``, `_free_request`, `_free_blocks` and `_update_from_kv_xfer_finished`, its connector's
`update_state_after_alloc`, and a request's ``num_in_flight_tokens``, ``num_stale_output_tokens`` and ``kv_transfer_params``.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from serve_app.core.hand_over import HANDED_OVER
from serve_app.engine_args import KV_LEASE, KV_LEASE_S
from serve_app.replica.kv_params import CAME_AT
from serve_app.replica.scheduler import YieldingAsyncScheduler, YieldingScheduler

logger = logging.getLogger(__name__)


class HandingOver(Scheduler):
    """A scheduler that hands requests over, and trusts only KV that it read in time. In front of one of the schedulers below."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leaving = dict[str, None]()
        """Ids of requests that are to end at the next step after which they can, in the order in which they were named."""
        transfer = self.vllm_config.kv_transfer_config
        lease_s = KV_LEASE_S if transfer is None else transfer.get_from_extra_config(KV_LEASE, KV_LEASE_S)
        self._read_limit_s = lease_s / 2
        self._freed = set[str]()
        """Ids of requests whose KV was freed before the workers reported that it was read or that its lease is over."""

    def keeps_kv(self) -> bool:
        """Return whether another engine could read this engine's KV.

        With several kinds of layers, drafts, or KV that is split by tokens or layers, the two engines' blocks do not correspond one to one.
        """
        parallel = self.vllm_config.parallel_config
        groups = self.kv_cache_config.kv_cache_groups
        return (
            self.connector is not None
            and len(groups) == 1
            and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
            and not self.prefix_replay_tokens
            and self.vllm_config.speculative_config is None
            and parallel.pipeline_parallel_size == parallel.decode_context_parallel_size == 1
        )

    def hand_over(self, request_ids: Iterable[str]) -> dict[int, list[EngineCoreOutput]]:
        """End these requests, at once or after the next step after which their KV can be read. Unknown ids are ignored.

        Requests that compute no answer yet (again) end without their KV.

        Returns:
            Client index -> the last outputs of those that ended at once. No step may come that would bring them.
        """
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                self._leaving[request_id] = None
        return self._end_leaving()

    def free_kv(self, request_ids: Iterable[str]) -> None:
        """Free the KV that is kept of these requests, which no other engine reads. Ids of which none is kept are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.FINISHED_LENGTH_CAPPED and _was_handed_over(request):
                self._freed.add(request_id)
                self._free_blocks(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._leaving:
            for client_index, ended in self._end_leaving().items():
                if (theirs := outputs.get(client_index)) is None:
                    outputs[client_index] = EngineCoreOutputs(outputs=ended)
                else:
                    theirs.outputs += ended  # behind the tokens of this step
        return outputs

    def _end_leaving(self) -> dict[int, list[EngineCoreOutput]]:
        """End those of the leaving requests that can end now."""
        outputs: dict[int, list[EngineCoreOutput]] = {}
        for request_id in list(self._leaving):
            request = self.requests.get(request_id)
            if request is None or request.is_finished():  # by itself, or aborted
                del self._leaving[request_id]
                continue
            if not self._has_whole_kv(request):
                params = None
                self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            elif self._is_at_block_edge(request):
                continue
            else:
                params = self._end_with_kv(request)
            del self._leaving[request_id]
            outputs.setdefault(request.client_index, []).append(_last_output(request, params))
        return outputs

    def _has_whole_kv(self, request: Any) -> bool:
        """Return whether the KV of all tokens but the last is computed, by steps that are over, and can be read."""
        return (
            request.status is RequestStatus.RUNNING
            and request.sampling_params is not None
            and request.prompt_token_ids is not None
            and not request.num_stale_output_tokens  # of before it was preempted: tokens would get lost
            and bool(request.num_computed_tokens - request.num_in_flight_tokens == request.num_tokens - 1)
            and self.keeps_kv()
        )

    def _is_at_block_edge(self, request: Any) -> bool:
        """Return whether the last token begins or fills a block.

        Where it begins one, the other engine has one block more than this one, and vLLM ends that engine. Where it fills one, the other
        engine would have that block in its prefix cache before it has computed the last token.
        """
        return request.num_tokens % self.block_size in (0, 1)

    def _end_with_kv(self, request: Any) -> dict[str, Any] | None:
        """End a running request as if it had reached its limit, and return how its KV is read; None if it is not kept."""
        assert self.connector is not None
        request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
        self.connector.update_state_after_alloc(request, None, 0)  # so that the workers know the request
        # Without tokens of a step that still runs: the number of blocks is computed from this.
        request.num_computed_tokens = request.num_tokens - 1
        self.running.remove(request)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        params, _ = self._free_request(request)
        return params

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        """Recompute what was read late: the other engine's lease may have ended meanwhile, and vLLM does not notice that here.

        The workers do not know what was freed early, and report it later, once. A load from this node's own memory has no lease: a request
        that was not handed over here, or whose read has ended before, is left to vLLM.
        """
        if self._freed and (sent := kv_connector_output.finished_sending):
            early = self._freed & sent
            kv_connector_output.finished_sending = sent - early
            self._freed -= early
        failed = set(kv_connector_output.failed_recving)
        for request_id in kv_connector_output.finished_recving or ():
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                continue
            came_at = (request.kv_transfer_params or {}).pop(CAME_AT, None)
            if came_at is not None and time.monotonic() - came_at > self._read_limit_s:
                logger.warning("%s: its KV was read too late and is computed again", request_id)
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request_id)
                failed.add(request_id)
        for request_id in failed & self.requests.keys():
            # A load of the same prompt from this node's memory may follow. vLLM would keep room for the read that failed beside it, and
            # never begin the load if both do not fit.
            self._inflight_prefills.discard(self.requests[request_id])
        super()._update_from_kv_xfer_finished(kv_connector_output)


class HandingOverScheduler(HandingOver):
    """vLLM's scheduler."""


class HandingOverAsyncScheduler(HandingOver, AsyncScheduler):
    """vLLM's scheduler that plans the next step while a step runs."""


class HandingOverYieldingScheduler(HandingOver, YieldingScheduler):
    """Our scheduler."""


class HandingOverYieldingAsyncScheduler(HandingOver, YieldingAsyncScheduler):
    """Our scheduler that plans the next step while a step runs."""


_HANDING_OVER: dict[type, type] = {
    Scheduler: HandingOverScheduler,
    AsyncScheduler: HandingOverAsyncScheduler,
    YieldingScheduler: HandingOverYieldingScheduler,
    YieldingAsyncScheduler: HandingOverYieldingAsyncScheduler,
}


def handing_over(scheduler: type) -> type:
    """Return the scheduler that also hands requests over; one of another kind is returned as it is."""
    return _HANDING_OVER.get(scheduler, scheduler)


def _was_handed_over(request: Any) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


def _last_output(request: Any, params: dict[str, Any] | None) -> EngineCoreOutput:
    return EngineCoreOutput(
        request.request_id,
        [],
        finish_reason=FinishReason.LENGTH,
        stop_reason=HANDED_OVER,
        events=request.take_events(),
        kv_transfer_params=params,
        trace_headers=request.trace_headers,
    )

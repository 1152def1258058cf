"""`FakeFrontEnd` is the part of vLLM's front end that a ``FleetClient`` uses: an output processor, and a reader of its outputs."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.metrics.stats import SchedulerStats

from serve_app.ingress.fleet.fleet_client import FleetClient
from tests.doubles.fake_engine import FINGERPRINT, VLLM_VERSION


@dataclass
class Stream:
    """The outputs of one request. ``error`` and ``finished`` exclude each other."""

    token_ids: list[int] = field(default_factory=list)
    error: Exception | None = None
    finished: bool = False
    parent_req: Any = None
    detokenizer: None = None
    """None, as for requests for which vLLM makes no text."""
    stop_after: int | None = None
    """The detokenizer finds a stop string with this many tokens."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def queue(self) -> "Stream":
        return self

    @property
    def is_prefilling(self) -> bool:
        return not self.token_ids

    def put(self, error: Exception) -> None:
        """Take an output, or an exception, which ends the request, as vLLM's ``RequestOutputCollector.put`` does."""
        self.error = error
        self.changed.set()


ARCHITECTURE = "LlavaForConditionalGeneration"
MAX_MODEL_LEN = 1 << 21
"""The context of the front end, while no replica is linked."""


class FakeFrontEnd:
    """A front end for tests: ``run`` it in a task, then ``add`` requests and wait for their outputs."""

    def __init__(self, client: FleetClient) -> None:
        self.client = client
        self.request_states: dict[str, Stream] = {}
        self.parents: dict[str, SimpleNamespace] = {}
        """The parents of n>1, with ``child_requests`` that have not ended."""
        self.stats: list[SchedulerStats] = []
        """The statistics from which vLLM's gauges would be set, oldest first."""
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=MAX_MODEL_LEN, runner_type="generate", get_vocab_size=lambda: 1 << 20, architecture=ARCHITECTURE
            ),
            cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=0, enable_prefix_caching=True),
        )
        client.bind(vllm_config=self.vllm_config, output_processor=self, fingerprint=FINGERPRINT, vllm_version=VLLM_VERSION)

    async def run(self) -> None:
        """Run in place of vLLM's output handler."""
        while True:
            frame = await self.client.get_output_async()
            self.stats += [frame.scheduler_stats] if frame.scheduler_stats is not None else []
            for output in frame.outputs:
                if (stream := self.request_states.get(output.request_id)) is not None:
                    stream.token_ids += output.new_token_ids
                    stopped = stream.stop_after is not None and len(stream.token_ids) >= stream.stop_after
                    stream.finished = stopped or output.finish_reason is not None
                    stream.changed.set()
                    if stream.finished:
                        del self.request_states[output.request_id]
                        if stream.parent_req is not None:
                            stream.parent_req.child_requests.discard(output.request_id)
                    if stopped and output.finish_reason is None:
                        await self.client.abort_requests_async([output.request_id])

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Forget requests, or parents of n>1, by id and return the ids of the engine's requests, as vLLM's method does."""
        whole = set(request_ids)
        ended = [i for i, s in self.request_states.items() if i in whole or (s.parent_req and s.parent_req.request_id in whole)]
        for request_id in ended:
            del self.request_states[request_id]
        return ended

    async def add(
        self,
        request_id: str,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        parent: str = "",
        stop_after: int | None = None,
        beside: Mapping[str, Any] = MappingProxyType({}),
        **params: Any,
    ) -> Stream:
        """Add a request for ``max_tokens`` tokens; ``parent`` makes it a child of n>1, ``beside`` are other fields of it."""
        stream = Stream(stop_after=stop_after)
        if parent:
            stream.parent_req = self.parents.setdefault(parent, SimpleNamespace(request_id=parent, child_requests=set()))
            stream.parent_req.child_requests.add(request_id)
        self.request_states[request_id] = stream
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params}),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            **{"mm_features": None, **beside},
        )
        await self.client.add_request_async(request)
        return stream

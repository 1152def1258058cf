"""`Traffic` runs requests on one vLLM engine core, step by step, in the test's own process."""

from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.core.fair_tags import BACKGROUND_PRIORITY

SHARE = 0.1
"""``batch_step_share`` of the engines."""


class Traffic:
    """Runs requests on one engine core, step by step. ``steps`` has the tokens of each step by request."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.scheduler = core.scheduler
        self.steps: list[dict[str, int]] = []
        self.answers: dict[str, list[int]] = {}
        schedule = core.scheduler.schedule

        def noting(*args: Any) -> Any:
            output = schedule(*args)
            self.steps.append(dict(output.num_scheduled_tokens))
            return output

        core.scheduler.schedule = noting

    def add(
        self,
        name: str,
        *,
        prompt: int,
        answer: int,
        first: int = 20,
        arrived_at: float = 0.0,
        priority: int = 0,
        adapter: int = 0,
        regex: str = "",
        emitted: Sequence[int] = (),
        kv: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a request; names that begin with `line` are a batch's.

        Args:
            emitted: Ids behind the prompt, of an answer that began elsewhere; ``answer`` does not count them.
            kv: vLLM's ``kv_transfer_params``.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.engine import EngineCoreRequest

        grammar = StructuredOutputsParams(regex=regex) if regex else None
        if grammar is not None:
            grammar._backend = "xgrammar"  # vLLM's front end sets it
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[*(first + (7 * i) % 900 for i in range(prompt)), *emitted],
            mm_features=None,
            sampling_params=SamplingParams(
                temperature=0.0,
                max_tokens=answer,
                detokenize=False,
                structured_outputs=grammar,
                extra_args=None if kv is None else {"kv_transfer_params": dict(kv)},
            ),
            pooling_params=None,
            arrival_time=arrived_at or float(len(self.answers)),
            lora_request=LoRARequest(f"adapter{adapter}", adapter, "/none") if adapter else None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=BACKGROUND_PRIORITY if name.startswith("line") else priority,
        )
        self.answers[name] = []
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            outputs, executed = self.core.step_fn()
            self.core.post_step(executed)
            for frame in (outputs or {}).values():
                for output in frame.outputs:
                    self.answers[output.request_id] += output.new_token_ids

    def finish(self) -> None:
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.step()

"""`SimulatedExecutor` is a vLLM executor whose forward pass is a timing model.

``distributed_executor_backend="serve_app.simulated.executor.SimulatedExecutor"`` chooses it; its settings are a dump of
`serve_app.config.SimulatedSettings` in ``additional_config["simulated"]``. Scheduler, KV cache manager, preemption and everything in
front of them are vLLM's own. Only this module, `sampling`, `connector` and `kv_executor` use vLLM; the clocks are in this one and the last.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from serve_app.errors import ConfigError
from serve_app.simulated.kv_executor import KvMovingExecutor
from serve_app.simulated.profiles import profile_from
from serve_app.simulated.sampling import refuse_as_workers, rules_of
from serve_app.simulated.sequences import Sequences, slots_of
from serve_app.simulated.sleeping import METHODS as SLEEP_METHODS
from serve_app.simulated.sleeping import SleepTimes
from serve_app.simulated.timing import StepClock, step_time_s, step_work
from serve_app.simulated.tokens import Ids, SequenceHash, TokenSource
from serve_app.simulated.tool_calls import ToolCaller
from serve_app.simulated.vocabulary import source_for

logger = init_logger(f"vllm.{__name__}")  # below vLLM's root, so that its level and format apply

# These have no effect: the simulated device has neither caches nor state beyond the KV cache that the scheduler counts.
_NO_OPERATION = frozenset(
    {"reset_mm_cache", "reset_encoder_cache", "synchronize_device", "update_max_model_len", "execute_dummy_batch"}
    | {"set_kv_cache_layout", "discard"}
)


@dataclass(frozen=True, slots=True)
class _Step:
    """One batch whose tokens are not yet sampled."""

    request_ids: list[str]
    slots: NDArray[np.intp]
    sampling: NDArray[np.bool_]
    """Whether each request gets a token; the others are in the middle of their prompt."""


class _StepFuture(Future[ModelRunnerOutput | None]):
    """A result that is ready at a deadline, in seconds of `time.perf_counter`. `result` waits for the deadline."""

    def __init__(self, output: ModelRunnerOutput | None, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline
        self.set_result(output)

    def result(self, timeout: float | None = None) -> ModelRunnerOutput | None:
        wait_s = self._deadline - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        return super().result(timeout)


class SimulatedExecutor(KvMovingExecutor):
    """One simulated node: the accelerators of a profile behind one engine core."""

    def _init_executor(self) -> None:
        settings = self._settings()
        self.profile = profile_from(settings["profile"])
        self._refuse_what_is_not_simulated()
        self._time_scale = float(settings.get("time_scale", 1.0))
        self._startup_delay_s = float(settings.get("startup_delay_s", 0.0))
        self._sleep_times = SleepTimes(self.profile, self._startup_delay_s)
        self._hash = SequenceHash(int(settings.get("seed", 0)))
        self._source = self._token_source(float(settings.get("eos_probability", 0.0)))
        self._caller = ToolCaller(cached_tokenizer_from_config(self.model_config)) if settings.get("calls_tools") else None
        self._sequences = Sequences(self.scheduler_config.max_num_seqs)
        self._clock = StepClock()
        self._pending: _Step | None = None
        self._adapters = set[int]()
        self._prompt_logprobs: dict[str, LogprobsTensors] = {}  # of requests whose prompt is not yet computed
        self._moved: KVConnectorOutput | None = None  # what the pending step reports

    def _token_source(self, eos_probability: float) -> TokenSource:
        tokenizer = None if self.model_config.skip_tokenizer_init else cached_tokenizer_from_config(self.model_config)
        return source_for(tokenizer, self.model_config.get_vocab_size(), eos_probability=eos_probability)

    def _settings(self) -> Mapping[str, Any]:
        additional = self.vllm_config.additional_config
        settings = additional.get("simulated") if isinstance(additional, Mapping) else None
        if not isinstance(settings, Mapping) or "profile" not in settings:
            raise ConfigError("additional_config.simulated", "is missing", "give at least {profile: NAME}")
        return settings

    def _refuse_what_is_not_simulated(self) -> None:
        path = "engine_args"
        if self.model_config.runner_type != "generate":
            raise ConfigError(f"{path}.runner", f"is {self.model_config.runner_type!r}", "only generation is simulated")
        if self.parallel_config.world_size != 1:
            hint = "leave it at 1 and set num_accelerators in the profile"
            raise ConfigError(f"{path}.tensor_parallel_size", f"world size is {self.parallel_config.world_size}", hint)
        if self.speculative_config is not None:
            raise ConfigError(f"{path}.speculative_config", "speculative decoding is not simulated", "remove it")

    # Start-up, in the order in which the engine core calls.

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Return the KV cache of the simulated model, not of the checkpoint: its bytes and tokens are the profile's."""
        model = self.profile.model
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            dtype=torch.bfloat16 if model.bytes_per_kv_element == 2 else torch.uint8,
        )
        return [{f"simulated.layers.{layer}": spec for layer in range(model.num_layers)}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBHNC"]]

    def determine_available_memory(self) -> list[int]:
        """Return the bytes that the profile leaves for the KV cache.

        Raises:
            ConfigError: One request of max_model_len tokens does not fit.
        """
        block_size = self.cache_config.block_size
        # The engine reserves one block as the null block.
        usable = (self.profile.kv_cache_tokens // block_size - 1) * block_size
        max_model_len = self.model_config.max_model_len
        automatic = self.model_config.original_max_model_len == -1
        if self.cache_config.num_gpu_blocks_override is None and max_model_len > usable and not automatic:
            problem = f"is {max_model_len}, but profile {self.profile.name} has room for {usable} tokens"
            raise ConfigError("engine_args.max_model_len", problem, f"set it to at most {max(0, usable)}")
        return [self.profile.kv_cache_bytes]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        logger.info(
            "simulating %s on %d x %s: room for %d KV cache tokens, time scale %g",
            self.profile.model.name,
            self.profile.num_accelerators,
            self.profile.accelerator.name,
            self.profile.kv_cache_tokens,
            self._time_scale,
        )

    def compile_or_warm_up_model(self) -> None:
        """Wait for the configured start-up delay, which stands for loading the weights."""
        time.sleep(self._startup_delay_s * self._time_scale)

    # Steps.

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Run one step. Its tokens are known at once; they are returned when the simulated step has ended.

        The result is None if a grammar constrains a request of the batch: then `sample_tokens` returns the tokens.
        """
        now = time.perf_counter()
        output, step_s = self._step(scheduler_output)
        deadline = self._clock.deadline(now, step_s * self._time_scale) if step_s else now
        future = _StepFuture(output, deadline)
        return future if non_block else future.result()

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """Sample the tokens of the step that `execute_model` left unsampled, within the grammar's bitmask."""
        step, self._pending = self._pending, None
        output = EMPTY_MODEL_RUNNER_OUTPUT if step is None else self._sample(step, grammar_output)
        moved, self._moved = self._moved, None
        if moved is not None:
            output = replace(output, kv_connector_output=moved)
        return _StepFuture(output, 0.0) if non_block else output

    def _step(self, batch: SchedulerOutput) -> tuple[ModelRunnerOutput | None, float]:
        """Return the output of a batch, None if it is pending, and the seconds that it takes on the accelerator, not scaled.

        The output also says which reads of KV are over by now, with and without tokens in the batch.
        """
        moved, wait_s = self._move_kv(batch)
        output, step_s = self._compute(batch)
        if output is None:
            self._moved = moved
        elif moved is not None:
            output = replace(output, kv_connector_output=moved)
        return output, step_s + wait_s

    def _compute(self, batch: SchedulerOutput) -> tuple[ModelRunnerOutput | None, float]:
        """Return the tokens of a batch, and the seconds, as `_step` does."""
        for request_id in batch.finished_req_ids:
            self._sequences.remove(request_id)
            self._prompt_logprobs.pop(request_id, None)
        if not self._sequences.slots:
            self._clock.idle()
        for request in batch.scheduled_new_reqs:
            self._add(request)
        if not batch.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT, 0.0
        # Preempted requests come back among the cached ones: their output is still known here; only their KV is gone.
        cached = batch.scheduled_cached_reqs
        request_ids = [*cached.req_ids, *(r.req_id for r in batch.scheduled_new_reqs)]
        contexts = [*cached.num_computed_tokens, *(r.num_computed_tokens for r in batch.scheduled_new_reqs)]
        new_tokens = [batch.num_scheduled_tokens[i] for i in request_ids]
        slots = slots_of(self._sequences, request_ids)
        computed = np.array(contexts, dtype=np.int64) + np.array(new_tokens, dtype=np.int64)
        step = _Step(request_ids, slots, self._sequences.completed(slots, computed))
        step_s = step_time_s(self.profile, step_work(contexts, new_tokens))
        if batch.has_structured_output_requests:
            self._pending = step
            return None, step_s
        return self._sample(step, None), step_s

    def _add(self, request: NewRequestData) -> None:
        refuse_as_workers(request.sampling_params)
        prompt: list[int] = request.prompt_token_ids or [0] * request.prompt_len  # embeddings have no ids: all alike
        # Set if a preempted request comes as a new one: prompt and output so far.
        tokens = request.prefill_token_ids or prompt
        # An adapter gives other answers than the model; its cost is not simulated.
        lead = [] if request.lora_request is None else [request.lora_request.lora_int_id]
        rules = rules_of(request.sampling_params)
        self._sequences.add(
            request.req_id,
            state=self._hash.state([*lead, *tokens]),
            length=len(tokens),
            num_prompt_tokens=len(prompt),
            rules=rules,
            script=self._caller.script(tokens, rules.eos_token_id) if self._caller is not None else (),
        )
        count = request.sampling_params.prompt_logprobs
        has_output = len(tokens) > len(prompt)  # preempted: the prompt's are sent already
        if count is not None and request.prompt_token_ids and not has_output:
            self._prompt_logprobs[request.req_id] = self._logprobs_of_prompt(prompt, self._source.size if count < 0 else count)

    def _sample(self, step: _Step, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        slots = step.slots[step.sampling]
        tokens = self._sequences.sample(slots, self._source)
        if grammar is not None:
            self._constrain(step, tokens, grammar)
        logprobs = self._logprobs(step, tokens) if self._sequences.with_logprobs else None
        self._sequences.append(slots, tokens)
        sampled = [[token] for token in tokens.tolist()]
        if len(sampled) < len(step.request_ids):
            ready = iter(sampled)
            sampled = [next(ready) if samples else [] for samples in step.sampling.tolist()]
        index = {request_id: i for i, request_id in enumerate(step.request_ids)}
        output = ModelRunnerOutput(step.request_ids, index, sampled_token_ids=sampled, logprobs=logprobs)
        for request_id in self._prompt_logprobs.keys() & index.keys():
            if sampled[index[request_id]]:
                output.prompt_logprobs_dict[request_id] = self._prompt_logprobs.pop(request_id)
        return output

    def _constrain(self, step: _Step, tokens: Ids, grammar: GrammarOutput) -> None:
        """Replace the tokens of requests with a grammar by tokens that their rows of the bitmask allow."""
        positions = {slot: i for i, slot in enumerate(step.slots[step.sampling].tolist())}
        for request_id, row in zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=False):
            slot = self._sequences.slots.get(request_id, -1)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            # A planned token of a call stays where the grammar allows it.
            if (
                slot in positions
                and allowed.size
                and not (slot in self._sequences.scripts and tokens[positions[slot]] in allowed)
            ):
                rules = self._sequences.rules(slot)
                state = self._sequences.draw_state(slot)
                tokens[positions[slot]] = self._source.draw_allowed(state, allowed, set(rules.stop_token_ids))

    def _logprobs(self, step: _Step, tokens: Ids) -> LogprobsLists | None:
        """Return the batch's log probabilities; None if no request asks for any. Column 0 is the sampled token."""
        wanted = {
            slot: self._sequences.rules(slot).num_logprobs or 0
            for slot in self._sequences.with_logprobs.intersection(step.slots.tolist())
        }
        if not wanted:
            return None
        width = max(self._source.size if count < 0 else count for count in wanted.values())
        ids, values = _unlikely(len(step.request_ids), 1 + width)
        drawn = iter(tokens.tolist())
        for row, (slot, samples) in enumerate(zip(step.slots.tolist(), step.sampling.tolist(), strict=True)):
            if not samples:
                continue
            sampled = next(drawn)
            if slot in wanted:
                self._fill(ids[row], values[row], self._sequences.draw_state(slot), sampled)
        return LogprobsLists(ids, values, np.ones(len(step.request_ids), dtype=np.int32))

    def _logprobs_of_prompt(self, prompt: Sequence[int], count: int) -> LogprobsTensors:
        """Return the log probabilities of every token of the prompt but the first: arrays of len(prompt) - 1 rows, 1 + ``count`` columns.

        Each token of the prompt counts as the likeliest at its place. Each costs 25 us of CPU with ``count`` up to 20, which delays the
        step.
        """
        ids, values = _unlikely(len(prompt) - 1, 1 + count)
        for row, (state, token) in enumerate(zip(self._hash.states_before(prompt)[1:], prompt[1:], strict=True)):
            self._fill(ids[row], values[row], state, token)
        ranks = torch.ones(len(ids), dtype=torch.int32)
        return LogprobsTensors(torch.from_numpy(ids), torch.from_numpy(values), ranks)

    def _fill(self, ids: NDArray[np.int32], values: NDArray[np.float32], state: int, token: int) -> None:
        """Write one position's log probabilities: column 0 has the sampled token, the next columns the likeliest ones."""
        width = len(ids) - 1
        likely = self._source.candidates(state, token, max(1, width))
        columns = slice(1, 1 + min(width, len(likely.token_ids)))
        ids[0], values[0] = token, likely.logprobs[0]
        ids[columns], values[columns] = likely.token_ids[:width], likely.logprobs[:width]

    # The rest of the interface.

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Answer in place of the only worker.

        Raises:
            NotImplementedError: The simulated accelerator does not support the method.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
        if name == "get_supported_tasks":
            answer: Any = ("generate",)
        elif name == "list_loras":
            answer = set(self._adapters)
        elif name == "add_lora":
            self._adapters.add(args[0].lora_int_id)
            answer = True
        elif name == "pin_lora":
            answer = args[0] in self._adapters
        elif name == "remove_lora":
            answer = args[0] in self._adapters
            self._adapters.discard(args[0])
        elif name == "get_model_inspection":
            answer = f"simulated {self.profile.name}"
        elif name in SLEEP_METHODS:
            time.sleep(self._time_scale * self._sleep_times.of(name, kwargs or {}))
            answer = None
        elif name in _NO_OPERATION:
            answer = None
        else:
            raise NotImplementedError(f"a simulated accelerator has no {name}")
        if not non_block:
            return [answer]
        future: Future[list[Any]] = Future()
        future.set_result([answer])
        return future

    def check_health(self) -> None:
        """Do nothing: the executor is always healthy, because a failure ends the process."""

    def shutdown(self) -> None:
        """Answer no other engine any more; the executor holds no other resources."""
        self._end_transfers()


def _unlikely(rows: int, columns: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return token ids of 0 and log probabilities of minus infinity, to be filled in."""
    return np.zeros((rows, columns), dtype=np.int32), np.full((rows, columns), -np.inf, dtype=np.float32)

"""A replica times a few real batches of its own engine before it listens, to learn what a step costs and what each token adds.

The autoscaler starts from these costs (`serve_app/autoscaling/capacity.py`), and tenants are charged by them. Timed are one prompt, and
decoding by one, many and some sequences, and by one with a long context (`serve_app/core/step_costs.py` has the sizes). The engine core's
main thread does it, between the engine's start and its loop.
"""

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.sampling_params import SamplingParams

from serve_app.core.step_costs import CHUNK_TOKENS, CONTEXT_TOKENS, SEQUENCES, MeasuredCosts, TimedBatch, measured_costs
from serve_app.replica.own_requests import own_request
from serve_app.replica.pipe import MEASURE_SLOT

logger = logging.getLogger(__name__)

GPU_LIMIT_S = 5.0
"""Limit of the measurement of an engine on GPUs, or on simulated ones."""
CPU_SHARE, CPU_LEAST_S = 0.08, 4.0
"""Limit of the measurement on CPUs: this share of the engine's start, but at least so many seconds. Replicas and the ingress start at once,
so a step takes up to four times as long as later. With 2 s for the embedded model on two cores, often only one batch was timed."""
DECODES = 16
"""The most steps of a decoding batch that are timed."""
MIN_DECODES = 3
"""Steps of a decoding batch that are timed even beyond `PHASE`, while the whole limit is not over."""
CHUNKS = 2
LONE_ERROR = 0.5
"""The relative error of a batch of which one step was timed, beside other work of the machine."""
LEAST_CHUNK = 32
"""A shorter prompt takes no longer than any step does."""
PHASE = 0.2
"""Share of the whole limit that one kind of batch may take. There are five kinds; most take less, and the first prompt needs the rest."""
LEAST_CONTEXT = 4 * CONTEXT_TOKENS
"""A shorter context makes no difference that can be measured."""


def limit_s(device: str, started_s: float) -> float:
    """Return the seconds that the measurement may take; ``started_s``: the time of the start so far."""
    return max(CPU_LEAST_S, CPU_SHARE * started_s) if device == "cpu" else GPU_LIMIT_S


def measure(core: Any, limit_s: float, now: Callable[[], float] = time.perf_counter) -> MeasuredCosts | None:
    """Return the costs of the engine core's steps; None if the limits of time, sequences or memory leave too few batches.

    Nothing is left in the engine core: neither requests nor cached blocks. A failure is logged and does not fail the start: the
    supervisor's probe follows, and shows whether the engine can make a token.
    """
    try:
        return measured_costs(_Measurement(core, limit_s, now).batches())
    except Exception:
        logger.exception("this engine's steps were not measured")
        return None
    finally:
        if not core.reset_prefix_cache(reset_connector=True):
            logger.warning("the prompts that this engine was measured with stay in its prefix cache until others need the room")


class _Measurement:
    def __init__(self, core: Any, limit_s: float, now: Callable[[], float]) -> None:
        self._core, self._now = core, now
        self._phase_s, self._ends_at = PHASE * limit_s, now() + limit_s
        config = core.vllm_config
        scheduler, cache = config.scheduler_config, config.cache_config
        self._vocabulary = config.model_config.get_vocab_size()
        self._max_len = config.model_config.max_model_len
        self._max_batched_tokens = scheduler.max_num_batched_tokens
        longest = max(1, min(CONTEXT_TOKENS, self._max_len - DECODES - 1))
        # The prefix cache holds whole blocks, of 128 tokens on CPUs. Without any, each of many sequences would first have to compute its
        # context, which takes longer than all timed steps.
        cached = (longest - 1) // cache.block_size * cache.block_size if cache.enable_prefix_caching else 0
        self._shared_context = cached + 1
        self._context = self._shared_context if cached else longest
        self._room = (cache.num_gpu_blocks or 0) * cache.block_size // 2
        self._max_sequences = min(scheduler.max_num_seqs, self._room // (self._context + DECODES))
        self._context_token_s: float | None = None
        """Seconds per token of the first prompt. This is more than a token costs, because the very first step is slow."""
        self._step_s: float | None = None
        """Seconds of a step in which one sequence decodes."""
        self._prompt_token_s: float | None = None
        """Seconds per token of the timed prompts."""
        self._num_prompts = 0

    def batches(self) -> list[TimedBatch]:
        """Time the batches, the indispensable ones first; fewer if the time is over."""
        sizes = list(dict.fromkeys(min(n, self._max_sequences) for n in SEQUENCES if self._max_sequences > 0))
        decodes: list[Callable[[], TimedBatch | None]] = [partial(self._decodes, n) for n in sizes]
        kinds = [*decodes[:1], self._chunks, *decodes[1:], self._long_decodes]
        return [batch for kind in kinds if self._now() < self._ends_at and (batch := kind()) is not None]

    def _long_decodes(self) -> TimedBatch | None:
        """Time steps in which one sequence decodes whose context is as long as it can be within the time.

        More sequences with one context would show more, but a GPU's own caches would read it once for all of them.
        """
        if self._prompt_token_s is None:
            return None
        left_s = min(self._phase_s, self._ends_at - self._now())
        can_afford = int(left_s / 2 / self._prompt_token_s)  # later tokens take longer than those of the timed prompt
        length = min(can_afford, self._room - DECODES, self._max_len - DECODES - 1)
        if length < LEAST_CONTEXT or (batch := self._decodes(1, length)) is None:
            return None
        return replace(batch, context_tokens=batch.output_tokens * (length + DECODES / 2 - CONTEXT_TOKENS))

    def _decodes(self, num_sequences: int, length: int | None = None) -> TimedBatch | None:
        """Time steps in which ``num_sequences`` sequences decode, with contexts of so many tokens."""
        if length is None:
            length = self._context if num_sequences == 1 else self._shared_context
        context = [1 + i % (self._vocabulary - 1) for i in range(length)]
        made = dict.fromkeys(range(num_sequences), 0)
        seconds: list[float] = []
        counts: list[int] = []
        began = before = decoded_from = self._now()
        with contextlib.closing(self._steps([context] * num_sequences, DECODES + 1)) as steps:
            for at, tokens in steps:
                if all(made.values()):  # otherwise some sequences still compute their context
                    seconds.append(at - before)
                    counts.append(sum(tokens.values()))
                else:
                    decoded_from = at
                    if self._context_token_s is None:
                        self._context_token_s = (at - began) / len(context)
                before = at
                for index, count in tokens.items():
                    made[index] += count
                is_enough = len(seconds) >= MIN_DECODES and at - decoded_from > self._phase_s
                if max(made.values()) > DECODES or is_enough or at > self._ends_at:
                    break
        if seconds and self._step_s is None:
            self._step_s = statistics.median(seconds)
        return _timed(statistics.fmean(counts), 0, seconds) if seconds else None

    def _chunks(self) -> TimedBatch | None:
        """Time uncached prompts, each in one step that makes one token.

        A prompt shorter than `CHUNK_TOKENS` may be computed while the weights are read, so its time is wrong by up to a whole step.
        """
        if self._context_token_s is None or self._step_s is None:
            return None
        can_afford = int(self._phase_s / CHUNKS / self._context_token_s)
        size = min(CHUNK_TOKENS, self._max_batched_tokens, self._max_len - 1, max(LEAST_CHUNK, can_afford))
        if size < LEAST_CHUNK:
            return None
        seconds: list[float] = []
        ends_at = self._now() + self._phase_s
        while not seconds or (len(seconds) < CHUNKS and self._now() < ends_at):
            self._num_prompts += 1
            prompt = [1 + (self._num_prompts + i * (1 + self._num_prompts)) % (self._vocabulary - 1) for i in range(size)]
            began = self._now()
            with contextlib.closing(self._steps([prompt], 1)) as steps:
                seconds += [at - began for at, _ in steps]
        batch = _timed(1, size, seconds)
        self._prompt_token_s = batch.seconds / size
        hidden = self._step_s / batch.seconds if size < CHUNK_TOKENS else 0.0
        return replace(batch, error=math.hypot(batch.error, hidden))

    def _steps(self, prompts: Sequence[list[int]], max_tokens: int) -> Generator[tuple[float, dict[int, int]]]:
        """Run the prompts; yield the end of each step that made tokens, and prompt -> number of tokens. Closing aborts the rest."""
        core = self._core
        ids = {f"measure-{index}": index for index in range(len(prompts))}
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        try:
            for request_id, index in ids.items():
                core.add_request(*core.preprocess_add_request(own_request(request_id, prompts[index], params, MEASURE_SLOT)))
            while core.scheduler.has_unfinished_requests():
                outputs = _step(core)
                at = self._now()
                tokens = {ids[o.request_id]: len(o.new_token_ids) for o in outputs if o.new_token_ids}
                if tokens:
                    yield at, tokens
        finally:
            core.abort_requests(list(ids))
            while core.scheduler.has_requests() or core.batch_queue:
                _step(core)


def _step(core: Any) -> list[Any]:
    """Make one step as vLLM's loop does; return its outputs, which go nowhere else."""
    outputs, executed = core.step_fn()
    core.post_step(executed)
    return list(outputs[MEASURE_SLOT].outputs) if outputs and MEASURE_SLOT in outputs else []


def _timed(output_tokens: float, prefilled_tokens: int, seconds: Sequence[float]) -> TimedBatch:
    """Return a batch with the median of its times, so that a step which other work of the machine delayed does not count."""
    middle = statistics.median(seconds)
    spread = (
        statistics.median(abs(s - middle) for s in seconds) / middle / len(seconds) ** 0.5 if len(seconds) > 1 else LONE_ERROR
    )
    return TimedBatch(output_tokens=output_tokens, prefilled_tokens=prefilled_tokens, seconds=middle, error=spread)

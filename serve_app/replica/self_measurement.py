"""A replica times a few real batches of its own engine before it listens, to learn what a step costs and what each token adds.

The autoscaler starts from these costs (`serve_app/autoscaling/capacity.py`). Timed are one prompt, and decoding by one, many and some
sequences (`serve_app/core/step_costs.py` has the sizes). The engine core's main thread does it, between the engine's start and its loop.
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from vllm.sampling_params import SamplingParams

from serve_app.core.step_costs import CHUNK_TOKENS, CONTEXT_TOKENS, SEQUENCES, MeasuredCosts, TimedBatch, measured_costs
from serve_app.replica.own_requests import own_request
from serve_app.replica.pipe import MEASURE_SLOT

logger = logging.getLogger(__name__)

GPU_LIMIT_S = 5.0
"""Limit of the measurement of an engine on GPUs, or on simulated ones."""
CPU_SHARE = 0.08
"""Limit of the measurement on CPUs, as a share of the engine's start; with the last step it stays below a tenth."""
DECODES = 16
"""The most steps of a decoding batch that are timed."""
MIN_DECODES = 3
CHUNKS = 2
LEAST_CHUNK = 32
"""A shorter prompt takes no longer than any step does."""
PHASE = 0.25
"""Share of the whole limit that one kind of batch may take: there are four kinds."""


def limit_s(device: str, started_s: float) -> float:
    """Return the seconds that the measurement may take; ``started_s``: the time of the start so far."""
    return CPU_SHARE * started_s if device == "cpu" else GPU_LIMIT_S


def measure(core: Any, limit_s: float, now: Callable[[], float] = time.perf_counter) -> MeasuredCosts | None:
    """Return the costs of the engine core's steps; None if the limits of time, sequences or memory leave too few batches.

    Nothing is left in the engine core: neither requests nor cached blocks. A failure is logged and does not fail the start: the
    supervisor's probe follows, and shows whether the engine can make a token.
    """
    try:
        measured = measured_costs(_Measurement(core, limit_s, now).batches())
    except Exception:
        logger.exception("this engine's steps were not measured")
        return None
    finally:
        if not core.reset_prefix_cache():
            logger.warning("the prompts that this engine was measured with stay in its prefix cache until others need the room")
    if measured is None:
        logger.info("this engine's steps were not measured: in %.2f s too few batches could be timed", limit_s)
    return measured


class _Measurement:
    def __init__(self, core: Any, limit_s: float, now: Callable[[], float]) -> None:
        self._core, self._now = core, now
        self._phase_s, self._ends_at = PHASE * limit_s, now() + limit_s
        config = core.vllm_config
        scheduler, cache = config.scheduler_config, config.cache_config
        self._vocabulary = config.model_config.get_vocab_size()
        self._max_len = config.model_config.max_model_len
        self._max_batched_tokens = scheduler.max_num_batched_tokens
        self._context = max(1, min(CONTEXT_TOKENS, self._max_len - DECODES - 1))
        # Without a prefix cache, each of many sequences would first have to compute its context, which takes longer than all timed steps.
        self._shared_context = self._context if cache.enable_prefix_caching else 1
        room = (cache.num_gpu_blocks or 0) * cache.block_size // 2
        self._max_sequences = min(scheduler.max_num_seqs, room // (self._context + DECODES))
        self._context_token_s: float | None = None
        """Seconds per token of the first prompt. This is more than a token costs, because the very first step is slow."""
        self._num_prompts = 0

    def batches(self) -> list[TimedBatch]:
        """Time the batches, the indispensable ones first; fewer if the time is over."""
        sizes = list(dict.fromkeys(min(n, self._max_sequences) for n in SEQUENCES if self._max_sequences > 0))
        decodes: list[Callable[[], TimedBatch | None]] = [partial(self._decodes, n) for n in sizes]
        kinds = [*decodes[:1], self._chunks, *decodes[1:]]
        return [batch for kind in kinds if self._now() < self._ends_at and (batch := kind()) is not None]

    def _decodes(self, num_sequences: int) -> TimedBatch | None:
        """Time steps in which ``num_sequences`` sequences decode."""
        length = self._context if num_sequences == 1 else self._shared_context
        context = [1 + i % (self._vocabulary - 1) for i in range(length)]
        made = dict.fromkeys(range(num_sequences), 0)
        seconds: list[float] = []
        counts: list[int] = []
        began = before = self._now()
        with contextlib.closing(self._steps([context] * num_sequences, DECODES + 1)) as steps:
            for at, tokens in steps:
                if all(made.values()):  # otherwise some sequences still compute their context
                    seconds.append(at - before)
                    counts.append(sum(tokens.values()))
                elif self._context_token_s is None:
                    self._context_token_s = (at - began) / len(context)
                before = at
                for index, count in tokens.items():
                    made[index] += count
                if max(made.values()) > DECODES or self._is_over(began):
                    break
        return _timed(statistics.fmean(counts), 0, seconds) if len(seconds) >= MIN_DECODES else None

    def _chunks(self) -> TimedBatch | None:
        """Time uncached prompts, each in one step that makes one token."""
        can_afford = self._phase_s / CHUNKS / self._context_token_s if self._context_token_s else 0.0
        size = int(min(CHUNK_TOKENS, self._max_batched_tokens, self._max_len - 1, can_afford))
        if size < LEAST_CHUNK:
            return None
        seconds = []
        for _ in range(CHUNKS):
            self._num_prompts += 1
            prompt = [1 + (self._num_prompts + i * (1 + self._num_prompts)) % (self._vocabulary - 1) for i in range(size)]
            began = self._now()
            with contextlib.closing(self._steps([prompt], 1)) as steps:
                seconds += [at - began for at, _ in steps]
        return _timed(1, size, seconds)

    def _is_over(self, began: float) -> bool:
        now = self._now()
        return now - began > self._phase_s or now > self._ends_at

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
    spread = statistics.median(abs(s - middle) for s in seconds) / middle / len(seconds) ** 0.5
    return TimedBatch(output_tokens=output_tokens, prefilled_tokens=prefilled_tokens, seconds=middle, error=spread)

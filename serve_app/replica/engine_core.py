"""vLLM's engine core process gets its requests over our pipe. ``engine.run`` imports this late: vLLM's import takes seconds.

vLLM's ``EngineCoreProc`` does its input and output in two threads over ZMQ. Both are methods; here they pass frames over one socket to
the supervisor instead (``engine_io.py``). So the supervisor needs no vLLM (0.5 GB and 8 s of CPU less per replica), a step's outputs are
encoded once and passed on as they are, and either process ends at once with the other (end of file).
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
from vllm.usage.usage_lib import UsageContext
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import EngineZmqAddresses
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from serve_app.core.request_limits import problem_of
from serve_app.engine_args import BATCH_STEP_SHARE, moves_kv, offloaded_bytes
from serve_app.links.fingerprint import model_fingerprint, public_version
from serve_app.links.protocol.messages import Capabilities
from serve_app.replica import pipe
from serve_app.replica.adapters import adapters_in, check_sums, load_all, max_rank
from serve_app.replica.cold_start import EnginePhases
from serve_app.replica.engine_io import AttemptRefused, InputThread, OutputThread
from serve_app.replica.grammar import accept_emitted
from serve_app.replica.hand_over import HandingOver, handing_over
from serve_app.replica.kv_events import KvReporter, events_config, is_reportable
from serve_app.replica.kv_params import params_of
from serve_app.replica.own_requests import own_request
from serve_app.replica.scheduler import YieldingScheduler, bounded
from serve_app.replica.self_measurement import measure
from serve_app.replica.weights import weights_id

logger = logging.getLogger(__name__)

_PROBE_ID, _GOLDEN_ID = "probe", "golden"


class ImpatientExecutor(MultiprocExecutor):
    """vLLM's executor of several workers, except that it kills workers at once. vLLM waits up to 9 s for them to end by SIGTERM.

    When one worker has died, the others wait for it inside a collective operation, in which they take no SIGTERM. The requests of this
    engine continue elsewhere only after its end.
    """

    @staticmethod
    def _ensure_worker_termination(worker_procs: list[BaseProcess]) -> None:
        for process in worker_procs:
            process.kill()


class PipedEngineCore(EngineCoreProc):
    """vLLM's engine core process with its input and output threads replaced."""

    def __init__(
        self,
        vllm_config: Any,
        executor_class: Any,
        sock: socket.socket,
        end: pipe.EngineEnd,
        max_frame_bytes: int,
        *,
        fingerprint: str,
        download_s: float,
        load_began: float,
    ) -> None:
        self._sock = sock
        self._end = end
        self._max_frame_bytes = max_frame_bytes
        self._fingerprint = fingerprint
        self._download_s = download_s
        self._load_began = load_began
        self._adapters = {adapter["number"] for adapter in adapters_in(vllm_config.additional_config)}
        self._kv_transfer = ""
        self.num_steps = 0
        self.busy_s = 0.0
        super().__init__(vllm_config, True, "", executor_class, log_stats=True)
        model = vllm_config.model_config
        if is_reportable(self.scheduler, self._host_kv_tokens()):
            paths = {adapter["name"]: str(adapter["path"]) for adapter in adapters_in(vllm_config.additional_config)}
            self.scheduler.kv_event_publisher = KvReporter(lambda it: self.output_queue.put_nowait((pipe.CACHE_SLOT, it)), paths)
        self._makes_text = "generate" in self.get_supported_tasks() and not model.is_encoder_decoder

    @contextlib.contextmanager
    def _perform_handshakes(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield EngineZmqAddresses(inputs=[], outputs=[])
        args[3].__post_init__()  # vLLM re-derives the configuration here too, after the engine has sized its cache

    def _initialize_kv_caches(self, vllm_config: Any) -> Any:
        self._loaded = time.monotonic()
        made = super()._initialize_kv_caches(vllm_config)
        load_all(self, adapters_in(vllm_config.additional_config))
        if moves_kv(vllm_config.kv_transfer_config):
            self._kv_transfer = self._label_of_kv(vllm_config)
        return made

    def _label_of_kv(self, vllm_config: Any) -> str:
        """Return the same label for engines that can read each other's KV: vLLM's own hash, and what vLLM compares later than that."""
        found = [
            metadata
            for worker in self.model_executor.get_kv_connector_handshake_metadata()
            if worker
            for metadata in worker.values()
        ]
        if not found:
            return ""
        size, block_size = vllm_config.parallel_config.tensor_parallel_size, vllm_config.cache_config.block_size
        return f"nixl {found[0].compatibility_hash} block {block_size} tp {size}"

    def _process_engine_step(self) -> bool:
        began = time.monotonic()
        computing = bool(self.batch_queue)  # under async scheduling vLLM may have nothing new to run and wait for the step before
        probing = self._runs_only_the_probe()
        stepped = super()._process_engine_step()
        if probing:  # no request's work: the autoscaler must not take an idle engine for a busy one
            return bool(stepped)
        if stepped:
            self.num_steps += 1
        if stepped or computing:  # otherwise vLLM only checked whether a grammar or a transfer is ready
            self.busy_s += time.monotonic() - began
        return bool(stepped)

    @contextlib.contextmanager
    def log_error_detail(self, scheduler_output: Any) -> Iterator[None]:
        """Log which requests were in a step that fails. vLLM would log their parameters, too: stop strings, bad words, schemas."""
        try:
            yield
        except Exception:
            logger.error("an engine step failed; its tokens of each request: %s", dict(scheduler_output.num_scheduled_tokens))
            raise

    def _runs_only_the_probe(self) -> bool:
        return self.scheduler.requests.keys() == {_PROBE_ID}

    def measure_itself(self, limit_s: float) -> None:
        """Time a few batches and report the costs, between the engine's start and its loop. Takes about ``limit_s`` at most."""
        if self._makes_text:
            costs = measure(self, limit_s)
            if isinstance(self.scheduler, YieldingScheduler):
                self.scheduler.start_from(costs)
            self._end.send(pipe.StepsMeasured(costs))

    def preprocess_attempt(self, request: EngineCoreRequest, num_emitted: int, kv: bytes = b"") -> Any:
        """Return the result of vLLM's own preprocessing; the last ``num_emitted`` ids of the prompt are the answer so far.

        Args:
            kv: `Add.kv`. If it is of no use here, the engine computes the prompt.

        Raises:
            AttemptRefused: A value of the request, or its length, would end this engine: an ingress of another release may send it. Or this
                engine has not loaded the request's LoRA adapter, which vLLM would do in the middle of a step.
        """
        if (
            problem := problem_of(request, self.vllm_config.model_config.get_vocab_size()) or self._cannot_run(request)
        ) is not None:
            raise AttemptRefused(*problem)
        if (lora := request.lora_request) is not None and lora.lora_int_id not in self._adapters:
            raise AttemptRefused("model", f"this replica has no adapter {lora.lora_name!r}")
        if kv:  # after the check, which refuses such parameters from clients
            self._read_kv(request, kv)
        made, wave = self.preprocess_add_request(request)
        if num_emitted:
            accept_emitted(self.structured_output_manager, made, num_emitted)
        return made, wave

    def _read_kv(self, request: EngineCoreRequest, kv: bytes) -> None:
        """Let the engine read the request's KV from the one that handed it over, unless these are not the parameters of its prompt."""
        params, token_ids = request.sampling_params, request.prompt_token_ids
        if not self._keeps_kv() or params is None or not token_ids:
            logger.warning("attempt %r comes with KV, which this engine cannot read", request.request_id)
            return
        try:
            where = params_of(kv, len(token_ids), self.vllm_config.cache_config.block_size, time.monotonic())
        except ValueError as exc:
            logger.warning("attempt %r comes with KV that is of no use: %s", request.request_id, exc)
            return
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": where}

    def _keeps_kv(self) -> bool:
        return isinstance(self.scheduler, HandingOver) and self.scheduler.keeps_kv()

    def _kv_token_bytes(self) -> int:
        """Return the bytes of a token's KV in all layers and workers."""
        (group,) = self.scheduler.kv_cache_config.kv_cache_groups  # there is one, or no KV is kept
        spec = group.kv_cache_spec
        in_worker = len(group.layer_names) * spec.page_size_bytes // spec.block_size
        return int(in_worker * self.vllm_config.parallel_config.world_size)

    def _host_kv_tokens(self) -> int:
        """Return the tokens whose KV the host keeps; 0 for none, and for several kinds of layers, whose tokens differ in size."""
        num_bytes = offloaded_bytes(self.vllm_config.kv_transfer_config)
        is_known = num_bytes and len(self.scheduler.kv_cache_config.kv_cache_groups) == 1
        return num_bytes // self._kv_token_bytes() if is_known else 0

    def hand_over(self, attempt_ids: Sequence[str]) -> None:
        """End these attempts, now or after a later step, so that another replica can read their KV."""
        if not isinstance(self.scheduler, HandingOver):
            logger.warning("%d attempts are to be handed over, which this engine cannot", len(attempt_ids))
            return
        for slot, outputs in self.scheduler.hand_over(attempt_ids).items():
            self.output_queue.put_nowait((slot, EngineCoreOutputs(outputs=outputs)))

    def free_kv(self, attempt_ids: Sequence[str]) -> None:
        """Free the KV that this engine keeps of these attempts, which no other engine reads."""
        if isinstance(self.scheduler, HandingOver):
            self.scheduler.free_kv(attempt_ids)

    def fall_asleep(self, level: int) -> Any:
        """Free the GPU's memory, with the KV cache. Requests that run end first: vLLM's default would abort them.

        Returns:
            None, or a future that is done when the engine sleeps.
        """
        return self.sleep(level, mode="wait")

    def wake_whole(self, level: int) -> None:
        """Take the GPU's memory again. Level 2 has dropped the weights, which are read from the checkpoint before there is a KV cache."""
        if level == 2:
            self.wake_up(["weights"])
            self.collective_rpc("reload_weights")
            self.wake_up(["kv_cache"])
        else:
            self.wake_up()

    def _cannot_run(self, request: EngineCoreRequest) -> tuple[str, str] | None:
        """Return the problem of a request for another engine: a task that this model lacks, or a prompt that is too long.

        vLLM's scheduler raises for the one. Its workers do not check the other: they would write into the next request's tokens.
        """
        if (pooling := request.pooling_params) is not None and pooling.task not in self.get_supported_tasks():
            return "task", f"{pooling.task!r} is none of this replica's model"
        num = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
        limit = self.vllm_config.model_config.max_model_len - (request.sampling_params is not None)  # and one token of the answer
        return (
            None
            if num <= limit
            else ("prompt", f"has {num} tokens with the answer so far, and this replica has room for {limit}")
        )

    def probe(self) -> bool:
        """Begin to make one token for the supervisor; return False if no token will come.

        No token comes while the engine sleeps, and from a model that makes no text from a prompt of one token.
        """
        if self.is_sleeping() or not self._makes_text:
            return False
        params = SamplingParams(temperature=0.0, max_tokens=1)
        self.add_request(*self.preprocess_add_request(own_request(_PROBE_ID, [0], params, pipe.PROBE_SLOT)))
        return True

    def golden_attempt(self, ask: pipe.AskGolden) -> Any:
        """Return the result of vLLM's own preprocessing of a golden prompt.

        Raises:
            ValueError: The prompt does not fit, or the model makes no text.
        """
        if not self._makes_text:
            raise ValueError("the model makes no text")
        token_ids = self._tokenizer().encode(ask.prompt)
        if len(token_ids) + ask.max_tokens > self.vllm_config.model_config.max_model_len:
            limit = self.vllm_config.model_config.max_model_len
            raise ValueError(f"{len(token_ids)} tokens and max_tokens {ask.max_tokens} are more than max_model_len {limit}")
        params = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens)
        return self.preprocess_add_request(own_request(_GOLDEN_ID, token_ids, params, pipe.GOLDEN_SLOT))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of a golden prompt's answer."""
        return str(self._tokenizer().decode(token_ids, skip_special_tokens=True))

    def _tokenizer(self) -> Any:
        return cached_tokenizer_from_config(self.vllm_config.model_config)

    def process_input_sockets(
        self, input_addresses: Any, coord_input_address: Any, identity: bytes, ready_event: threading.Event
    ) -> None:
        """Run vLLM's input thread."""

        def read() -> None:
            engine_input = InputThread(self, self._end.send, self._end.pinged)
            self._end.send(self._ready())
            ready_event.set()
            engine_input.run(self._sock)

        self._end.run_thread(read)

    def process_output_sockets(self, output_paths: Any, coord_output_path: Any, engine_index: int) -> None:
        """Run vLLM's output thread."""
        self._end.run_thread(OutputThread(self, self._end.send, self._max_frame_bytes).run)

    def _ready(self) -> pipe.EngineReady:
        response = self._make_ready_response()
        kv_transfer = self._kv_transfer if self._keeps_kv() else ""
        if moves_kv(self.vllm_config.kv_transfer_config) and not kv_transfer:
            logger.warning(
                "kv.transfer has no effect for this model: its layers or its parallelism are of a kind whose KV does not move"
            )
        capabilities = Capabilities(
            max_model_len=response.max_model_len,
            block_size=response.block_size or 0,
            num_kv_blocks=response.num_gpu_blocks,
            tasks=tuple(self.get_supported_tasks()),
            weights=weights_id(self.vllm_config),
            seeds_by_position=self.vllm_config.use_v2_model_runner or _is_simulated(self.vllm_config.additional_config),
            kv_transfer=kv_transfer,
            kv_token_bytes=self._kv_token_bytes() if kv_transfer else 0,
            host_kv_tokens=self._host_kv_tokens(),
        )
        max_num_seqs = self.vllm_config.scheduler_config.max_num_seqs
        warm_up_s = time.monotonic() - self._loaded
        phases = EnginePhases(self._download_s, load_s=self._loaded - self._load_began, warm_up_s=warm_up_s)
        return pipe.EngineReady(public_version(response.vllm_version), self._fingerprint, capabilities, max_num_seqs, phases)


def engine_config(engine_args: Mapping[str, Any], *, headless: bool = False) -> Any:
    """Return vLLM's whole configuration of an engine core. This reads the checkpoint's configuration and loads nothing.

    Args:
        headless: The configuration is for workers whose engine core is on another node.
    """
    if (transfer := engine_args.get("kv_transfer_config")) is not None:
        engine_args = {**engine_args, "kv_transfer_config": KVTransferConfig(**transfer)}
    return AsyncEngineArgs(**engine_args).create_engine_config(UsageContext.OPENAI_API_SERVER, headless)


def _is_simulated(additional_config: Any) -> bool:
    return "simulated" in (additional_config or ())


def with_adapters(engine_args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the files of LoRA adapters and limit the reserved memory to their rank; a simulated engine has no files."""
    more = engine_args.get("additional_config")
    if not (adapters := adapters_in(more)) or _is_simulated(more):
        return engine_args
    check_sums(adapters)
    return {"max_lora_rank": max_rank(adapters), **engine_args}


def build_engine(
    engine_args: Mapping[str, Any], sock: socket.socket, end: pipe.EngineEnd, max_frame_bytes: int, *, download_s: float
) -> PipedEngineCore:
    """Load the model. When this returns, the engine has reported that it is ready; it steps in ``run_busy_loop``.

    Args:
        engine_args: Arguments of vLLM's ``AsyncEngineArgs``.
        download_s: Seconds that this process waited for the arguments while the model's files were downloaded.
    """
    began = time.monotonic()
    vllm_config = engine_config(with_adapters(engine_args))
    scheduling = vllm_config.scheduler_config
    if BATCH_STEP_SHARE in (vllm_config.additional_config or ()):
        scheduling.scheduler_cls = bounded(scheduling.get_scheduler_cls())
    if moves_kv(vllm_config.kv_transfer_config):
        scheduling.scheduler_cls = handing_over(scheduling.get_scheduler_cls())
    if offloaded_bytes(vllm_config.kv_transfer_config):
        vllm_config.kv_events_config = events_config()
    maybe_register_config_serialize_by_value()
    executor = Executor.get_class(vllm_config)
    if executor is MultiprocExecutor:
        executor = ImpatientExecutor
    fingerprint = model_fingerprint(vllm_config.model_config)
    return PipedEngineCore(
        vllm_config, executor, sock, end, max_frame_bytes, fingerprint=fingerprint, download_s=download_s, load_began=began
    )

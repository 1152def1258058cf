"""The fleet client is vLLM's ``EngineCoreClient`` over many engine cores: it adapts ``FleetState`` to vLLM's front end.

It decides nothing: calls of vLLM and messages of links become events, and instructions become writes. Each model has one in each ingress.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from serve_app.config import ModelSettings, Settings
from serve_app.core.events import (
    AttemptUnsendable,
    Event,
    LinkEnd,
    LinkLost,
    OutputsArrived,
    RequestArrived,
    RequestsAborted,
    Ticked,
)
from serve_app.core.fair_tags import BACKGROUND_PRIORITY
from serve_app.core.fleet import FleetState
from serve_app.core.instructions import (
    AbortAttempts,
    CloseLink,
    DeliverOutputs,
    FailRequest,
    FreeKeptKv,
    HandOverAttempt,
    Instruction,
    PassTrial,
    StartAttempt,
    WakeReplica,
)
from serve_app.errors import SendFailed, ServingError
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.held_answer import current_exchange, refuse
from serve_app.ingress.fleet.attempts import (
    attempt_request,
    check_media,
    drop_what_belongs_to_swallowed,
    kv_of,
    refused_by_engines,
    take_in,
    why_unsendable,
)
from serve_app.ingress.fleet.from_settings import limits_of, routing_of
from serve_app.ingress.fleet.intake import Intake
from serve_app.ingress.fleet.link import ReplicaLink
from serve_app.ingress.fleet.load_gauges import LoadGauges
from serve_app.ingress.fleet.output_path import OutputPath
from serve_app.ingress.fleet.replica_links import ReplicaLinks
from serve_app.ingress.fleet.start_times import StartTimes
from serve_app.ingress.fleet.ticks import next_tick
from serve_app.ingress.http.error_answers import FleetError
from serve_app.links.protocol.messages import Message, Outputs
from serve_app.links.tls import LinkTls
from serve_app.membership import Lease

logger = logging.getLogger(__name__)


class FleetClient(EngineCoreClient):
    """The client that ``AsyncLLM`` uses in place of one for a local engine core."""

    engine_ranks_managed = (0,)

    def __init__(self, settings: Settings, model: ModelSettings, *, ingress_id: str, token: bytes, tls: LinkTls | None) -> None:
        self.model = model
        self.resources = SimpleNamespace(engine_dead=False)  # a fleet is never dead: replicas come back
        self.fleet = FleetState(limits_of(settings, model), routing_of(settings, model))
        self._settings = settings
        self._vllm_config: Any = None
        self._output_processor: Any = None
        # Unbounded, as vLLM's own queue: no frame may be dropped, and a link that is not read looks silent and is ejected.
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._reader: asyncio.Task[Any] | None = None  # vLLM's output handler
        self._requests: dict[str, EngineCoreRequest] = {}
        self._adapters: dict[str, frozenset[int]] = {}  # of each replica, by its lease
        self._failed_siblings: set[str] = set()  # unfinished requests of an n>1 of which another choice has failed
        self._exchanges: dict[str, Exchange] = {}
        self.links = ReplicaLinks(
            settings.protocol,
            ingress_id=ingress_id,
            model=model.name,
            token=token,
            tls=tls,
            on_open=self._link_opened,
            on_messages=self._messages,
            on_lost=self._link_lost,
            on_room=self._send_unsent,
        )
        self.output_path: OutputPath = OutputPath(self._outputs.put_nowait, None)
        self._gauges = LoadGauges(self.fleet)
        self.intake = Intake(model)
        self._start_times = StartTimes(model, no_replica_s=settings.timeouts.no_replica_s)
        self._to_do: deque[Instruction] = deque()
        self._carrying_out = False

    def bind(self, *, vllm_config: Any, output_processor: Any, fingerprint: str, vllm_version: str) -> None:
        """Give the client the objects that exist only after ``AsyncLLM`` was built around it."""
        self._vllm_config, self._output_processor = vllm_config, output_processor
        self.links.bind(vllm_config=vllm_config, fingerprint=fingerprint, vllm_version=vllm_version)

    def use(self, path: type[OutputPath]) -> None:
        """Bring outputs to vLLM by this path. Called before the first request."""
        self.output_path = path(self._outputs.put_nowait, self._output_processor)

    def take_stats(self) -> Any:
        """Return vLLM's statistics of the tokens since the last call that vLLM did not get; None if there are none."""
        return self.output_path.take_stats()

    async def run(self) -> None:
        """Send ticks to the fleet and pings to the links until cancelled, then end all links and dials."""
        ping_at = 0.0
        try:
            while True:
                now = await next_tick()
                self.handle(Ticked())
                self._show_load()
                if now >= ping_at:
                    ping_at = now + self._settings.protocol.heartbeat_interval_s
                    self.links.ping()
        finally:
            await self.links.stop()

    def _show_load(self) -> None:
        # Gauges are queued only when nothing else is: the counters of a queued engine step show the load anyway.
        if self._outputs.empty() and (stats := self._gauges.changes()) is not None:
            self._outputs.put_nowait(EngineCoreOutputs(scheduler_stats=stats))

    def is_ready(self) -> bool:
        """Return whether some replica takes new requests, or would wake for one."""
        return any(not r.draining or r.sleeping for r in self.fleet.replicas.values())

    def set_members(self, leases: Iterable[Lease]) -> None:
        """Take in the leases of all replicas, of every model."""
        mine = [lease for lease in leases if lease.model == self.model.name]
        self._adapters = {lease.member_id: frozenset(lease.adapters) for lease in mine}
        self.links.set_members(mine)
        for event in self._start_times.events(mine):
            self.handle(event)

    def quarantined(self) -> list[tuple[str, float]]:
        """Return the fingerprints that this ingress has quarantined, with the seconds that are left of each quarantine."""
        return self.fleet.quarantine.own(now=time.monotonic())

    def _link_opened(self, link: ReplicaLink) -> None:
        self.handle(link.opened(self._adapters.get(link.replica_id, frozenset())))

    def _link_lost(self, link: ReplicaLink, end: LinkEnd) -> None:
        self.handle(LinkLost(link.replica_id, end, frozenset(link.unsent)))

    def _messages(self, link: ReplicaLink, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Outputs):
                if not self._outputs_arrived(link, message):
                    break  # a later frame would leave a hole in an answer; each request resumes after the last token that was read
            elif (event := link.event_of(message)) is not None:
                self.handle(event)
        self.output_path.write()

    def _outputs_arrived(self, link: ReplicaLink, message: Outputs) -> bool:
        """Return whether the frame could be read; if not, the link is closed."""
        try:
            frame = self._decoder.decode(message.buffers)
        except Exception as exc:  # whatever vLLM's decoder raises: the replica encodes outputs in another way
            link.close("malformed_message", f"outputs: {type(exc).__name__}: {exc}", LinkEnd.MISUNDERSTOOD)
            return False
        now = time.monotonic()
        some_finished = take_in(frame, link.connection, now)
        instructions = self.fleet.handle(OutputsArrived(link.replica_id, frame.outputs), now=now)
        frame.outputs = []
        if instructions and isinstance(deliver := instructions[0], DeliverOutputs):
            del instructions[0]
            drop_what_belongs_to_swallowed(deliver)
            outputs: Sequence[Any] = deliver.outputs
            if some_finished and (refused := refused_by_engines(outputs, self._requests, self._output_processor.request_states)):
                instructions += [FailRequest(request_id, error) for request_id, error in refused.items()]
                outputs = [o for o in outputs if o.request_id not in refused]
            frame.outputs = self.output_path.take(outputs, now)
            self._forget_finished(frame.outputs)
        if frame.scheduler_stats is not None:
            self._gauges.show(frame.scheduler_stats)
        if frame.outputs or frame.scheduler_stats is not None:  # a step in the middle of a long prompt has only counters
            self._outputs.put_nowait(frame)
        self._carry_out(instructions)
        return True

    def _forget_finished(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)
                if output.finish_reason == FinishReason.ERROR:
                    self._failed_siblings |= self._siblings(output.request_id) & self._requests.keys()

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self.output_path.forget(request_id)
        self._exchanges.pop(request_id, None)
        self._failed_siblings.discard(request_id)

    def _siblings(self, request_id: str) -> set[str]:
        state = self._output_processor.request_states.get(request_id)
        return set() if state is None or state.parent_req is None else state.parent_req.child_requests

    def handle(self, event: Event) -> None:
        """Give the fleet an event, and carry out what follows."""
        self._carry_out(self.fleet.handle(event, now=time.monotonic()))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        """Carry out these in order, then the instructions that they cause. A loop, because recursion would be as deep as the queue."""
        self._to_do += instructions
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._to_do:
                self._carry_out_one(self._to_do.popleft())
        finally:
            self._carrying_out = False

    def _carry_out_one(self, instruction: Instruction) -> None:
        """Carry out one instruction. It raises nothing, because the next instructions belong to requests of other clients."""
        try:
            match instruction:
                case StartAttempt():
                    self._start_attempt(instruction)
                case AbortAttempts():
                    self._abort_attempts(instruction)
                case HandOverAttempt() | FreeKeptKv() | PassTrial() | WakeReplica():
                    self._ask(instruction)
                case FailRequest():
                    self._fail_request(instruction)
                case CloseLink():
                    self.links.eject(instruction.replica_id, instruction.reason)
                case DeliverOutputs():
                    raise AssertionError("DeliverOutputs comes first, and only from OutputsArrived")
        except Exception as exc:  # for StartAttempt also whatever vLLM's encoder raises for a value of the client
            if isinstance(instruction, StartAttempt):
                reason = why_unsendable(self._requests[instruction.request_id], exc, self._encoder.encode)
                self.handle(AttemptUnsendable(instruction.request_id, reason))
            else:
                logger.exception("%s was not carried out", type(instruction).__name__)

    def _start_attempt(self, start: StartAttempt) -> None:
        if (original := self._requests.get(start.request_id)) is None:
            return  # the end of a sibling has just ended this request
        if not (link := self.links[start.replica_id]).can_send():
            link.unsent[start.attempt_id] = replace(start, kv=None)
            return  # until there is room, or until the link is lost and the request resumes; no KV is kept for so long
        check_media(original, self._vllm_config.model_config.architecture, link.connection)
        buffers, kv, num_emitted = self._encoder.encode(attempt_request(original, start)), kv_of(start), len(start.continue_from)
        link.write(link.connection.send_add(start.attempt_id, buffers, num_emitted, suspect=start.suspect, kv=kv))

    def _send_unsent(self, link: ReplicaLink) -> None:
        starts, link.unsent = link.unsent, {}
        self._carry_out(list(starts.values()))

    def _abort_attempts(self, abort: AbortAttempts) -> None:
        if (link := self.links.get(abort.replica_id)) is not None and link.is_open():
            link.write(link.connection.send_abort([i for i in abort.attempt_ids if link.unsent.pop(i, None) is None]))

    def _ask(self, asked: HandOverAttempt | FreeKeptKv | PassTrial | WakeReplica) -> None:
        if (link := self.links.get(asked.replica_id)) is not None and link.is_open():
            says = link.connection
            frames = {HandOverAttempt: says.send_hand_over, FreeKeptKv: says.send_free_kv, PassTrial: says.send_trial_passed}
            link.write(says.send_wake() if isinstance(asked, WakeReplica) else frames[type(asked)](asked.attempt_id))

    def _fail_request(self, fail: FailRequest) -> None:
        """End the whole generation of vLLM's front end with the error, siblings of n>1 included."""
        self.output_path.write_now(fail.request_id)
        if (exchange := self._exchanges.get(fail.request_id)) is not None:
            exchange.fail(fail.error)
        self._forget(fail.request_id)
        state = self._output_processor.request_states.get(fail.request_id)
        if state is None:
            return
        queue, parent = state.queue, state.parent_req
        whole = fail.request_id if parent is None else parent.request_id
        others = self._output_processor.abort_requests([whole], internal=True)
        queue.put(FleetError(fail.error))
        self._abort([i for i in others if i != fail.request_id], "failed")

    def _abort(self, request_ids: list[str], outcome: Literal["aborted", "complete", "failed"]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
        if request_ids:
            self.handle(RequestsAborted(request_ids, outcome))

    def end_all_of(self, exchange: Exchange, error: ServingError) -> None:
        """Abort the engine requests of an HTTP request, and end its generations in vLLM's front end by the error."""
        request_ids = [request_id for request_id, each in self._exchanges.items() if each is exchange]
        for request_id in request_ids:
            self.output_path.write_now(request_id)
        if request_ids:
            self.handle(RequestsAborted(request_ids))
        exchange.fail(error)
        for request_id in request_ids:
            self._fail_request(FailRequest(request_id, error))

    # AsyncLLM calls the methods below.

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Queue or start the request.

        Raises:
            FleetError: The request was refused; vLLM's output processor has forgotten it.
        """
        exchange = current_exchange()
        if (refused := await self.intake.refusal(request, exchange, self._vllm_config)) is not None:
            self._refuse(request, refused)
        if self._siblings(request.request_id) and self.intake.is_pause_due(request):
            await asyncio.sleep(0)  # when it is cancelled here, vLLM aborts all choices of the request
        try:
            arrived = self._arrival(request, exchange)
        except Exception as exc:  # whatever a value of the client causes: vLLM's output processor has the request already
            error = why_unsendable(request, exc, self._encoder.encode)
            if isinstance(error, SendFailed):  # no value of the client explains the error
                logger.exception("request %s could not be read", request.request_id)
            self._refuse(request, error)
        instructions = self.fleet.handle(arrived, now=time.monotonic())
        for refusal in instructions:
            if isinstance(refusal, FailRequest) and refusal.request_id == request.request_id:
                self._refuse(request, refusal.error)
        if arrived.tenant and self.model.yields_to_chats():
            request.priority = self.fleet.requests[request.request_id].priority
        self._requests[request.request_id] = request
        self.output_path.arrived(request.request_id)
        if exchange is not None:
            self._exchanges[request.request_id] = exchange
            exchange.add_engine_request(self.fleet.requests[request.request_id], request.external_req_id or request.request_id)
        self._carry_out(instructions)

    def _arrival(self, request: EngineCoreRequest, exchange: Exchange | None) -> RequestArrived:
        if exchange is not None and exchange.background:
            request.priority = max(request.priority, BACKGROUND_PRIORITY)  # embeddings have no field for it
        self.output_path.prepare(request)
        return self.intake.arrival(request, exchange, self._vllm_config, seeds_by_position=self.links.seeds_by_position)

    def _refuse(self, request: EngineCoreRequest, error: ServingError) -> NoReturn:
        self._output_processor.abort_requests([request.request_id], internal=True)
        refuse(error)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Stop these requests in their engines.

        vLLM calls this when a client has disconnected, when it closes a generation of which one choice failed, and, from its output
        handler only, when its detokenizer has found a stop string.
        """
        if asyncio.current_task() is self._reader:
            self._abort(request_ids, "complete")
            return
        self._abort([i for i in request_ids if i in self._failed_siblings], "failed")
        self._abort([i for i in request_ids if i in self._requests], "aborted")

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the next frame. It never raises: vLLM's output handler would fail all requests and end."""
        self._reader = asyncio.current_task()
        return await self._outputs.get()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return the tasks that replicas support; before the first replica joins, those that the model's runner type implies."""
        if self.links.capabilities is not None:
            return tuple(self.links.capabilities.tasks)
        return ("embed",) if self._vllm_config.model_config.runner_type == "pooling" else ("generate",)

    async def is_sleeping_async(self) -> bool:
        return False

    def dp_engines_running(self) -> bool:
        return True

    def shutdown(self, timeout: float | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it every link
            self.links.close()

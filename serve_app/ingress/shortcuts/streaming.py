"""Streaming writes the middle of a stream: vLLM writes the first and last events, and an event of vLLM is repeated here with each new text.

For each token, vLLM's front end makes objects, a task switch and a JSON model in pydantic, although only the text is new. The template of
a stream is an event that vLLM has written twice with different texts, cut at the text. An event that differs from the template of an
earlier answer only in id and time is a template at once. From then on, the read of the link that brings a token also passes it through
vLLM's own detokenizer and writes its event to the connection. Several tokens become one event if one read brings them, or if separate
writes would take too much time (`Pace`); vLLM also joins waiting tokens. vLLM's `RequestState` is set to output nothing before the end
(`stream_interval`). So the last token goes through vLLM, which writes the finish reason, usage and ``[DONE]``.

These rules keep the answers equal. A stream begins here only when every character that vLLM has output is in an event that was written;
until then, outputs are parked. A stream has one choice, no log probabilities and no parser. When a stop string is found, vLLM ends the
answer.
"""

import argparse
import asyncio
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import IterationStats

from serve_app.ingress.exchange.held_answer import HeldAnswer, current_answer
from serve_app.ingress.fleet.output_path import OutputPath
from serve_app.ingress.shortcuts.pace import Pace
from serve_app.ingress.shortcuts.prompt_end import begin_at_the_end

_HEAD, _END = b"data: ", b"\n\n"
_MAX_LEARNED = 16
"""The most events from which a stream may learn its template; a stream with ``echo`` never learns one."""
_NEVER = 1 << 60
"""Tokens between two outputs of vLLM: so many that only the last output comes."""
_MAX_SHAPES = 64
"""The most templates of earlier answers that are remembered. Routes, adapters and options of requests make about a dozen."""
_OF_ONE_ANSWER = re.compile(rb'"id":"(?:[^"\\]|\\.)*"|"created":\d+')
_encode = msgspec.json.Encoder().encode


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: Any = None
    logprobs: Any = None
    token_ids: Any = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def text_of(event: bytes) -> str | None:
    """Return the text of an event in the middle of a stream; None if the event has other fields, or more of them."""
    if not (event.startswith(_HEAD + b"{") and event.endswith(_END)):
        return None
    try:
        found = _decode(event[len(_HEAD) :])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if len(found.choices) != 1 or found.usage is not None:
        return None
    choice = found.choices[0]
    if choice.finish_reason is not None or choice.logprobs is not None or choice.token_ids is not None:
        return None
    if choice.delta is None:
        return choice.text
    said = {name: value for name, value in choice.delta.items() if value is not None}
    return said["content"] if said.keys() == {"content"} and isinstance(said["content"], str) else None


def repeated_paths(app: FastAPI, args: argparse.Namespace) -> frozenset[str]:
    """Return the paths with streams whose events can be repeated.

    A parser of tool calls or reasoning makes other events from a text. vLLM's log of answers and foreign middleware must see each event.
    """
    if args.enable_log_outputs or args.middleware:
        return frozenset()
    chat = getattr(app.state, "openai_serving_chat", None)
    has_parser = chat is None or chat.parser_cls is not None
    return frozenset({"/v1/completions"} if has_parser else {"/v1/completions", "/v1/chat/completions"})


class _StopFound:
    """A detokenizer that has found a stop string already, and reports it when vLLM takes in the same tokens."""

    def __init__(self, detokenizer: Any, num_tokens_before: int, stop: str) -> None:
        self._detokenizer = detokenizer
        self._num_tokens_before: int | None = num_tokens_before
        self._stop = stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._detokenizer, name)

    def num_output_tokens(self) -> int:
        before = self._num_tokens_before
        return int(self._detokenizer.num_output_tokens()) if before is None else before

    def update(self, *_: object) -> str:
        self._num_tokens_before = None
        return self._stop


class Stream:
    """One answer. ``num_given`` of its tokens were given to vLLM. The ``parked`` outputs wait until vLLM has written those tokens."""

    def __init__(
        self,
        held: HeldAnswer,
        cycle: RequestResponseCycle,
        learned: Callable[[], None],
        shapes: set[tuple[bytes, ...]],
    ) -> None:
        self.begun = False
        self.state: Any = None
        self.num_given = 0
        self.parked: list[tuple[Any, float]] = []
        self._held = held
        self._cycle = cycle
        self._learned = learned
        self._shapes = shapes
        self._cut: list[bytes] = []
        self._num_chars = 0
        self._num_learned = 0
        self.has_template = False
        held.on_event = self._learn

    def _learn(self, event: bytes) -> None:
        self._num_learned += 1
        if (text := text_of(event)) is not None:
            self._num_chars += len(text)
            if text and event.count(encoded := _encode(text)) == 1:
                cut = event.split(encoded)
                shape = tuple(_OF_ONE_ANSWER.sub(b"", part) for part in cut)
                if cut == self._cut and len(self._shapes) < _MAX_SHAPES:
                    self._shapes.add(shape)
                # The first event may hold more than later ones, so it alone is a template only if an earlier answer has shown the same.
                self.has_template = cut == self._cut or shape in self._shapes
                self._cut = cut
        if self._num_learned >= _MAX_LEARNED or self.parked:
            self._learned()

    def can_ever_begin(self, state: Any, output: Any) -> bool:
        """Return whether the events of this answer differ only in their text; ``state`` is vLLM's ``RequestState``."""
        self.state = state
        plain = state is not None and len(self._held.exchange.requests.kept) == 1 and _is_plain(state, output)
        return plain and bool(self._cycle.chunked_encoding) and self._num_learned < _MAX_LEARNED

    def is_caught_up(self) -> bool:
        """Return whether vLLM has written all tokens that it was given."""
        return (
            self.state.detokenizer.num_output_tokens() == self.num_given
            and self.state.queue.output is None
            and not self._held.is_sending
        )

    def begin(self) -> bool:
        """Take over from vLLM, which is caught up. Return False if vLLM has output text that is in none of its events, as with ``echo``."""
        detokenizer = self.state.detokenizer
        if not self.has_template or self._num_chars != detokenizer._last_output_text_offset:
            return False
        self.state.stream_interval, self.state.sent_tokens_offset = _NEVER, detokenizer.num_output_tokens()
        self.begun = True
        self._held.on_event = None
        return True

    def expect_end(self) -> None:
        """Gather the next writes, which are the last."""
        self._held.expect_end()

    def end(self) -> None:
        self._held.on_event = None

    def add(self, output: Any) -> bool:
        """Take in these tokens for `write`. Return False if they contain a stop string, so that vLLM ends the answer with them."""
        detokenizer = self.state.detokenizer
        num_before = detokenizer.num_output_tokens()
        if (stop := detokenizer.update(output.new_token_ids, False)) is not None:
            self.state.detokenizer = _StopFound(detokenizer, num_before, stop)
            return False
        return True

    def write(self, *, slow_too: bool = False) -> bool:
        """Write the text of the tokens since the last event; return False if the client does not take it now.

        ``slow_too``: write also for a client that is slow to read, because nothing will be written after this.
        """
        if not self._held.takes_events(self._cycle, slow_too=slow_too):
            return False
        text = self.state.detokenizer.get_next_output_text(False, True)
        self._held.write(self._cycle, _encode(text).join(self._cut))
        return True


def _is_plain(state: Any, output: Any) -> bool:
    """Return whether an answer has one choice, comes in steps, and consists of text only."""
    return (
        state.parent_req is None
        and state.output_kind == RequestOutputKind.DELTA
        and state.stream_interval == 1
        and not state.is_prefilling
        and not state.streaming_input
        and state.detokenizer is not None
        and hasattr(state.detokenizer, "_last_output_text_offset")  # a detokenizer without a tokenizer has no text
        and state.logprobs_processor.num_logprobs is None
        and output.new_logprobs is None
        and output.new_sampling_mask is None
        and output.routed_experts is None
    )


def _count_middle(stats: Any, of_request: Any, num_tokens: int, now: float) -> None:
    """Count tokens in the middle of a stream as vLLM's ``IterationStats.update_from_output`` does, in a third of its time.

    A gap is the time between arrivals at the ingress. The write of a token may come up to ``MAX_PAUSE_S`` later.
    """
    stats.num_generation_tokens += num_tokens
    of_request.num_generation_tokens += num_tokens
    stats.inter_token_latencies_iter.append(now - of_request.last_token_ts)
    of_request.last_token_ts = now


_AGAIN_S = 0.1
"""How often text is tried again for clients that are slow to read."""


class Streams(OutputPath):
    """The streams of one model, and the statistics that vLLM would have counted of their tokens."""

    _pace = Pace()
    """One for the whole process, because the passes of all models take the time of one event loop."""

    def __init__(self, give: Callable[[EngineCoreOutputs], None], output_processor: Any) -> None:
        super().__init__(give, output_processor)
        self._stats = IterationStats()
        self._of: dict[str, Stream] = {}
        self._unwritten: dict[str, Stream] = {}
        self._slow: dict[str, Stream] = {}
        """Streams whose clients did not take their text at the last pass; the text is tried again when no token comes, too."""
        self._again: asyncio.TimerHandle | None = None
        self._due: asyncio.TimerHandle | None = None
        """The timer of the next pass, if tokens wait for one."""
        self._shapes: set[tuple[bytes, ...]] = set()

    def prepare(self, request: Any) -> None:
        if (state := self._processor.request_states.get(request.request_id)) is not None:
            begin_at_the_end(state.detokenizer, request.prompt_token_ids)

    def arrived(self, request_id: str) -> None:
        """Watch the answer of the current HTTP request, if its events can be repeated."""
        held = current_answer()
        if held is not None and held.repeats and (cycle := held.cycle) is not None:
            self._of[request_id] = Stream(held, cycle, partial(self._continue, request_id), self._shapes)

    def forget(self, request_id: str) -> None:
        if (stream := self._of.pop(request_id, None)) is not None:
            self._unwritten.pop(request_id, None)  # vLLM's last output includes its text
            self._slow.pop(request_id, None)
            stream.end()

    def take_stats(self) -> IterationStats:
        """Return the statistics since the last call."""
        taken, self._stats = self._stats, IterationStats()
        return taken

    def take(self, outputs: Sequence[Any], now: float) -> list[Any]:
        """Take in what can be repeated of a frame's outputs, for `write`, and return the rest, which vLLM's own way is for.

        Args:
            outputs: vLLM's ``EngineCoreOutput``.
            now: Monotonic time of the frame, in seconds.
        """
        if not self._of:
            return list(outputs)
        rest = []
        for output in outputs:
            stream = self._of.get(output.request_id)
            if stream is None:
                rest.append(output)
            elif output.finish_reason is not None or not (stream.begun or stream.has_template):
                self._give_parked(stream)
                stream.num_given += len(output.new_token_ids)
                if output.finish_reason is not None:
                    stream.expect_end()
                rest.append(output)
            elif stream.begun:
                if not self._add(stream, output, now):
                    rest.append(output)
            else:
                stream.parked.append((output, now))
                self._continue(output.request_id)
        return rest

    def write(self) -> None:
        """Write one event for each stream with new tokens since the last pass, now or as soon as the next pass may begin."""
        if not self._unwritten or self._due is not None:
            return
        if wait_s := self._pace.wait_s(time.monotonic()):
            self._due = asyncio.get_running_loop().call_later(wait_s, self._pass)
        else:
            self._pass()

    def _pass(self) -> None:
        self._due = None
        unwritten, self._unwritten = self._unwritten, {}
        began_s = time.thread_time()
        for request_id, stream in unwritten.items():
            if not stream.write():
                self._slow[request_id] = stream
            elif self._slow:
                self._slow.pop(request_id, None)
        if self._slow and self._again is None:
            self._again = asyncio.get_running_loop().call_later(_AGAIN_S, self._try_again)
        self._pace.wrote(time.thread_time() - began_s, time.monotonic())

    def _try_again(self) -> None:
        self._again = None
        self._slow = {request_id: stream for request_id, stream in self._slow.items() if not stream.write()}
        if self._slow:
            self._again = asyncio.get_running_loop().call_later(_AGAIN_S, self._try_again)

    def write_all(self) -> None:
        """Write the waiting text of all requests now, because all of them end."""
        if self._due is not None:
            self._due.cancel()
        self._pass()
        for request_id in list(self._slow):
            self.write_now(request_id)

    def write_now(self, request_id: str) -> None:
        """Write the waiting text of this request now: it has failed, so no last output of vLLM will bring the text."""
        waiting = self._unwritten.pop(request_id, None), self._slow.pop(request_id, None)
        if (stream := waiting[0] or waiting[1]) is not None:
            stream.write(slow_too=True)

    def _add(self, stream: Stream, output: Any, now: float) -> bool:
        """Take in the output. Return False if it ends the answer, so that vLLM has to take it."""
        if not stream.add(output):
            self.forget(output.request_id)  # vLLM drops the tokens after a stop string
            return False
        if output.events is None and not output.num_nans_in_logits:
            _count_middle(self._stats, stream.state.stats, len(output.new_token_ids), now)
        else:  # a preemption
            self._processor._update_stats_from_output(stream.state, output, now, self._stats)
        self._unwritten[output.request_id] = stream
        return True

    def _continue(self, request_id: str) -> None:
        """Begin the stream with its parked outputs once vLLM is caught up, or give all of them to vLLM if it can never begin."""
        stream = self._of[request_id]
        state = self._processor.request_states.get(request_id)
        if not stream.parked or not stream.can_ever_begin(state, stream.parked[0][0]):
            self._give_up(request_id, stream)
        elif stream.is_caught_up():
            if stream.begin():
                self._write_parked(stream)
            else:
                self._give_up(request_id, stream)

    def _write_parked(self, stream: Stream) -> None:
        parked, stream.parked = stream.parked, []
        for number, (output, now) in enumerate(parked):
            if not self._add(stream, output, now):
                self._give(EngineCoreOutputs(outputs=[o for o, _ in parked[number:]], timestamp=now))
                return
        self.write()

    def _give_up(self, request_id: str, stream: Stream) -> None:
        self.forget(request_id)
        self._give_parked(stream)

    def _give_parked(self, stream: Stream) -> None:
        for output, now in stream.parked:
            stream.num_given += len(output.new_token_ids)
            self._give(EngineCoreOutputs(outputs=[output], timestamp=now))
        stream.parked.clear()

"""The middle of a stream: vLLM writes its first and last events, and here one of them is repeated with each next text.

A token costs vLLM's front end objects, a task switch and a JSON model in pydantic, and only its text is new. A stream's template is an
event that vLLM wrote twice, but for the text, cut where that was. From then on a token goes through vLLM's own detokenizer, and its event
to the connection, within the frame that brought it. vLLM's `RequestState` is told that it may wait with the rest to the end
(`stream_interval`), so the last token goes through vLLM, which writes what is left: the finish reason, usage, ``[DONE]``.

What keeps the answers equal: a stream begins only once all characters that vLLM has given out stand in events that were written, and
nothing of it is on its way; it has one choice, no log probabilities and no parser. A stop string that is found goes back to vLLM.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.stats import IterationStats

from serve_app.ingress.held_answer import HeldAnswer
from serve_app.ingress.verdict import Verdict, current_verdict

_HEAD, _END = b"data: ", b"\n\n"
_MAX_LEARNED = 16
"""Events from which a stream may learn its template; those with ``echo`` never do."""
_NEVER = 1 << 60
"""Tokens between two outputs of vLLM's: only the last one comes."""
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
    """Return the text of an event in the middle of a stream; None where it says anything else, or more."""
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


class _StopFound:
    """A detokenizer that has found a stop string, for vLLM's own look at the same tokens."""

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
    """One request whose answer may be repeated. ``state`` is vLLM's ``RequestState`` of it."""

    __slots__ = ("_cut", "_cycle", "_flow", "_held", "_is_template", "_num_chars", "_num_learned", "_verdict", "begun", "state")

    def __init__(self, verdict: Verdict, held: HeldAnswer, cycle: RequestResponseCycle) -> None:
        self.begun = False
        self.state: Any = None
        self._verdict = verdict
        self._held = held
        self._cycle = cycle
        self._flow = cycle.flow
        self._cut: list[bytes] = []
        self._is_template = False
        self._num_chars = 0
        self._num_learned = 0
        held.on_event = self._learn

    def _learn(self, event: bytes) -> None:
        self._num_learned += 1
        if self._num_learned == _MAX_LEARNED:
            self._held.on_event = None
        if (text := text_of(event)) is None:
            return
        self._num_chars += len(text)
        if text and event.count(encoded := _encode(text)) == 1:
            cut = event.split(encoded)
            self._is_template = cut == self._cut  # the first event may hold more than those behind it
            self._cut = cut

    def begin(self, state: Any, output: Any, num_emitted: int) -> bool:
        """Return whether all tokens before these can be left to this, which they then are.

        Args:
            state: vLLM's ``RequestState``; None when vLLM has forgotten the request.
            output: What is next of the request.
            num_emitted: How many tokens the request has with those.
        """
        if not self._is_template or state is None or self._verdict.num_requests != 1 or not _is_plain(state, output):
            return False
        detokenizer = state.detokenizer
        num_tokens = detokenizer.num_output_tokens()
        is_all_written = state.queue.output is None and self._num_chars == detokenizer._last_output_text_offset
        if not is_all_written or num_tokens + len(output.new_token_ids) != num_emitted or not self._may_write():
            return False
        state.stream_interval, state.sent_tokens_offset = _NEVER, num_tokens
        self.state, self.begun = state, True
        self._held.on_event = None
        return True

    def _may_write(self) -> bool:
        cycle = self._cycle
        return bool(self._held.is_idle and not self._flow.write_paused and not cycle.disconnected and cycle.chunked_encoding)

    def add(self, output: Any) -> bool:
        """Take these tokens in and write their text, now or with those of the next; False leaves them to vLLM, to end the answer."""
        detokenizer = self.state.detokenizer
        num_before = detokenizer.num_output_tokens()
        if (stop := detokenizer.update(output.new_token_ids, False)) is not None:
            self.state.detokenizer = _StopFound(detokenizer, num_before, stop)
            return False
        if self._may_write():
            body = _encode(detokenizer.get_next_output_text(False, True)).join(self._cut)
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            self._held.note_written()
        return True


def _is_plain(state: Any, output: Any) -> bool:
    """Return whether an answer is of one choice, in steps, and of nothing but text."""
    return (
        state.parent_req is None
        and state.output_kind == RequestOutputKind.DELTA
        and state.stream_interval == 1
        and not state.is_prefilling
        and not state.streaming_input
        and state.detokenizer is not None
        and hasattr(state.detokenizer, "_last_output_text_offset")  # one without a tokenizer has no text
        and state.logprobs_processor.num_logprobs is None
        and output.new_logprobs is None
        and output.new_sampling_mask is None
        and output.routed_experts is None
    )


class Streams:
    """Those of one model, and what vLLM would have counted of their tokens."""

    def __init__(self) -> None:
        self._stats = IterationStats()
        self._processor: Any = None
        self._of: dict[str, Stream] = {}

    def bind(self, output_processor: Any) -> None:
        self._processor = output_processor

    def arrived(self, request_id: str) -> None:
        """Watch the answer of the present HTTP request, if it is one of those that can be repeated."""
        verdict = current_verdict.get()
        if verdict is None or (held := verdict.repeatable) is None:
            return
        verdict.num_requests += 1  # of several prompts none is repeated
        if (cycle := held.cycle) is not None:
            self._of[request_id] = Stream(verdict, held, cycle)

    def forget(self, request_id: str) -> None:
        self._of.pop(request_id, None)

    def take_stats(self) -> IterationStats:
        """Return what was counted since this was last called."""
        taken, self._stats = self._stats, IterationStats()
        return taken

    def take(self, outputs: Sequence[Any], requests: Any, now: float) -> list[Any]:
        """Write what can be written of a frame's outputs, and return the rest, which vLLM's own way is for.

        Args:
            outputs: vLLM's ``EngineCoreOutput``.
            requests: The fleet's requests by id.
            now: Monotonic time of the frame, in seconds.
        """
        if not self._of:
            return list(outputs)
        rest = []
        for output in outputs:
            stream = self._of.get(output.request_id)
            if (
                stream is not None
                and output.finish_reason is None
                and output.new_token_ids
                and (stream.begun or self._begin(stream, output, requests))
            ):
                if stream.add(output):
                    self._processor._update_stats_from_output(stream.state, output, now, self._stats)
                    continue
                self.forget(output.request_id)  # what comes behind a stop string is vLLM's to drop
            rest.append(output)
        return rest

    def _begin(self, stream: Stream, output: Any, requests: Any) -> bool:
        state = self._processor.request_states.get(output.request_id)
        return stream.begin(state, output, len(requests[output.request_id].emitted_ids))

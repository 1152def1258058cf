"""This module reads traffic to plan for: a file with the due time and the tokens of each request.

The format is the load test kit's schedule.jsonl. The kit makes such a file from a scenario or from a recorded trace of another format
(`serve-app-loadtest plan --schedule`), so that this module needs no other format and the two packages share nothing but the file.
"""

import contextlib
from pathlib import Path
from typing import Annotated

import msgspec

from serve_app.config.files import read_regular_file
from serve_app.errors import ConfigError

MAX_BYTES = 1 << 28
MIN_SECONDS = 5.0
"""Shortest trace: in less, the first requests meet an empty fleet."""
BLOCK_TOKENS = 512
"""Prompt tokens that an id of ``blocks`` stands for."""
_CONVERT = "`serve-app-loadtest plan SCENARIO --schedule FILE` makes a trace"
_OPEN = "give a scenario that has an arrival.law other than closed and no conversation, or one that replays a recorded trace"
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request. Other keys of its line have no effect."""

    due_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    """Seconds from the beginning of the trace."""
    input_tokens: _Tokens
    output_tokens: _Tokens
    blocks: tuple[int, ...] = ()
    """An id for each 512 tokens of the prompt, after its class's; equal ids mean equal tokens."""
    cls: str = ""
    """The class of the request."""
    shared: dict[str, Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]] | None = None
    """Class -> the tokens with which all its prompts begin. Only the first line of a file has it, but it counts for all lines."""

    def shared_tokens(self) -> int:
        """Return the tokens with which the prompt begins like the others of its class."""
        return min((self.shared or {}).get(self.cls, 0), self.input_tokens)


class _Due(msgspec.Struct):
    due_s: float | None
    """None: a later turn of a conversation, or a request of a closed loop."""


def read_trace(path: Path, seconds: float) -> list[TraceRequest]:
    """Return the requests of the first ``seconds`` by due time, which counts from the first of them.

    Raises:
        ConfigError: The file cannot be read, a line is no request, or they span less than `MIN_SECONDS`.
    """
    decoder, due = msgspec.json.Decoder(TraceRequest), msgspec.json.Decoder(_Due)
    requests = list[TraceRequest]()
    for number, line in enumerate(read_regular_file(path, MAX_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            requests.append(decoder.decode(line))
        except (msgspec.DecodeError, RecursionError) as exc:
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                if due.decode(line).due_s is None:
                    problem = "is sent when an answer ends, and the trace does not say when"
                    raise ConfigError(f"{path}:{number}", problem, _OPEN) from exc
            raise ConfigError(f"{path}:{number}", f"is no request: {exc}", _CONVERT) from exc
    shared = requests[0].shared if requests else None
    requests.sort(key=lambda request: request.due_s)
    begin_s = requests[0].due_s if requests else 0.0
    kept = [
        msgspec.structs.replace(each, due_s=each.due_s - begin_s, shared=shared)
        for each in requests
        if each.due_s - begin_s < seconds
    ]
    if not kept or kept[-1].due_s < MIN_SECONDS:
        spanned = kept[-1].due_s if kept else 0.0
        problem = f"{len(kept)} requests within {spanned:g} s"
        raise ConfigError(str(path), problem, f"give a trace of {MIN_SECONDS:g} s or more. {_CONVERT}")
    return kept

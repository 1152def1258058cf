"""``serve-app explain`` prints from the ledger where a request went and why: its attempts, its moves, what they should save and cost."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
import typer

from serve_app.books.ledger_check import MAX_LINE_BYTES
from serve_app.books.ledger_lines import NO_LINE, LedgerLine, LedgerMove
from serve_app.books.words import CAUSES, REASONS
from serve_app.cli.ledger import files_of
from serve_app.core.events import LinkEnd
from serve_app.environment import as_typed

RESULTS: Mapping[str, str] = {
    "read": "the KV of {tokens} tokens was read",
    "computed": "the target read nothing and computed",
    "late": "the target had no token in time, so the request started again",
    "not_kept": "the replica had no whole KV, so the target computed",
    "no_target": "the target took no request any more",
    "unanswered": "the replica did not answer in time, so the target computed",
    "ended": "the answer ended or a replica was lost meanwhile",
    "without_kv": "without its KV",
    "": "its end is not known",
}
ANSWERS = ("chatcmpl-", "cmpl-", "resp_")
"""What an answer's id has before the client's X-Request-Id."""
ENDS: Mapping[str, str] = {"moved": "moved away"} | {end.name.lower(): end.value for end in LinkEnd}


def explain(request: str, paths: Iterable[Path], *, as_json: bool) -> None:
    """Print what the ledger has of each request with this id."""
    try:
        request.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{request!r} is no id: it is not UTF-8") from None
    try:
        lines = [line for file in files_of(paths) for line in _lines(file, _ids(request))]
    except OSError as exc:
        raise typer.BadParameter(f"{exc.filename} cannot be read: {exc.strerror}") from exc
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(lines), indent=2).decode())
    else:
        for line in lines:
            for text in lines_about(line):
                typer.echo(_printable(text))
    if not lines:
        hint = f"a request has a line once it has ended; `{as_typed()} ledger verify` finds lines that are missing"
        typer.secho(f"error: no request has the id {request!r}: {hint}", fg="red", err=True)
        raise typer.Exit(1)


def _printable(text: str) -> str:
    """Return the text with escapes for what a terminal would obey: a ledger may have been changed, or hold names of other programs."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _ids(request: str) -> set[str]:
    """Return the ids that the ledger may have for what a client calls its request."""
    return {request, *(request.removeprefix(start) for start in ANSWERS)}


def _lines(file: Path, ids: Collection[str]) -> Iterator[LedgerLine]:
    """Yield the lines with one of these ids. Damaged lines are left out: they are for `serve-app ledger verify`."""
    decoder = msgspec.json.Decoder(LedgerLine)
    needles = [msgspec.json.encode(each) for each in ids]
    with file.open("rb") as raw:
        for text in iter(partial(raw.readline, MAX_LINE_BYTES), b""):
            if not any(needle in text for needle in needles):
                continue
            try:
                line = decoder.decode(text)
            except NO_LINE:
                continue
            if line.id in ids:
                yield line


def lines_about(line: LedgerLine) -> Iterator[str]:
    """Yield the lines about one request, with seconds from the head of the request."""
    at = datetime.fromtimestamp(line.time, UTC)
    how = f"{line.outcome} ({line.reason})" if line.reason else line.outcome
    cached = "" if line.cached_tokens is None else f", {line.cached_tokens} of them cached"
    yield f"{line.id}, {at:%Y-%m-%dT%H:%M:%SZ}: {line.path}, model {line.model}: {how} after {line.total_s:.3f} s"
    yield f"  prompt {line.prompt_tokens} tokens{cached}; answer {line.output_tokens} tokens in {line.engine_requests} engine requests"
    if line.queued_s is not None:
        first = "no token came" if line.first_token_s is None else f"the first token came at {line.first_token_s:.3f} s"
        yield f"  waited {line.queued_s:.3f} s for a replica; {first}"
    if not line.attempts:
        yield "  it was given to no replica"
    moves: dict[int, list[LedgerMove]] = {}
    for move in line.moves:
        moves.setdefault(move.attempt, []).append(move)
    for number, (replica, end) in enumerate(zip(line.replicas, line.ends, strict=False)):
        yield from _attempt(line, number, replica)
        for move in moves.get(number, ()):
            yield from _move(move)
        yield f"             ended: {ENDS.get(end, end)}"
    if left_out := line.attempts - len(line.replicas):
        yield f"  {left_out} more attempts are not in the ledger"
    if line.gaps_s:
        yield f"  pauses of the answer at its moves: {', '.join(f'{gap_s:.3f}' for gap_s in line.gaps_s)} s"


def _attempt(line: LedgerLine, number: int, replica: str) -> Iterator[str]:
    if number >= len(line.routes):  # a line of an older release
        yield f"  attempt {number + 1} at {replica}"
        return
    route = line.routes[number]
    yield f"  {route.start_s:8.3f} s attempt {number + 1} at {replica}: {REASONS.get(route.reason, route.reason)}"
    saves = f"; requests wait {route.saves_s:.3f} s less there in sum, by the estimate" if route.saves_s else ""
    yield f"             {route.hit_tokens} prompt tokens expected in its cache, {route.tokens_before} tokens to do before{saves}"


def _move(move: LedgerMove) -> Iterator[str]:
    yield f"  {move.at_s:8.3f} s to leave it: {CAUSES.get(move.cause, move.cause)}"
    result = RESULTS.get(move.result, move.result).replace("{tokens}", str(move.read_tokens))
    if move.read_s is None:
        yield f"             {result}"
        return
    yield f"             expected to save {move.saves_s:.3f} s, for a read of {move.read_s:.3f} s: {result}"

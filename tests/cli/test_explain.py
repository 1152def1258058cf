"""`serve-app explain` finds a request in the ledger and says where it went and why."""

import json
import os
from pathlib import Path

import msgspec
from typer.testing import CliRunner, Result

from serve_app.books.ledger_lines import LedgerMove, LedgerRoute
from serve_app.books.words import CAUSES, REASONS
from serve_app.cli.explain import ENDS, RESULTS
from serve_app.cli.main import app
from serve_app.core.events import LinkEnd
from serve_app.core.routing import Reason
from tests.cli.test_ledger import counts, head, last, line, write

MOVED = line(
    0,
    id="mine",
    attempts=3,
    replicas=["a", "b", "c"],
    ends=["moved", "engine_died", "length"],
    routes=[
        LedgerRoute(reason="prompt", start_s=0.01, hit_tokens=16, tokens_before=120, saves_s=0.5),
        LedgerRoute(reason="load", start_s=0.4),
        LedgerRoute(reason="spread", start_s=0.8),
    ],
    moves=[LedgerMove(attempt=0, at_s=0.3, cause="balance", saves_s=0.25, read_s=0.05, result="read", read_tokens=48)],
    gaps_s=[0.06, 0.1],
    cached_tokens=2,
)
EXPLAINED = """\
mine, 2026-09-21T14:13:20Z: /v1/completions, model m: complete (length) after 1.000 s
  prompt 5 tokens, 2 of them cached; answer 1 tokens in 1 engine requests
  waited 0.000 s for a replica; the first token came at 0.100 s
     0.010 s attempt 1 at a: the prompt is long, and slows the fewest answers there
             16 prompt tokens expected in its cache, 120 tokens to do before; requests wait 0.500 s less there in sum, by the estimate
     0.300 s to leave it: another replica had less to do
             expected to save 0.250 s, for a read of 0.050 s: the KV of 48 tokens was read
             ended: moved away
     0.400 s attempt 2 at b: it had the least to do
             0 prompt tokens expected in its cache, 0 tokens to do before
             ended: its engine died
     0.800 s attempt 3 at c: the replicas with the prompt's beginning had too much to do, or no room
             0 prompt tokens expected in its cache, 0 tokens to do before
             ended: length
  pauses of the answer at its moves: 0.060, 0.100 s
"""


def explain(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)], env={"COLUMNS": "300"})


def test_each_attempt_and_move_of_the_request_is_explained_in_order(tmp_path: Path) -> None:
    write(tmp_path, [head(counts(0)), MOVED, line(1), last(counts(2))])
    result = explain("mine", tmp_path)
    assert (result.exit_code, result.stdout) == (0, EXPLAINED)


def test_the_answers_id_finds_a_request_whose_client_sent_an_id(tmp_path: Path) -> None:
    write(tmp_path, [head(counts(0)), MOVED, line(1), last(counts(2))])
    assert explain("chatcmpl-mine", tmp_path).stdout == EXPLAINED


def test_an_id_that_no_request_has_is_an_error_and_a_part_of_an_id_is_none(tmp_path: Path) -> None:
    write(tmp_path, [head(counts(0)), MOVED, last(counts(1))])
    for request_id in ("min", 'mine"', "other"):
        result = explain(request_id, tmp_path)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "no request has the id" in result.stderr
    assert explain("mine", tmp_path / "nowhere").exit_code == 2
    no_text = explain(os.fsdecode(b"\xff"), tmp_path)
    assert (no_text.exit_code, "is no id: it is not UTF-8" in no_text.stderr) == (2, True)


def test_all_requests_with_the_id_come_and_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, [head(counts(0)), MOVED], [head(counts(1), file=1), line(1, id="mine")], end=b'{"seq":2,"id":"mine","num')
    told = json.loads(explain("mine", tmp_path, "--json").stdout)
    assert [(each["seq"], len(each["routes"]), [move["cause"] for move in each["moves"]]) for each in told] == [
        (0, 3, ["balance"]),
        (1, 0, []),
    ]


def test_no_line_that_another_program_wrote_stops_the_command_or_reaches_the_terminal_raw(tmp_path: Path) -> None:
    odd = msgspec.json.decode(msgspec.json.encode(MOVED))
    odd["moves"][0].update(result="{new}", cause="\x1b[31mred")
    deep = '{"id":"mine","more":' + "[" * 100_000
    file = tmp_path / "ledger.jsonl"
    file.write_text(f"{deep}\n{json.dumps(odd)}\n")
    told = explain("mine", file)
    assert (told.exit_code, told.exception) == (0, None)
    assert "to leave it: \\x1b[31mred\n" in told.stdout
    assert "for a read of 0.050 s: {new}\n" in told.stdout


def test_a_request_without_a_replica_and_a_line_of_an_older_release_are_explained(tmp_path: Path) -> None:
    refused = line(0, id="r", outcome="rejected", status=503, reason="queue_full", output_tokens=0, queued_s=None)
    write(tmp_path, [head(counts(0)), refused, line(1, id="old"), last(counts(2))])
    assert "  it was given to no replica" in explain("r", tmp_path).stdout.splitlines()
    assert explain("old", tmp_path).stdout.splitlines()[-2:] == ["  attempt 1 at a", "             ended: length"]


def test_each_reason_cause_result_and_end_has_its_words() -> None:
    assert {reason.value for reason in Reason} == REASONS.keys()
    assert CAUSES.keys() == {"drain", "prompts", "balance", "role", "new_replica"}
    assert RESULTS.keys() == {"read", "computed", "late", "not_kept", "no_target", "unanswered", "ended", "without_kv", ""}
    assert {end.name.lower() for end in LinkEnd} < ENDS.keys()

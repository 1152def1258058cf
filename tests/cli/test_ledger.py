"""`serve-app ledger verify` accepts a whole ledger, and names each way in which one is not whole."""

import fcntl
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from serve_app.books.ledger_check import Numbers
from serve_app.books.ledger_lines import OUTCOMES, Head, Last, LedgerCounts, LedgerLine, Outcome, file_name
from serve_app.cli.main import app

STARTED = 1_790_000_000.0


def verify(*paths: Path) -> Result:
    return CliRunner().invoke(app, ["ledger", "verify", *map(str, paths)], env={"COLUMNS": "300"})


def line(seq: int, *, number: int | None = None, outcome: Outcome = "complete", **others: object) -> LedgerLine:
    """Return a line of a request of one token; ``number`` is ``seq`` unless given."""
    started = outcome != "rejected"
    fields = {
        "seq": seq, "number": seq if number is None else number, "time": STARTED, "id": f"id-{seq}", "key": None, "model": "m",
        "path": "/v1/completions", "stream": True, "outcome": outcome, "status": 200, "reason": "length",
        "engine_requests": int(started), "attempts": int(started), "replicas": ["a"] * started, "ends": ["length"] * started,
        "prompt_tokens": 5, "output_tokens": int(started), "queued_s": 0.0, "first_token_s": 0.1, "total_s": 1.0, "gaps_s": [],
    }  # fmt: skip
    return msgspec.convert(fields | others, LedgerLine)


def counts(seq: int, *, begun: int | None = None, running: Iterable[int] = (), **outcomes: int) -> LedgerCounts:
    told = dict.fromkeys(OUTCOMES, 0) | (outcomes or {"complete": seq})
    return LedgerCounts(seq=seq, begun=seq if begun is None else begun, open=list(running), outcomes=told)


def head(told: LedgerCounts, *, file: int = 0, ingress: str = "i1") -> Head:
    return Head(ingress=ingress, started=STARTED, time=STARTED, file=file, counts=told)


def last(told: LedgerCounts) -> Last:
    return Last(closed=STARTED + 9, counts=told)


def write(folder: Path, *files: Iterable[msgspec.Struct], ingress: str = "i1", end: bytes = b"") -> list[Path]:
    paths = [folder / file_name(ingress, STARTED, number) for number in range(len(files))]
    for path, lines in zip(paths, files, strict=True):
        path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
    paths[-1].write_bytes(paths[-1].read_bytes() + end)
    return paths


def test_a_whole_ledger_is_summed_up(tmp_path: Path) -> None:
    moved = line(1, attempts=2, replicas=["a", "b"], ends=["engine_died", "length"], gaps_s=[0.5])
    told = counts(4, running=[2], begun=5, complete=2, rejected=1, aborted=1)
    refused = line(3, number=4, outcome="rejected", status=503, reason="queue_full", output_tokens=0, id="id-0")
    write(
        tmp_path,
        [head(counts(0)), line(0), moved, line(2, number=3, outcome="aborted", reason="client_gone")],
        [head(counts(3, running=[2, 4], begun=5, complete=2, aborted=1), file=1), refused, last(told)],
    )
    write(
        tmp_path, [head(counts(0), ingress="i2"), line(0, gaps_s=[0.25]), line(1, gaps_s=[0.75]), last(counts(2))], ingress="i2"
    )
    result = verify(tmp_path)
    assert result.stdout.splitlines() == [
        "6 requests in 3 files of 2 ingress processes",
        "complete           4  length 4",
        "failed             0  ",
        "rejected           1  queue_full 1",
        "aborted            1  client_gone 1",
        "none               1  they still ran when their ingress ended, or run now",
        "attempts of a request: 0: 1, 1: 4, 2: 1",
        "resumed within the answer: 3; silence p50 0.50 s, p99 0.75 s, longest 0.75 s",
        "tokens: prompt 30, output 5",
        "3 lines have the id of an earlier line: a client tried again, or gives several requests one id",
        f"note: {tmp_path / file_name('i1', STARTED, 1)}: 1 requests had no outcome yet when the ingress ended",
        "nothing is wrong",
    ]
    assert result.exit_code == 0


WRONG: dict[str, tuple[list[msgspec.Struct], str]] = {
    "a line is missing": (
        [head(counts(0)), line(0), line(2), last(counts(3))],
        ":3: lines number 1 of the ingress are missing before it: ",
    ),
    "lines at the end are missing": (
        [head(counts(0)), line(0), last(counts(3))],
        ":3: lines number 1 to 2 of the ingress are missing before it: ",
    ),
    "two outcomes": (
        [head(counts(0)), line(0), line(1, number=0), last(counts(2, begun=1))],
        ":3: request number 0 has an outcome already; its id here is 'id-1'",
    ),
    "no outcome": (
        [head(counts(0)), line(0), line(1, number=2), last(counts(2, begun=3))],
        ":4: by this line 0 requests had no outcome yet, by the lines before it 1, or others; ",
    ),
    "more requests than a list could have": (
        [head(counts(0, begun=-5)), last(counts(0, begun=2**63 - 1))],
        f":2: by this line 0 requests had no outcome yet, by the lines before it {2**63 + 4}, or others; ",
    ),
    "other outcomes": (
        [head(counts(0)), line(0), last(counts(1, failed=1))],
        ":3: by this line requests ended {'complete': 0, 'failed': 1, 'rejected': 0, 'aborted': 0}, by the lines before it ",
    ),
    "twice the same": (
        [head(counts(0)), line(0), line(0), last(counts(1))],
        ":3: line number 0 comes again, or out of order: 1 was next; ",
    ),
    "tokens of nowhere": (
        [head(counts(0)), line(0, attempts=0, replicas=[], ends=[]), last(counts(1))],
        ":2: request 'id-0' got 1 tokens without an attempt or a first token",
    ),
    "refused but started": (
        [
            head(counts(0)),
            line(0, outcome="rejected", reason="queue_full", attempts=1, replicas=["a"], ends=["x"]),
            last(counts(1, rejected=1)),
        ],
        ":2: request 'id-0' was rejected, and started 1 times",
    ),
    "an attempt without a replica": (
        [head(counts(0)), line(0, attempts=2), last(counts(1))],
        ":2: request 'id-0' had 2 attempts, but 1 replicas and 1 ends are listed",
    ),
    "a status of another end": (
        [head(counts(0)), line(0, status=503), last(counts(1))],
        ":2: request 'id-0' is complete with the status 503",
    ),
    "a part longer than the whole": (
        [head(counts(0)), line(0, gaps_s=[7.0]), last(counts(1))],
        ":2: request 'id-0' lasted 1.0 s, and a part of it 7.0 s, or a part has a negative time",
    ),
    "another version": ([msgspec.structs.replace(head(counts(0)), ledger=2)], ":1: is of version 2; this serve-app reads 1"),
}


@pytest.mark.parametrize(("lines", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_by_file_and_line(tmp_path: Path, lines: list[msgspec.Struct], said: str) -> None:
    (path,) = write(tmp_path, lines)
    result = verify(path)
    assert result.stderr.startswith(f"error: {path}{said}")
    assert (result.stderr.count("\n"), result.exit_code) == (1, 1)


def test_a_file_between_that_is_missing_is_named(tmp_path: Path) -> None:
    files = [[head(counts(number), file=number), line(number)] for number in range(4)]
    paths = write(tmp_path, *files)
    paths[0].unlink()  # the oldest may be gone
    paths[2].unlink()
    result = verify(tmp_path)
    assert result.stderr == f"error: {paths[3]}:1: is file 3 of its ingress, and the one before it here is file 1\n"
    assert (
        f"note: {paths[1]}: is file 1 of its ingress; earlier files were removed to make room, or are not given" in result.stdout
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace(b'"seq":1,', b'"seq":"1",'),
        lambda text: text[:-20] + b"\n",
        lambda text: text.replace(b'"path":"', b'"path":"\xff'),
        lambda text: text.replace(b'"seq":1,', b'"seq":1,"more":' + b"[" * 100_000),
    ],
    ids=["type", "cut", "text", "depth"],
)
def test_a_line_that_is_none_is_named_and_the_others_count(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    (path,) = write(tmp_path, [head(counts(0)), line(0), line(1)])
    text = path.read_bytes()
    begin = text.index(b'{"seq":1,')
    path.write_bytes(text[:begin] + damage(text[begin:]))
    result = verify(path)
    assert f"error: {path}:3: is not a line of a ledger: " in result.stderr
    assert result.stdout.startswith("1 requests in 1 files")


def test_the_end_of_a_killed_ingress_is_told_and_is_no_error(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [head(counts(0)), line(0), line(1, number=3)], end=b'{"seq":2,"num')
    result = verify(tmp_path)
    assert f"note: {path}:4: the last line is cut off: its ingress was killed while it wrote it, or writes now" in result.stdout
    why = "its ingress was killed, or still ran when the file was copied"
    assert f"note: {path}: no last line: {why}; 2 requests have no outcome" in result.stdout
    assert (result.stderr, result.exit_code) == ("", 0)


@pytest.mark.parametrize(("number", "noted"), [(1, 0), (3, 2)])
def test_of_an_ingress_that_runs_only_requests_without_an_outcome_are_noted(tmp_path: Path, number: int, noted: int) -> None:
    (path,) = write(tmp_path, [head(counts(0)), line(0), line(1, number=number)])
    with path.open("ab") as written:
        fcntl.flock(written, fcntl.LOCK_EX)  # as `LedgerFiles` does
        result = verify(tmp_path)
    notes = [text for text in result.stdout.splitlines() if text.startswith("note: ")]
    assert notes == ([f"note: {path}: {noted} requests have no outcome yet: their ingress runs"] if noted else [])
    assert (result.stderr, result.exit_code) == ("", 0)


def test_a_file_to_which_nothing_could_be_written_is_told(tmp_path: Path) -> None:
    path = tmp_path / file_name("i1", STARTED, 0)
    path.touch()
    assert f"note: {path}: is empty: nothing could be written to it" in verify(tmp_path).stdout


def test_what_is_no_ledger_is_refused_with_the_way_out(tmp_path: Path) -> None:
    nothing, other = tmp_path / "nothing", tmp_path / "other.txt"
    other.write_text("hello\n")
    for path, status, said in [
        (nothing, 2, "does not exist; `ingress.ledger.dir` of the configuration says where the ledger is"),
        (tmp_path, 2, "holds no file ledger-*.jsonl; is `ingress.ledger` set, and did an ingress run here?"),
        (other, 1, "is not the first line of a ledger's file"),
    ]:
        result = verify(path)
        assert (result.exit_code, said in result.stderr) == (status, True), result.stderr


def test_many_findings_are_counted_and_not_all_printed(tmp_path: Path) -> None:
    write(tmp_path, [head(counts(0)), *(line(seq, status=503) for seq in range(50)), last(counts(50))])
    said = verify(tmp_path).stderr.splitlines()
    assert (len(said), said[-1]) == (21, "... and 30 more")


@given(st.lists(st.integers(1, 5), max_size=8), st.data())
def test_numbers_as_intervals_are_a_set(steps: list[int], data: st.DataObject) -> None:
    numbers, expected, end = Numbers(), set[int](), 0
    for step in steps:
        numbers.add(end, end + step)
        expected |= set(range(end, end + step))
        end += step
        number = data.draw(st.integers(-1, end))
        assert numbers.remove(number) == (number in expected)
        expected.discard(number)
        assert numbers.count() == len(expected)
    assert [n for n in range(-1, end + 1) if numbers.remove(n)] == sorted(expected)


def test_a_request_that_vllm_refuses_as_it_writes_the_answer_is_in_order(tmp_path: Path) -> None:
    late = line(
        0, outcome="rejected", status=400, reason="http_400", attempts=1, replicas=["a"], ends=["length"], engine_requests=1
    )
    write(tmp_path, [head(counts(0)), late, last(counts(1, rejected=1))])
    result = verify(tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")

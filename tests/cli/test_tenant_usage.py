"""`serve-app tenants usage` sums the ledgers of several ingresses, and says what is missing."""

import csv
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from serve_app.books.ledger_lines import OUTCOMES, LedgerLine
from serve_app.books.usage import Usage
from serve_app.cli.main import app
from tests.cli.test_ledger import STARTED, counts, head, last, line, write

NOON = 1_795_867_200.0  # date -u -d 2026-11-28T12:00 +%s


def usage(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["tenants", "usage", *map(str, arguments)], env={"COLUMNS": "300"})


def used(seq: int, tenant: str | None, at: float, **others: object) -> LedgerLine:
    fields: dict[str, object] = {
        "tenant": tenant, "key": tenant and f"{tenant}-1", "model": "chat", "time": at, "prompt_tokens": 100, "cached_tokens": 64,
        "output_tokens": 10, "gpu_s": 0.25,
    }  # fmt: skip
    return line(seq, **(fields | others))  # type: ignore[arg-type]


def ledger(folder: Path, lines: Iterable[LedgerLine], ingress: str = "i1") -> Path:
    folder.mkdir(exist_ok=True)
    told = list(lines)
    outcomes: dict[str, int] = Counter(each.outcome for each in told)
    write(
        folder,
        [
            head(counts(0), ingress=ingress),
            *told,
            last(msgspec.structs.replace(counts(len(told)), outcomes=dict.fromkeys(OUTCOMES, 0) | outcomes)),
        ],
        ingress=ingress,
    )
    return folder


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """The ledgers of two ingresses: two tenants at noon, and one of them an hour later."""
    refused = used(
        2,
        "red",
        NOON,
        outcome="rejected",
        status=503,
        engine_requests=1,
        output_tokens=0,
        cached_tokens=None,
        first_token_s=None,
        gpu_s=0.0,
    )
    first = [used(0, "red", NOON), used(1, "blue", NOON + 1, model="embed", output_tokens=0, gpu_s=0.125), refused]
    second = [used(0, "red", NOON + 3600.0, key="red-2"), used(1, None, NOON + 3600.0)]
    return [ledger(tmp_path / "one", first), ledger(tmp_path / "two", second, "i2")]


def test_the_table_has_a_row_for_each_tenant_and_model_of_all_ledgers_and_their_total(two: list[Path]) -> None:
    result = usage(*two)
    assert result.stdout.splitlines() == [
        "tenant  model  requests  refused  prompt  cached  output  gpu_s",
        "blue    embed         1        0     100      64       0  0.125",
        "red     chat          3        1     200     128      20  0.500",
        "-       chat          1        0     100      64      10  0.250",
        "total                 5        1     400     256      30  0.875",
    ]
    assert (result.exit_code, result.stderr) == (0, "")


def test_time_is_utc_and_its_end_is_left_out(two: list[Path]) -> None:
    for begin, end, requests in [
        ("2026-11-28", "2026-11-29", 5),
        ("2026-11-28T12:00", "2026-11-28T13:00", 3),
        ("2026-11-28T14:00+01:00", "", 2),
        ("", "2026-11-28", 0),
    ]:
        span = [*(("--from", begin) if begin else ()), *(("--to", end) if end else ())]
        assert json.loads(usage(*two, "--json", *span).stdout)["total"]["requests"] == requests


def test_csv_has_the_groups_that_were_asked_for(two: list[Path]) -> None:
    rows = list(csv.DictReader(usage(*two, "--csv", "--by", "tenant,key,hour").stdout.splitlines()))
    assert [(row["tenant"], row["key"], row["hour"], row["requests"]) for row in rows] == [
        ("blue", "blue-1", "2026-11-28T12:00Z", "1"),
        ("red", "red-1", "2026-11-28T12:00Z", "2"),
        ("red", "red-2", "2026-11-28T13:00Z", "1"),
        ("", "", "2026-11-28T13:00Z", "1"),
    ]
    assert set(rows[0]) == {
        "tenant",
        "key",
        "hour",
        "requests",
        "refused",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "gpu_s",
    }


def test_json_has_rows_and_their_total(two: list[Path]) -> None:
    told = json.loads(usage(*two, "--json", "--by", "day").stdout)
    sums = {"requests": 5, "refused": 1, "prompt_tokens": 400, "cached_tokens": 256, "output_tokens": 30, "gpu_s": 0.875}
    assert told == {"by": ["day"], "rows": [{"day": "2026-11-28", **sums}], "total": sums, "findings": [], "notes": []}


def test_lines_of_an_older_release_are_read_and_said_to_lack_what_they_lack(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [head(counts(0)), used(0, "red", NOON), used(1, None, NOON, key="0123abcd"), last(counts(2))])
    first, new, old, end = path.read_text().splitlines()
    fields = {name: value for name, value in json.loads(old).items() if name not in ("cached_tokens", "gpu_s", "tenant")}
    path.write_text("\n".join([first, new, json.dumps(fields, separators=(",", ":")), end, ""]))
    result = usage(path)
    assert result.stdout.splitlines()[1:3] == [
        "0123abcd  chat          1        0     100       0      10      -",
        "red       chat          1        0     100      64      10  0.250",
    ]
    assert result.stderr.splitlines() == [
        "note: 1 answered requests have no GPU-seconds: no replica of their model had measured its steps. Where the model "
        "makes text, start a replica again while its machine is less busy (docs/ledger.md)",
        "note: 1 answered requests have no cached tokens: an older release wrote their lines",
    ]
    assert CliRunner().invoke(app, ["ledger", "verify", str(path)]).exit_code == 0


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [head(counts(0)), used(0, "red", NOON), used(3, "red", NOON)], end=b'{"seq":4,"num')
    result = usage(tmp_path)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (
        1,
        "total                 2        0     200     128      20  0.500",
    )
    assert f"note: {path}:4: the last line is cut off: " in result.stderr
    assert f"error: {path}:3: lines number 1 to 2 of the ingress are missing before it: " in result.stderr


@pytest.mark.parametrize("time", [1e18, -1.0])
@pytest.mark.parametrize("by", ["tenant", "hour", "day"])
def test_a_line_with_a_time_that_has_no_date_is_named_and_the_others_are_summed(tmp_path: Path, time: float, by: str) -> None:
    damaged = msgspec.structs.replace(used(1, "red", NOON), time=time)
    (path,) = write(tmp_path, [head(counts(0)), used(0, "red", NOON), damaged, used(2, "red", NOON)])
    result = usage(tmp_path, "--by", by)
    assert (result.exit_code, result.stdout.splitlines()[-1].split()[:2]) == (1, ["total", "2"])
    assert f"error: {path}:3: is not a line of a ledger: Expected `float` " in result.stderr


def test_a_time_without_requests_is_said_with_the_time_of_the_ledger(two: list[Path], tmp_path: Path) -> None:
    span = "the ledger's first began at 2026-11-28T12:00:00+00:00, its last at 2026-11-28T13:00:00+00:00"
    assert usage(*two, "--from", "2026-12-01").stderr == f"note: no request began in this time; {span}\n"
    assert usage(ledger(tmp_path / "empty", [])).stderr == "note: the ledger has no request\n"


def test_a_file_that_is_given_twice_counts_once(two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(two[0])
    assert usage(two[0], *two[0].iterdir(), tmp_path / "link", two[1]).stdout == usage(*two).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "does not exist; `ingress.ledger.dir` of the configuration says where the ledger is"),
        (["."], "holds no file ledger-*.jsonl; is `ingress.ledger` set, and did an ingress run here?"),
        (["one", "--by", "tenant,colour"], "'colour' is no group; choose from tenant, key, model, hour, day"),
        (["one", "--from", "yesterday"], "'yesterday' is no time; write 2026-11-01 or 2026-11-01T07:00"),
        (["one", "--from", "2026-11-02", "--to", "2026-11-01"], "2026-11-01 is not after 2026-11-02"),
        (["one", "--csv", "--json"], "choose one of --csv and --json"),
    ],
)
def test_a_mistake_is_refused_with_the_way_out(
    two: list[Path], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(two[0].parent)
    result = usage(*arguments)
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr


def test_prompts_of_requests_that_no_engine_answered_are_no_use() -> None:
    found = Usage(["tenant"])
    waited = used(0, "red", STARTED, outcome="failed", reason="no_replica", status=503, output_tokens=0, first_token_s=None)
    found.add(waited)
    found.add(msgspec.structs.replace(waited, outcome="complete", status=200))  # an embedding has no first token
    assert (found.total.requests, found.total.prompt_tokens) == (2, 100)

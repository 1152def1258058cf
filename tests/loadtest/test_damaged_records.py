"""These tests damage or edit a record: a command then ends with one error that has the place, the problem and the way out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.audit.audit import audit
from loadtest.errors import UsageError
from loadtest.judge.analysis import analyse
from loadtest.report.report import write_report
from tests.loadtest.judge.written_runs import write_run

READERS: dict[str, Callable[[Path], Any]] = {"verdict": analyse, "audit": audit, "report": write_report}
PUT_BACK = "put back the file as the run wrote it, or run the scenario again"


def edit(path: Path, number: int, **values: Any) -> None:
    lines = path.read_bytes().splitlines()
    lines[number] = msgspec.json.encode(msgspec.json.decode(lines[number]) | values)
    path.write_bytes(b"".join(line + b"\n" for line in lines))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"status": 99_999}, "Expected `int` <= 999 - at `$.status` (got 99999)"),
        ({"worker": 2**40}, "Expected `int` <= 255 - at `$.worker` (got 1099511627776)"),
        ({"worker": -1}, "Expected `int` >= 0 - at `$.worker` (got -1)"),
        ({"id": 2**63}, "at `$.id` (got 9223372036854775808)"),
        ({"prompt_tokens": 2**70}, "at `$.prompt_tokens` (got 1180591620717411303424)"),
        ({"output_tokens": -5}, "at `$.output_tokens` (got -5)"),
        ({"end_s": 1e300}, "at `$.end_s` (got 1e+300)"),
        ({"chunks": [[1.0, 1], [2.0, -5], [3.0, 3]]}, "Expected `int` >= 0 - at `$.chunks[1][1]`"),
        ({"chunks": [[1.0, 1], [2.0, 2**40]]}, "Expected `int` <= 200000000 - at `$.chunks[1][1]`"),
        ({"chunks": [[1.0, 1], [1e300, 1]]}, "at `$.chunks[1][0]`"),
    ],
)
def test_a_value_that_no_run_can_have_recorded_is_named(reader: str, values: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 20) / "rows.jsonl"
    edit(path, 5, **values)
    with pytest.raises(UsageError) as caught:
        READERS[reader](path.parent)
    assert caught.value.where.startswith(str(path))
    assert said in caught.value.problem
    assert caught.value.problem.endswith(PUT_BACK)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("values", [{"output_tokens": 2**70}, {"input_tokens": -1}, {"due_s": 1e300}])
def test_a_request_that_no_schedule_can_have_is_named(reader: str, values: dict[str, Any], tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 20) / "schedule.jsonl"
    edit(path, 5, **values)
    with pytest.raises(UsageError, match=f"at `\\$.{next(iter(values))}`.*; {PUT_BACK}") as caught:
        READERS[reader](path.parent)
    assert caught.value.where == f"{path}:6"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["schedule.jsonl", "rows.jsonl"])
def test_a_byte_that_is_no_text_is_named_by_its_line(reader: str, name: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 20) / name
    path.write_bytes(path.read_bytes().replace(b'"default"' if name == "schedule.jsonl" else b'"ok"', b'"\xff"', 1))
    with pytest.raises(UsageError, match=PUT_BACK) as caught:
        READERS[reader](path.parent)
    assert caught.value.where in (f"{path}:1", f"{path} at byte 0")


def test_a_search_with_a_byte_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "saturate.json").write_bytes(b'{"ended": "\xff"}')
    with pytest.raises(UsageError, match="put back the file as the search wrote it"):
        write_report(tmp_path)


def test_a_request_of_a_class_that_the_scenario_does_not_have_is_a_finding(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20)
    edit(run / "schedule.jsonl", 5, cls="another")
    found = audit(run)
    assert found.counts == {"schedule": 2}  # the file's digest is another one, too
    assert "schedule: request 5: its class 'another' is none of the scenario's: default" in found.lines()
    assert found.states["mismatch"] == 1
    assert "the schedule&#39;s file is not the one that the manifest names" in write_report(run).read_text()

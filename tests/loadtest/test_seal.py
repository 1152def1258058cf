"""These tests check that any change to the rows after recording is found by the seals."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from loadtest.audit.audit import audit
from loadtest.errors import UsageError
from loadtest.judge.analysis import analyse
from loadtest.recorder import Batch, Recorder, as_lines, write_manifest
from loadtest.records import HealthSample, Manifest, Row, read_manifest
from loadtest.seal import SCENARIO, broken_seals, scenario_digest, without_digest
from tests.loadtest.judge.written_runs import write_run
from tests.loadtest.test_recorder import small_disk

Edit = Callable[[list[bytes]], list[bytes]]


def recorded(run: Path, *, state: str = "finished") -> Path:
    """Write three batches of three rows, as a run does; a run that crashed has no seals in its manifest."""
    run.mkdir()
    recorder = Recorder(run)
    for number in range(3):
        rows = [Row(number * 3 + k, 0, 0.0, "ok", text=f"row {number * 3 + k}") for k in range(3)]
        health = as_lines([HealthSample(float(number), 0, 0.1, 0.001, 0.0, 0, 0, 0)])
        recorder.add(Batch(0, number, 3, as_lines(rows), health))
    sealed = recorder.sealed() if state == "finished" else {}
    recorder.close()
    write_manifest(run, Manifest(state, {}, "", 0, "", "", 0.0, [], sealed=sealed))  # type: ignore[arg-type]
    return run


def change(path: Path, edit: Edit) -> None:
    path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True))))


EDITS: dict[str, Edit] = {
    "text": lambda lines: [lines[0].replace(b"row 0", b"now 0"), *lines[1:]],
    "deletion": lambda lines: lines[:4] + lines[5:],
    "order": lambda lines: [lines[1], lines[0], *lines[2:]],
    "the last one": lambda lines: lines[:-1],
    "a new one": lambda lines: [*lines, lines[0]],
    "all": lambda _: [],
}


@pytest.mark.parametrize("state", ["finished", "running"])
def test_records_as_they_were_written_are_whole(state: str, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", state=state)
    assert broken_seals(run, read_manifest(run)) == []


@pytest.mark.parametrize("name", list(EDITS))
def test_every_edit_of_the_rows_is_found(name: str, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    change(run / "rows.jsonl", EDITS[name])
    (problem,) = broken_seals(run, read_manifest(run))
    assert problem.startswith("rows.jsonl was changed")


def test_the_seal_that_breaks_first_says_where(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    size = (run / "rows.jsonl").stat().st_size
    change(run / "rows.jsonl", EDITS["deletion"])
    (problem,) = broken_seals(run, read_manifest(run))
    assert problem == f"rows.jsonl was changed between its bytes {size // 3} and {size * 2 // 3} after it was recorded"


def test_a_run_that_crashed_is_sealed_up_to_its_last_batch(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", state="running")
    change(run / "rows.jsonl", EDITS["a new one"])
    assert broken_seals(run, read_manifest(run)) == []
    change(run / "rows.jsonl", EDITS["text"])
    assert len(broken_seals(run, read_manifest(run))) == 1


def test_health_is_sealed_too_and_a_lost_file_is_found(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    change(run / "health.jsonl", EDITS["the last one"])
    (run / "rows.jsonl").unlink()
    removed, changed = broken_seals(run, read_manifest(run))
    assert (removed, changed[:24]) == ("rows.jsonl was removed after it was recorded", "health.jsonl was changed")


@pytest.mark.parametrize("line", ["{}", '{"file":"other","num_bytes":1,"sha256":""}'])
def test_seals_that_cannot_be_read_are_named(line: str, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    (run / "seal.jsonl").write_text(f"{line}\n")
    with pytest.raises(UsageError, match=r"seal.jsonl:1"):
        broken_seals(run, read_manifest(run))


def test_rows_that_a_full_disk_cut_have_the_seal_of_what_is_there(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with pytest.raises(OSError, match="too large"), small_disk():
        recorder.add(Batch(0, 0, 2, (b"y" * 59 + b"\n") * 2, b"\n"))
    manifest = Manifest("interrupted", {}, "", 0, "", "", 0.0, [], sealed=recorder.sealed())
    recorder.close()
    assert (tmp_path / "rows.jsonl").stat().st_size == 60
    assert broken_seals(tmp_path, manifest) == []


def test_edited_rows_give_no_figures_and_a_finding(tmp_path: Path) -> None:
    from tests.loadtest.synthetic import write_run

    run = write_run(tmp_path / "run")
    assert analyse(run).verdict != "invalid"
    recorder = Recorder(run / "copy")
    (run / "copy").mkdir()
    recorder.append("rows.jsonl", (run / "rows.jsonl").read_bytes())
    sealed = recorder.sealed()
    recorder.close()
    manifest = msgspec.structs.replace(read_manifest(run), sealed=sealed)
    write_manifest(run, manifest)
    assert (analyse(run).verdict != "invalid", audit(run).counts.get("edited")) == (True, None)
    change(run / "rows.jsonl", lambda lines: lines[::-1])  # no figure depends on the order of the lines
    assert (analyse(run).verdict, audit(run).counts["edited"]) == ("invalid", 1)


def test_a_limit_that_was_changed_after_the_run_makes_it_invalid(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 400, slo="ttft_p99=500ms")
    manifest = read_manifest(run)
    write_manifest(run, msgspec.structs.replace(manifest, sealed={SCENARIO: scenario_digest(manifest.scenario)}))
    assert analyse(run).verdict == "slo-missed"  # first tokens take a second
    path = run / "manifest.json"
    path.write_text(path.read_text().replace('"limit_s": 0.5', '"limit_s": 5.0'))
    found = analyse(run)
    assert found.verdict == "invalid"
    assert "the scenario in manifest.json was changed after it was recorded" in [gate.text for gate in found.gates if not gate.ok]


def test_a_digest_that_is_not_there_is_missed(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    without_scenario = read_manifest(run)
    digest = scenario_digest(without_scenario.scenario)
    whole = msgspec.structs.replace(without_scenario, sealed={**without_scenario.sealed, SCENARIO: digest})
    assert without_digest(run, whole) == []
    end = ": later changes there cannot be detected"
    assert without_digest(run, without_scenario) == [f"the run has no digest of scenario{end}"]
    (run / "seal.jsonl").unlink()
    bare = msgspec.structs.replace(whole, sealed={})
    assert without_digest(run, bare) == [f"the run has no digest of rows.jsonl, health.jsonl, scenario{end}"]


@pytest.mark.parametrize("name", ["rows.jsonl", "health.jsonl"])
def test_records_that_are_a_folder_are_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    sealed, unsealed = recorded(tmp_path / "sealed"), write_run(tmp_path / "unsealed", 40)
    for run, read in ((sealed, lambda: broken_seals(sealed, read_manifest(sealed))), (unsealed, lambda: analyse(unsealed))):
        (run / name).unlink()
        (run / name).mkdir()
        with pytest.raises(UsageError, match=f"{name}: cannot be read: Is a directory"):
            read()

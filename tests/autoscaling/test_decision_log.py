"""These tests write the autoscaler's log and read it back."""

import gzip
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.autoscaling import decision_log
from serve_app.autoscaling.decision import ScalingRules
from serve_app.autoscaling.decision_log import (
    DecisionLog,
    Record,
    decided_again,
    differing,
    export,
    files,
    read,
    row_of,
    stretches,
)
from serve_app.autoscaling.fleet import FleetObservation, FleetRules, FleetScaler, IngressObservation
from tests.autoscaling.plant import RULES, Plant
from tests.e2e.fleet import wait_until

START = 1.79e9


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that logs seconds of a plant whose load doubles half-way."""

    def write(seconds: int) -> Path:
        path = tmp_path / "log"
        log, plant, scaler = DecisionLog(path), Plant(running=2), FleetScaler(FleetRules(models={"chat": RULES}))
        for second in range(seconds):
            model = plant.see(plant.load(10.0 if second < seconds / 2 else 20.0))
            ingress = IngressObservation(running=1, target=1, minimum=1, maximum=2, streams=1.0, cpu_s=0.1, interval_s=1.0)
            seen = FleetObservation(at=plant.at, models={"chat": model}, ingress=ingress)
            plant.obey(log.observe(scaler, seen, time=START + plant.at)["chat"])
        wait_until(lambda: sum(len(f.read_text().splitlines()) for f in files(path)) == seconds, limit_s=10, what="all written")
        return path

    return write


def records(path: Path) -> list[Record]:
    found, num_unreadable = read(line for file in files(path) for line in file.read_text().splitlines())
    assert num_unreadable == 0
    return found


def test_a_log_decided_again_gives_the_same_decisions(write: Callable[..., Path]) -> None:
    logged = records(write(900))
    assert len(logged) == 900
    assert len({r.decided["chat"].desired for r in logged}) > 1
    assert [decided for _, decided in decided_again(logged)] == [r.decided for r in logged]


def test_any_piece_from_a_snapshot_on_gives_the_same_too(write: Callable[..., Path]) -> None:
    logged = records(write(900))
    middle = next(i for i, r in enumerate(logged) if i and r.scaler is not None)
    piece = logged[middle:]
    assert len(piece) == 900 - decision_log.SNAPSHOT_EVERY
    assert [decided for _, decided in decided_again(piece)] == [r.decided for r in piece]


def test_other_rules_give_other_decisions(write: Callable[..., Path]) -> None:
    logged = records(write(300))
    assert logged[0].scaler is not None
    logged[0].scaler.obey(FleetRules(models={"chat": replace(RULES, utilization=0.1)}))
    assert [d for _, d in decided_again(logged)] != [r.decided for r in logged]


def test_the_last_digits_of_a_quantity_are_no_difference_and_all_else_is(write: Callable[..., Path]) -> None:
    """Two processors, or two builds of LAPACK, round a fit in their own ways."""
    record = records(write(300))[-1]
    name = "chat"
    logged = record.decided[name]

    def differs(**fields: Any) -> bool:
        return differing(record, {**record.decided, name: replace(logged, **fields)}) == [name]

    assert not differs(inputs={key: value * (1 + 1e-12) for key, value in logged.inputs.items()})
    assert differs(inputs={**logged.inputs, "demand": logged.inputs["demand"] * 1.001})
    assert differs(inputs={key: value for key, value in logged.inputs.items() if key != "demand"})
    assert differs(desired=logged.desired + 1)
    assert differs(wish="another")
    assert differs(ready_at=1.0)
    assert differing(record, {}) == list(record.decided)


def test_what_follows_a_gap_waits_for_the_next_snapshot(write: Callable[..., Path]) -> None:
    lines = write(700).read_text().splitlines()
    assert "scaler" in json.loads(lines[600])
    found, num_unreadable = read([*lines[:100], lines[100][:50], *lines[102:]])
    assert num_unreadable == 1
    assert [r.number for r in found] == [*range(100), *range(102, 700)]
    first, second = stretches(found)
    assert [r.number for r in first] == [*range(100)]
    assert [r.number for r in second] == [*range(600, 700)]
    for stretch in (first, second):
        assert [decided for _, decided in decided_again(stretch)] == [r.decided for r in stretch]
    assert list(stretches(records_of(lines[1:50]))) == []


def test_a_stretch_ends_where_time_jumps_or_models_change(write: Callable[..., Path]) -> None:
    logged = records_of(write(100).read_text().splitlines())
    for jump in (-3600.0, 0.0, 60.0):
        later = [replace(r, time=r.time + (jump if r.number >= 50 else 0.0) - (jump == 0.0) * (r.number == 50)) for r in logged]
        assert [len(stretch) for stretch in stretches(later)] == [50]
    gone = [replace(r, seen=replace(r.seen, models={})) if r.number >= 70 else r for r in logged]
    assert [len(stretch) for stretch in stretches(gone)] == [70]


def test_keys_that_other_versions_and_readers_know_stay(write: Callable[..., Path]) -> None:
    """In the code a decision has a `wish` and a model's autoscaler `rules`; their key in the log is `rule`."""
    first = json.loads(write(1).read_text().splitlines()[0])
    (record,) = records_of([json.dumps(first)])
    assert first["decided"]["chat"]["rule"] == record.decided["chat"].wish == row_of(record.decided["chat"])["rule"]
    assert "wish" not in first["decided"]["chat"]
    assert record.scaler is not None
    record.scaler.observe(record.seen)
    snapshot = json.loads(decision_log._SCALER.dump_json(record.scaler, by_alias=True))
    assert snapshot["_models"]["chat"]["rule"] == snapshot["rules"]["models"]["chat"]


def records_of(lines: list[str]) -> list[Record]:
    return read(lines)[0]


def test_a_snapshot_holds_what_is_a_default_too(write: Callable[..., Path]) -> None:
    """The reader may be a later version, with other defaults."""
    first = json.loads(write(1).read_text().splitlines()[0])
    assert (
        first["scaler"]["rules"]["models"]["chat"]["utilization"] == RULES.utilization == ScalingRules(slo=RULES.slo).utilization
    )


def test_an_export_begins_with_the_last_snapshot_before_the_time_asked_for(write: Callable[..., Path]) -> None:
    path = write(700)

    def numbers(since: float) -> list[int]:
        return [r.number for r in records_of(gzip.decompress(export(path, since)).decode().splitlines())]

    assert numbers(START) == list(range(700))
    assert numbers(START + 599) == list(range(700))
    assert numbers(START + 650) == list(range(600, 700))


def test_old_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "MAX_FILE_BYTES", 30_000)
    path = tmp_path / "log"
    log, plant, scaler = DecisionLog(path), Plant(running=2), FleetScaler(FleetRules(models={"chat": RULES}))
    for _ in range(300):
        seen = plant.see(plant.load(10.0))
        log.observe(scaler, FleetObservation(at=plant.at, models={"chat": seen}), time=START + plant.at)

    def is_written() -> bool:
        with suppress(FileNotFoundError):  # in the middle of a rotation
            return '"number":299' in path.read_text()
        return False

    wait_until(is_written, limit_s=10, what="the last written")
    assert len(files(path)) == decision_log.MAX_FILES
    assert sum(file.stat().st_size for file in files(path)) < 5 * 30_000


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    log = DecisionLog(folder / "log")
    folder.rmdir()
    scaler, plant = FleetScaler(FleetRules(models={"chat": RULES})), Plant()
    for _ in range(3):
        seen = plant.see(plant.load(10.0))
        assert log.observe(scaler, FleetObservation(at=plant.at, models={"chat": seen}), time=START)["chat"].desired == 1
    wait_until(lambda: "are not logged while" in caplog.text, limit_s=10, what="said")
    assert caplog.text.count("are not logged while") == 1


def test_outside_ray_nothing_is_written() -> None:
    assert decision_log.log_path("chat") is None
    plant = Plant()
    seen = plant.see(plant.load(1.0))
    scaler = FleetScaler(FleetRules(models={"chat": RULES}))
    assert DecisionLog(None).observe(scaler, FleetObservation(at=1.0, models={"chat": seen}), time=START)["chat"].desired == 1

"""What `make demo-autoscaling` says while its fleet starts."""

import re
import sys
from pathlib import Path

import pytest

from serve_app.batch.fleet_process import FleetProcess
from tools import demo_autoscaling


def with_fleet(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let the demo start this Python program in place of a fleet."""
    monkeypatch.setattr(
        demo_autoscaling, "FleetProcess", lambda config: FleetProcess(config, command=(sys.executable, "-c", program))
    )


def test_a_fleet_that_does_not_start_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_fleet(monkeypatch, "import sys; sys.exit('error: no memory')")
    assert demo_autoscaling.main(["--out", str(tmp_path / "run")]) == 1
    error = f"error: the fleet of {demo_autoscaling.CONFIG} ended with status 1: no memory\n"
    assert capsys.readouterr().err == error


def test_a_long_start_says_from_time_to_time_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_autoscaling, "TELL_S", 0.1)
    monkeypatch.setattr(demo_autoscaling, "POLL_S", 0.2)
    with_fleet(monkeypatch, "import time; time.sleep(1)")
    assert demo_autoscaling.main(["--out", str(tmp_path / "run")]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "starting the fleet of examples/autoscaling.yaml, about a minute"
    assert re.fullmatch(r"  it is starting \(\d+ s\)", second)

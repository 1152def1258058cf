"""`make demo-autoscaling` reports while its fleet starts."""

import sys
from functools import partial
from pathlib import Path

import pytest

from serve_app.batch.fleet_process import FleetProcess
from tools import demo_autoscaling


def test_a_fleet_that_does_not_start_is_one_sentence_after_what_it_said_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = "import sys; print('  ingress 1 starting', flush=True); sys.exit('error: no memory')"
    monkeypatch.setattr(demo_autoscaling, "FleetProcess", partial(FleetProcess, command=(sys.executable, "-c", child)))
    assert demo_autoscaling.main(["--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr() == (
        "starting the fleet of examples/autoscaling.yaml, about a minute\n  ingress 1 starting\n",
        f"error: the fleet of {demo_autoscaling.CONFIG} ended with status 1: no memory\n",
    )

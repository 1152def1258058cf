"""The benchmark of batches beside chats: which runs its figures are of."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import batch_interference
from benchmarks.batch_interference import SIDES, pooled
from loadtest.judge.stats import Floats


class RunOfSeed:
    """In place of a run's records: the only latency is the seed, which the folder's name ends with."""

    def __init__(self, folder: Path, _: float) -> None:
        self._seed = float(folder.name.rpartition("-")[2])

    def latencies_s(self, _: str) -> Floats:
        return np.array([self._seed])


def test_runs_that_an_earlier_measurement_left_in_the_folder_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_interference, "Run", RunOfSeed)
    for side in SIDES:
        for seed in (0, 1, 2, 3):
            (tmp_path / f"{side.replace(' ', '-')}-{seed}").mkdir()
    (tmp_path / "rates.json").write_text(json.dumps({"speeds": {side: [1.0] for side in SIDES}, "cores": {}, "seeds": [2, 3]}))
    found = pooled([tmp_path])["latencies"]
    assert {side: list(found[side]["ttft"]) for side in SIDES} == {side: [2.0, 3.0] for side in SIDES}

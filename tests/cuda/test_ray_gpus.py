"""Engines see the GPUs that Ray gave to their replica, and no two replicas the same."""

from pathlib import Path

from tests.cuda.conftest import run


def test_each_engine_gets_its_replicas_gpus(tmp_path: Path) -> None:
    """An ingress holds none: Ray leaves its variable alone, and `VLLM_TARGET_DEVICE` keeps it from looking for any."""
    assert run("cuda", "tests.cuda.ray_gpus", str(tmp_path), env={}) == {"first": "0,1", "second": "2,3", "ingress": None}

"""Engines see the GPUs that Ray gave to their replica, and no two replicas the same."""

import tempfile

from tests.cuda.conftest import run


def test_each_engine_gets_its_replicas_gpus() -> None:
    """An ingress holds none: Ray leaves its variable alone, and `VLLM_TARGET_DEVICE` keeps it from looking for any."""
    with tempfile.TemporaryDirectory() as folder:  # not pytest's, whose long name leaves no room for the names of Ray's sockets
        told = run("cuda", "tests.cuda.ray_gpus", folder, env={})
    assert told.pop("ingress") is None
    assert sorted(told.values()) == ["0,1", "2,3"]

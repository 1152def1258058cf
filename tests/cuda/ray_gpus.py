"""This script prints the GPUs that Ray gives to the processes of an engine and of an ingress, as JSON on the last line.

    python -m tests.cuda.ray_gpus TEMP_DIR

Ray is told that the machine has four. It counts GPUs and names them, and asks no driver.
"""

import json
import sys
from typing import Any

import ray

from serve_app.config import ModelSettings, inherited_environment
from serve_app.engine_args import INGRESS_ENVIRONMENT, PROCESS_ENVIRONMENT, engine_environment

MODEL = ModelSettings(name="m", model="/m", device="cuda", gpus_per_replica=2)
OPTIONS: dict[str, Any] = {"num_cpus": 0}


class Supervisor:
    """The environment that a replica's supervisor gives its engine core."""

    def gpus(self) -> str | None:
        return engine_environment(MODEL, inherited_environment()).get("CUDA_VISIBLE_DEVICES")


class Ingress:
    def gpus(self) -> str | None:
        return inherited_environment().get("CUDA_VISIBLE_DEVICES")


def main(temp_dir: str) -> None:
    ray.init(address="local", num_cpus=1, num_gpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=temp_dir)
    replica = ray.remote(Supervisor).options(num_gpus=2, runtime_env={"env_vars": PROCESS_ENVIRONMENT}, **OPTIONS)
    ingress = ray.remote(Ingress).options(runtime_env={"env_vars": INGRESS_ENVIRONMENT}, **OPTIONS)
    actors = {"first": replica.remote(), "second": replica.remote(), "ingress": ingress.remote()}
    told = {name: ray.get(actor.gpus.remote()) for name, actor in actors.items()}
    ray.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])

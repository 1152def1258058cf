"""What Ray is told of the machine, when `serve-app up` starts it."""

from typing import Any

import pytest

from serve_app.cli.cluster import simulated_gpus
from serve_app.config import parse_settings

SIMULATED = {"model": "/m", "simulated": {"profile": "a10g-llama-8b"}, "gpus_per_replica": 2, "replicas": {"min": 1, "max": 3}}
REAL = {"model": "/m", "device": "cuda", "gpus_per_replica": 1}


@pytest.mark.parametrize(
    ("models", "autoscaling", "told"),
    [
        pytest.param({"a": SIMULATED, "b": SIMULATED}, {}, 12, id="as-many-as-all-may-hold"),
        pytest.param({"a": SIMULATED, "b": SIMULATED}, {"max_gpus": 5}, 5, id="as-many-as-they-share"),
        pytest.param({"a": SIMULATED, "b": {"model": "/m"}}, {}, 6, id="beside-a-model-on-cpu"),
        pytest.param({"a": SIMULATED, "b": REAL}, {}, None, id="a-real-model-needs-real-ones"),
        pytest.param({"a": {"model": "/m"}}, {}, None, id="nobody-holds-any"),
    ],
)
def test_gpus_are_simulated_where_all_models_that_hold_some_are(
    models: dict[str, Any], autoscaling: dict[str, Any], told: int | None
) -> None:
    assert simulated_gpus(parse_settings({"models": models, "autoscaling": autoscaling})) == told

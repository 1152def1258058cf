"""`serve-app fit` names the sizes of pods that the chart renders."""

import pytest

from serve_app.sizing.nodes import pod_sizes
from tests.chart.render import models, render


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_fit_and_chart_give_a_replica_the_same_pod(num_gpus: int) -> None:
    made = render(
        models({"name": "m", "model": "embedded:smollm2-135m-instruct", "device": "cuda", "gpus_per_replica": num_gpus})
    )
    pod = made.pod("model")
    resources = made.container("model")["resources"]
    (shm,) = (
        volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"
    )
    sizes = pod_sizes(num_gpus)
    assert (resources["requests"]["cpu"], resources["limits"]["cpu"]) == (str(sizes.cpu_request), str(sizes.cpu_limit))
    assert resources["requests"]["memory"] == f"{sizes.memory_request_gib}Gi"
    assert resources["limits"]["memory"] == f"{sizes.memory_limit_gib}Gi"
    assert shm == f"{sizes.shm_gib}Gi"

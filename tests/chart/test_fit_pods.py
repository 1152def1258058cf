"""`serve-app fit` names the sizes of pods that the chart renders."""

import pytest

from serve_app.sizing.nodes import pod_sizes
from tests.chart.render import at, merged, models, render


@pytest.mark.parametrize(("num_gpus", "checkpoint_gib"), [(1, 0), (2, 0), (4, 0), (8, 0), (1, 15), (1, 18), (4, 132)])
def test_fit_and_chart_give_a_replica_the_same_pod(num_gpus: int, checkpoint_gib: int) -> None:
    model = {"name": "m", "model": "embedded:smollm2-135m-instruct", "device": "cuda", "gpus_per_replica": num_gpus}
    size = f"{checkpoint_gib}Gi" if checkpoint_gib else ""
    made = render(merged(models(model), at("modelPods.checkpointSize", size)))
    pod = made.pod("model")
    resources = made.container("model")["resources"]
    (shm,) = (
        volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"
    )
    sizes = pod_sizes(num_gpus)
    assert (resources["requests"]["cpu"], resources["limits"]["cpu"]) == (str(sizes.cpu_request), str(sizes.cpu_limit))
    assert resources["requests"]["memory"] == f"{sizes.memory_request_gib}Gi"
    assert resources["limits"]["memory"] == f"{sizes.limit_of_chart_gib(checkpoint_gib)}Gi"
    assert shm == f"{sizes.shm_gib}Gi"

"""`serve-app fit` names the sizes of pods that the chart renders."""

from serve_app.sizing.nodes import pod_sizes
from tests.chart.render import Rendered, models, render

CHECKPOINTS_GIB = (0, 1, 9, 15, 18, 27, 44, 63, 132, 221, 400)
"""Multiples of 9 are whole tenths of the limit: a rounding error would add a GiB."""


def _sizes(made: Rendered, group: str) -> dict[str, str]:
    pod, resources = made.pod(group), made.container(group)["resources"]
    (shm,) = (v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory")
    return {f"{kind} {name}": resources[kind][name] for kind in ("requests", "limits") for name in ("cpu", "memory")} | {
        "shm": shm
    }


def test_fit_and_chart_give_a_replica_the_same_pod() -> None:
    """Both have the rule: templates cannot call Python, and fit runs without the chart."""
    asked = {f"m{num_gpus}-{gib}": (num_gpus, gib, 0.0) for num_gpus in (1, 2, 4, 8) for gib in CHECKPOINTS_GIB}
    asked |= {f"kv{number}": (2, gib, kv) for number, (gib, kv) in enumerate([(0, 64.0), (132, 64.0), (0, 0.5)])}
    of_fit = {}
    for name, (num_gpus, gib, kv) in asked.items():
        sizes = pod_sizes(num_gpus, kv)
        of_fit[name] = {
            "requests cpu": str(sizes.cpu_request),
            "requests memory": f"{sizes.memory_request_gib}Gi",
            "limits cpu": str(sizes.cpu_limit),
            "limits memory": f"{sizes.limit_of_chart_gib(gib)}Gi",
            "shm": f"{sizes.shm_gib}Gi",
        }
    made = render(
        models(
            *(
                {
                    "name": name,
                    "model": "embedded:smollm2-135m-instruct",
                    "device": "cuda",
                    "gpus_per_replica": num_gpus,
                    "pods": {"checkpointSize": f"{gib}Gi" if gib else ""},
                    **({"kv": {"offload_gib": kv}} if kv else {}),
                }
                for name, (num_gpus, gib, kv) in asked.items()
            )
        )
    )
    assert {name: _sizes(made, f"model-{name}") for name in asked} == of_fit

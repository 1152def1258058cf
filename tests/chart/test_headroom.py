"""Headroom pods hold a node for a model's next pod, are in every respect where it could be, and give way to it."""

from typing import Any

from tests.chart.places import CUDA, TOLERATION
from tests.chart.render import Object, Rendered, at, merged, models, render

SECOND = CUDA | {"name": "n"}
CPU = {"name": "c", "model": "embedded:smollm2-135m-instruct"}
BOUNDS = {"replicas": {"min": 2, "max": 4}}
PODS = {
    "headroom": {"pods": 2},
    "nodeSelector": {"pool": "gpu"},
    "tolerations": TOLERATION,
    "runtimeClassName": "nvidia",
    "topologySpread": "DoNotSchedule",
    "resources": {"requests": {"cpu": "1", "memory": "5Gi"}},
}
ON = merged(models(CUDA | BOUNDS), at("modelPods", PODS), at("priorityClasses.create", True))
SHARED = ("nodeSelector", "tolerations", "runtimeClassName", "topologySpreadConstraints", "affinity", "securityContext")


def template(rendered: Rendered, name: str = "headroom-m") -> Object:
    return dict(rendered.of("Deployment")[name]["spec"]["template"])


def labels(found: Object) -> dict[str, str]:
    return dict(found["metadata"]["labels"])


def test_a_headroom_pod_asks_for_what_the_models_pod_asks_for_and_may_go_where_it_may() -> None:
    made = render(ON)
    headroom, worker = template(made)["spec"], made.pod("model")
    assert {key: headroom[key] for key in SHARED} == {key: worker[key] for key in SHARED}
    (container,) = headroom["containers"]
    for key in ("image", "imagePullPolicy", "resources", "securityContext"):
        assert container[key] == made.container("model")[key]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2


def test_it_gives_way_at_once_and_takes_nobodys_place() -> None:
    made = render(ON)
    classes = {o["metadata"]["name"]: o for o in made.of("PriorityClass").values()}
    own, workers = (classes[pod["priorityClassName"]] for pod in (template(made)["spec"], made.pod("model")))
    assert own["value"] == -10 < workers["value"]
    assert own["preemptionPolicy"] == "Never"
    assert "preemptionPolicy" not in workers
    assert template(made)["spec"]["terminationGracePeriodSeconds"] == 0


def test_an_existing_class_is_used_and_none_is_made() -> None:
    made = render(merged(ON, at("modelPods.headroom.priorityClassName", "low")))
    assert template(made)["spec"]["priorityClassName"] == "low"
    assert {*made.of("PriorityClass")} == {"head.serving", "worker.serving"}


def test_nothing_is_made_unless_asked_for() -> None:
    made = render(at("priorityClasses.create", True))
    assert made.of("Deployment") == {}
    assert {*made.of("PriorityClass")} == {"head.serving", "worker.serving"}


def test_each_model_has_its_own() -> None:
    made = render(merged(models(CUDA, SECOND | {"pods": {"headroom": {"pods": 3}}}), at("priorityClasses.create", True)))
    assert {name: o["spec"]["replicas"] for name, o in made.of("Deployment").items()} == {"headroom-n": 3}


def test_it_is_no_pod_of_the_model_to_services_budgets_and_monitors() -> None:
    made = render(merged(ON, at("monitoring.podMonitors", True)))
    found = labels(template(made))
    selectors = [o["spec"]["selector"] for kind in ("Service", "PodDisruptionBudget") for o in made.of(kind).values()]
    assert len(selectors) == 2
    assert [s for s in selectors if s.get("matchLabels", s).items() <= found.items()] == []
    monitored = [o["spec"]["selector"]["matchExpressions"][0]["values"] for o in made.of("PodMonitor").values()]
    assert [values for values in monitored if "headroom" in values] == []


def test_one_node_has_one_pod_of_all_models_on_cuda_headroom_included() -> None:
    made = render(merged(ON, models(CUDA, SECOND, CPU)))

    def keeps_apart(pod: Object) -> dict[str, str]:
        (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        return dict(term["labelSelector"]["matchLabels"])

    alone: list[Any] = [
        *(made.group(g)["template"] for g in ("model-m", "model-n")),
        template(made),
        template(made, "headroom-n"),
    ]
    assert all(keeps_apart(one["spec"]).items() <= labels(other).items() for one in alone for other in alone)
    on_cpu = made.group("model-c")["template"]
    assert "affinity" not in on_cpu["spec"]
    assert not keeps_apart(alone[0]["spec"]).items() <= labels(on_cpu).items()

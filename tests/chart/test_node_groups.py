"""A model over several nodes has a pod for each node of each replica: what a pod has, where it goes, and who reaches it."""

import re
from typing import Any

import pytest
import yaml

from tests.chart.places import HUB, LOADED, NODES, TOLERATION
from tests.chart.render import CHART, Object, Refused, at, merged, models, render
from tests.chart.test_network import CLIENT, HEAD, INGRESS, NEIGHBOUR, OTHER_RELEASE, End, ours, reaches
from tests.config.helpers import refusal

WIDE = {"name": "wide", **NODES}
OTHER = WIDE | {"name": "other"}
NARROW = {"name": "narrow", "model": "/opt/m", "device": "cuda", "gpus_per_replica": 8}
SIMULATED = {"device": "cpu", "simulated": {"profile": "a10g-llama-8b"}}
LOW = at("modelPods.headroom", {"pods": 3, "priorityClassName": "low"})
RACK = at("modelPods.nodesWithin", "example.com/rack")


def test_each_pod_is_the_pod_of_an_engine_on_one_node_with_as_many_gpus() -> None:
    wide, narrow = render(models(WIDE)), render(models(NARROW))
    assert wide.container("model")["resources"] == narrow.container("model")["resources"]
    assert wide.pod("model")["volumes"] == narrow.pod("model")["volumes"]
    assert wide.container("model")["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert wide.group("model")["rayStartParams"]["num-gpus"] == "8"


@pytest.mark.parametrize(
    ("replicas", "pods"), [({"min": 1, "max": 1}, 2), ({"min": 2, "max": 4}, 4), ({"min": 1, "max": 4, "initial": 3}, 6)]
)
def test_a_new_ray_cluster_starts_with_the_pods_of_whole_replicas(replicas: dict[str, int], pods: int) -> None:
    group = render(models(WIDE | {"replicas": replicas})).group("model")
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (pods, 0, 10000)
    assert "numOfHosts" not in group, "KubeRay would delete the pods of a set together, and Ray knows no sets"


def test_a_model_that_is_not_served_has_no_pods() -> None:
    assert render(models(WIDE | {"served": False}, NARROW)).group("model-wide")["replicas"] == 0


def test_a_pod_is_ready_when_the_engine_serves_and_those_of_a_simulated_engine_when_ray_is() -> None:
    probes = [render(models(WIDE | more)).container("model")["readinessProbe"] for more in ({}, SIMULATED)]
    assert [probe.get("tcpSocket") for probe in probes] == [{"port": "link"}, None]
    assert probes[1]["httpGet"] == {"path": "/api/healthz", "port": 52365}


def near(pod: Object) -> dict[str, str]:
    (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "example.com/rack"
    return dict(term["labelSelector"]["matchLabels"])


def test_all_pods_of_a_model_and_its_headroom_are_within_one_rack_and_those_of_others_anywhere() -> None:
    made = render(merged(models(WIDE, OTHER, NARROW), RACK, LOW))
    pods = {
        "wide": [made.group("model-wide")["template"], made.of("Deployment")["headroom-wide"]["spec"]["template"]],
        "other": [made.group("model-other")["template"], made.of("Deployment")["headroom-other"]["spec"]["template"]],
    }
    for name, templates in pods.items():
        for template in templates:
            selector = near(template["spec"]).items()
            found = {n: [selector <= t["metadata"]["labels"].items() for t in ts] for n, ts in pods.items()}
            assert found == {n: [n == name] * 2 for n in pods}
    assert "podAffinity" not in made.pod("model-narrow")["affinity"]


def test_an_affinity_of_its_own_stays() -> None:
    own: dict[str, Any] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    assert (
        render(merged(models(WIDE), RACK, at("modelPods.affinity", own))).pod("model")["affinity"]["podAffinity"]
        == own["podAffinity"]
    )


def test_pods_of_one_engine_are_not_spread_over_zones() -> None:
    made = render(models(WIDE, NARROW))
    keys = [[c["topologyKey"] for c in made.pod(g)["topologySpreadConstraints"]] for g in ("model-wide", "model-narrow")]
    assert keys == [["kubernetes.io/hostname"], ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]]


def test_headroom_holds_the_nodes_of_whole_replicas() -> None:
    made = render(merged(models(WIDE, NARROW), LOW, at("modelPods.tolerations", TOLERATION)))
    assert {name: o["spec"]["replicas"] for name, o in made.of("Deployment").items()} == {
        "headroom-wide": 6,
        "headroom-narrow": 3,
    }


@pytest.mark.parametrize(
    ("least", "keep_last", "budget"), [(1, False, None), (2, False, 3), (3, False, 5), (1, True, 3)], ids=str
)
def test_a_voluntary_disruption_ends_one_replica_at_a_time(least: int, keep_last: bool, budget: int | None) -> None:
    made = render(merged(models(WIDE | {"replicas": {"min": least, "max": 4}}), at("podDisruptionBudgets.keepLast", keep_last)))
    found = made.of("PodDisruptionBudget").get("model-wide")
    assert (None if found is None else found["spec"]["minAvailable"]) == budget


def pod_of(group: str) -> End:
    return End(labels=(*ours("model").labels, ("ray.io/group", f"model-{group}")))


def test_the_pods_of_one_model_reach_each_other_at_any_port_and_nobody_else_does() -> None:
    made = render(models(WIDE, OTHER, NARROW))
    wide = pod_of("wide")
    ports = (1024, 29500, 45678, 65535)
    assert [reaches(made, wide, wide, port) for port in ports] == [True] * 4
    assert not reaches(made, wide, wide, 80)
    strangers = (CLIENT, NEIGHBOUR, OTHER_RELEASE, HEAD, INGRESS, pod_of("other"), pod_of("narrow"))
    assert [end for end in strangers if reaches(made, end, wide, 29500) or reaches(made, wide, end, 29500)] == []
    assert not reaches(made, pod_of("narrow"), pod_of("narrow"), 29500)


def test_the_pods_of_a_simulated_model_have_no_ports_open_between_them() -> None:
    made = render(models(WIDE | SIMULATED, OTHER))
    found = {group: reaches(made, pod_of(group), pod_of(group), 29500) for group in ("wide", "other")}
    assert found == {"wide": False, "other": True}


@pytest.mark.parametrize(
    ("rule", "keys"),
    [
        ("nodes", {"nodes": 3}),
        ("nodes", {"device": "cpu", "gpus_per_replica": 0}),
        ("nodes", {"replicas_per_node": 1}),
        ("stages", {"engine_args": {"pipeline_parallel_size": 3}}),
        ("stages", {"engine_args": {"pipeline_parallel_size": 2}, **SIMULATED}),
        ("stages", {"engine_args": {"pipeline_parallel_size": 2}, "nodes": 1, "gpus_per_replica": 8, "kv": {"transfer": "nixl"}}),
    ],
    ids=str,
)
def test_what_cannot_be_placed_is_refused_in_the_words_of_serve_app_check(rule: str, keys: dict[str, Any]) -> None:
    said = refusal(models={"wide": NODES | keys})
    with pytest.raises(Refused) as refused:
        render(models(WIDE | keys))
    message = " ".join(str(refused.value).split())
    path, _, rest = said.partition(": ")
    assert f"{rule}-cannot-be: config.{path} {rest}" in message


@pytest.mark.parametrize(
    ("wrong", "shown", "right"),
    [
        (
            merged(models(WIDE), at("modelPods.gpusPerNode", 12)),
            "config.models.wide.gpus_per_replica is 16 on 2 nodes and modelPods.gpusPerNode is 12",
            merged(models(WIDE), at("modelPods.gpusPerNode", 8)),
        ),
        (
            merged(models(WIDE), at("modelPods.gpusPerNode", 16)),
            "config.models.wide.gpus_per_replica is 16 on 2 nodes, modelPods.gpusPerNode is 16",
            merged(models(WIDE), at("modelPods", {"gpusPerNode": 16, "onePerNode": False})),
        ),
        (
            models(WIDE | {"replicas": {"max": 2501}}),
            "max is 2501, but a worker group has 10000 pods at most, and an update may hold 4 for each replica: set max to 2500",
            models(WIDE | {"replicas": {"max": 2500}}),
        ),
        (
            merged(models(WIDE), at("modelPods.nodesWithin", "kubernetes.io/hostname")),
            "modelPods.nodesWithin is kubernetes.io/hostname and modelPods.onePerNode is true",
            merged(models(WIDE), at("modelPods", {"nodesWithin": "kubernetes.io/hostname", "onePerNode": False})),
        ),
        (
            models(WIDE | {"pods": {"nodesWithin": "kubernetes.io/hostname"}}),
            "config.models.wide.pods.nodesWithin is kubernetes.io/hostname and modelPods.onePerNode is true",
            models(WIDE | {"pods": {"nodesWithin": "example.com/rack"}}),
        ),
        (
            merged(models(NARROW | {"gpus_per_replica": 16}), at("modelPods.gpusPerNode", 8)),
            "gpus_per_replica is 16 and modelPods.gpusPerNode is 8: no node has the GPUs of a pod; set nodes: 2, or use larger nodes",
            merged(models(WIDE), at("modelPods.gpusPerNode", 8)),
        ),
    ],
)
def test_rules_on_gpus_and_replicas_count_pods(wrong: dict[str, Any], shown: str, right: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        render(wrong)
    assert shown in " ".join(str(refused.value).split())
    render(right)


def test_a_model_on_one_node_is_not_concerned() -> None:
    assert render(models(NARROW | {"nodes": 1})).pod("model") == render(merged(models(NARROW), RACK)).pod("model")


def test_the_example_of_the_readme_is_rendered() -> None:
    (example,) = re.findall(
        r"^## Models over several nodes$.*?^```yaml\n(.*?)^```$", (CHART / "README.md").read_text(), re.M | re.S
    )
    made = render(merged(yaml.safe_load(example), LOADED, at("weights.downloads", [HUB | {"path": "large"}])))
    assert (
        made.container("model-large")["resources"]["limits"] | {"vpc.amazonaws.com/efa": 32, "nvidia.com/gpu": 8}
        == (made.container("model-large")["resources"]["limits"])
    )
    assert made.group("model-large")["replicas"] == 2

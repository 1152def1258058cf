"""Models that sleep share the pods of one of them: what such a pod has, who reaches its engines, and how many pods Ray brings."""

import re
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil

from tests.chart.places import HUB, LOADED, S3
from tests.chart.render import CHART, Rendered, at, merged, render
from tests.chart.sleep_rows import CHAT, CODE, LEVEL_2, SIMULATED, TALK, sleeping
from tests.chart.test_check_hook import checked
from tests.chart.test_network import CLIENT, INGRESS, MODEL, reaches
from tests.test_application import deployments

SHARED = sleeping(CHAT, CODE, TALK)


def test_one_worker_group_has_the_engines_of_all_its_models() -> None:
    made = render(SHARED)
    assert [group["groupName"] for group in made.cluster["workerGroupSpecs"]] == ["ingress", "model-chat"]
    parameters = made.group("model-chat")["rayStartParams"]
    assert (parameters["num-cpus"], parameters["num-gpus"]) == ("3", "1")
    assert parameters["resources"] == '"{\\"serve_app_model_chat\\": 3}"'
    assert made.container("model-chat")["resources"]["limits"]["nvidia.com/gpu"] == 1
    for model in made.config["models"].values():
        assert model["resources"] == {"serve_app_model_chat": 1}
        assert not {"podsOf", "guests", "pods"} & model.keys()


def test_models_that_come_and_go_leave_the_worker_group_as_it_is() -> None:
    assert render(sleeping(CHAT, CODE)).cluster["workerGroupSpecs"] == render(SHARED).cluster["workerGroupSpecs"]


def test_the_memory_is_that_of_all_engines_and_of_the_weights_that_sleep() -> None:
    made = render(SHARED)
    resources = made.container("model-chat")["resources"]
    assert (resources["requests"]["memory"], resources["limits"]["memory"]) == (
        "76Gi",
        "104Gi",
    )  # 4 + 3 x 8 + 48, 8 + 3 x 16 + 48
    (shm,) = (v["emptyDir"]["sizeLimit"] for v in made.pod("model-chat")["volumes"] if v["name"] == "shm")
    assert shm == "5Gi"
    dropped = render(sleeping(CHAT | LEVEL_2 | {"pods": {}}, CODE | LEVEL_2)).container("model-chat")["resources"]
    assert (dropped["requests"]["memory"], dropped["limits"]["memory"]) == ("28Gi", "56Gi")


def test_each_engine_has_a_port_of_its_own_that_ingresses_reach() -> None:
    made = render(merged(SHARED, at("config.protocol.port", 8030)))
    ports = {port["name"]: port["containerPort"] for port in made.container("model-chat")["ports"]}
    assert ports == {"link": 8030, "link-2": 8031, "link-3": 8032, "metrics": 8080}
    assert [reaches(made, INGRESS, MODEL, port) for port in (8030, 8031, 8032, 8033)] == [True, True, True, False]
    assert not any(reaches(made, CLIENT, MODEL, port) for port in ports.values())


def test_a_pod_is_ready_when_ray_is_because_any_of_its_engines_may_be_gone() -> None:
    assert render(SHARED).container("model-chat")["readinessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}


def test_a_pod_waits_for_the_weights_of_all_its_models() -> None:
    downloads = [HUB | {"path": "a"}, HUB | {"path": "b"}, S3 | {"path": "c"}]
    values = merged(
        sleeping(CHAT | {"model": "/models/a"}, CODE | {"model": "/models/b"}), LOADED, at("weights.downloads", downloads)
    )
    waiting = yaml.safe_dump(render(values).pod("model-chat")["initContainers"])
    assert [path in waiting for path in ("/models/a", "/models/b", "/models/c")] == [True, True, False]


def test_headroom_and_budget_are_those_of_the_pods() -> None:
    kept = {"replicas": {"min": 1, "max": 1}}
    several = [CHAT | kept | {"pods": {"asleepSize": "48Gi", "headroom": {"pods": 1, "priorityClassName": "low"}}}]
    several += [CODE | kept | {"name": f"code-{number}"} for number in range(5)]
    made = render(sleeping(*several))
    assert made.of("Deployment").keys() == {"headroom-chat"}
    assert made.group("model-chat")["replicas"] == 2
    assert made.of("PodDisruptionBudget")["model-chat"]["spec"]["minAvailable"] == 1
    assert [name for name in made.of("PodDisruptionBudget") if "code" in name] == []


def launched(made: Rendered, names: list[str]) -> dict[str, int]:
    """Return the pods that Ray's autoscaler asks for when a replica of each of these models waits and there is no pod."""
    types = _derive_autoscaling_config_from_ray_cr({"metadata": {"name": "demo", "namespace": "n"}, "spec": made.cluster})
    nodes = {
        name: NodeTypeConfig(name, kind["min_workers"], kind["max_workers"], resources=kind["resources"])
        for name, kind in types["available_node_types"].items()
        if name != "headgroup"
    }
    asked = []
    for name in names:
        options: dict[str, Any] = deployments(made.config)[f"replica-{name}"]._replica_config.ray_actor_options
        asked.append({"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]})
    requests = ResourceRequestUtil.group_by_count([ResourceRequestUtil.make(resources) for resources in asked])
    request = SchedulingRequest(disable_launch_config_check=True, node_type_configs=nodes, resource_requests=requests)
    return {launch.instance_type: launch.count for launch in ResourceDemandScheduler(None).schedule(request).to_launch}


def test_ray_brings_one_pod_for_three_engines_and_a_second_for_the_fourth() -> None:
    made = render(sleeping(CHAT, CODE, TALK, TALK | {"name": "more"}))
    assert launched(made, ["chat", "code", "talk"]) == {"model-chat": 1}
    assert launched(made, ["code"]) == {"model-chat": 1}
    assert launched(made, ["chat", "code", "talk", "more"]) == {"model-chat": 2}


def test_serve_app_check_takes_the_configuration(tmp_path: Path) -> None:
    code, output = checked(render(SHARED), tmp_path)
    assert code == 0, output


def test_simulated_models_that_sleep_keep_no_weights_in_memory() -> None:
    made = render(sleeping(CHAT | SIMULATED | {"pods": {}}, CODE | SIMULATED))
    assert made.group("model-chat")["rayStartParams"]["num-gpus"] == "1"


def test_the_example_of_the_readme_is_rendered() -> None:
    (example,) = re.findall(
        r"^## Models that share a GPU$.*?^```yaml\n(.*?)^```$", (CHART / "README.md").read_text(), re.M | re.S
    )
    downloads = [HUB | {"path": "chat"}, HUB | {"path": "code"}]
    made = render(merged(yaml.safe_load(example), LOADED, at("weights.downloads", downloads)))
    assert [group["groupName"] for group in made.cluster["workerGroupSpecs"]] == ["ingress", "model-chat"]

"""Pods fit their device and number of GPUs: the image, the resources, the GPUs that they see, and the place of compiled code."""

from typing import Any

import pytest

from tests.chart.places import VOID
from tests.chart.render import Object, Rendered, at, merged, models, render

EMBEDDED = "embedded:smollm2-135m-instruct"
CPU = {"name": "cpu", "model": EMBEDDED}
CUDA = {"name": "cuda", "model": "/models/a", "device": "cuda", "gpus_per_replica": 4}
SIMULATED = {"name": "simulated", "model": EMBEDDED, "simulated": {"profile": "a10g-llama-8b"}, "gpus_per_replica": 2}
DOWNLOADS = [
    {"path": "a", "source": "hf:o/n", "revision": "a" * 40},
    {"path": "b", "source": "s3://b/p", "sha256": "b" * 64},
]
MIXED = merged(
    models(CUDA, CPU, SIMULATED),
    at("weights", {"enabled": True, "downloads": DOWNLOADS}),
    at("gcsFaultTolerance.enabled", True),
    at("modelPods.headroom", {"pods": 1, "priorityClassName": "low"}),
)
"""Models of all three kinds, and every kind of pod that the chart makes."""
FOREIGN = {"redis redis": "docker.io/valkey/valkey:8.1.4-bookworm", "weights sync": "public.ecr.aws/aws-cli/aws-cli:2.31.18"}
"""Containers whose images are not ours."""
OF_CUDA = {"model-cuda ray-worker", "headroom-cuda headroom"}
OF_SIMULATED = {"model-simulated ray-worker", "headroom-simulated headroom"}
OF_OTHERS = {
    *("head ray-head", "head autoscaler", "ingress wait-for-weights", "ingress ray-worker", "model-cuda wait-for-weights"),
    *(
        "model-cpu ray-worker",
        "headroom-cpu headroom",
        "test ask",
        "check check",
        "uninstall uninstall",
        "weights download",
        "weights verify",
    ),
}


def containers(made: Rendered) -> dict[str, Object]:
    """Every container of every pod as "POD CONTAINER", KubeRay's autoscaler included; those of weights jobs as "weights COMMAND"."""
    found: dict[str, Object] = {}
    for where, template in made.pod_templates():
        pod = where.partition(" demo")[2].lstrip("- ")
        for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
            name = f"weights {container['command'][2]}" if pod.startswith("weights") else f"{pod} {container['name']}"
            assert name not in found
            found[name] = container
    return found


def images(values: dict[str, Any]) -> dict[str, str]:
    return {name: container["image"] for name, container in containers(render(values)).items()}


def ours(*, cpu: str, cuda: str) -> dict[str, str]:
    return FOREIGN | dict.fromkeys(OF_OTHERS | OF_SIMULATED, cpu) | dict.fromkeys(OF_CUDA, cuda)


def sized(given: dict[str, Any]) -> tuple[Any, Any, str, str]:
    """Return requests, limits, /dev/shm and home of the first model's pods."""
    made = render(given)
    resources = made.container("model")["resources"]
    volumes = {v["name"]: v["emptyDir"]["sizeLimit"] for v in made.pod("model")["volumes"] if "emptyDir" in v}
    limits = {name: amount for name, amount in resources["limits"].items() if "/" not in name}
    return resources["requests"], limits, volumes["shm"], volumes["home"]


def amounts(cpu: Any, memory: str) -> dict[str, Any]:
    return {"cpu": cpu, "memory": memory}


def asked(cpu: Any, memory: str, disk: str = "8Gi") -> dict[str, Any]:
    return amounts(cpu, memory) | {"ephemeral-storage": disk}


def of_model(model: dict[str, Any], **pods: Any) -> dict[str, Any]:
    own = model | {"pods": pods.pop("own", {})}
    return merged(models(own), at("networkPolicies.enabled", False), at("modelPods", pods))


def test_only_pods_of_models_on_cuda_and_their_headroom_run_the_cuda_image() -> None:
    assert images(MIXED) == ours(cpu="localhost/serve-app:0.2.0", cuda="localhost/serve-app:0.2.0-cuda")


D, E = ("sha256:" + letter * 64 for letter in "de")


@pytest.mark.parametrize(
    ("given", "cpu", "cuda"),
    [
        ({"image": {"repository": "h/i", "tag": "2"}}, "h/i:2", "h/i:2-cuda"),
        ({"image": {"tag": "2"}, "cudaImage": {"tag": "3"}}, "localhost/serve-app:2", "localhost/serve-app:3"),
        ({"image": {"tag": "2"}, "cudaImage": {"repository": "h/c"}}, "localhost/serve-app:2", "h/c:2-cuda"),
        ({"image": {"digest": D}, "cudaImage": {"digest": E}}, f"localhost/serve-app@{D}", f"localhost/serve-app@{E}"),
        ({"image": {"digest": D}, "cudaImage": {"tag": "3"}}, f"localhost/serve-app@{D}", "localhost/serve-app:3"),
        ({"image": {"tag": "2"}, "cudaImage": {"digest": E, "tag": "3"}}, "localhost/serve-app:2", f"localhost/serve-app@{E}"),
    ],
    ids=["derived", "tag", "repository", "digests", "digest and tag", "digest over tag"],
)
def test_the_cuda_image_is_derived_but_for_what_is_given(given: dict[str, Any], cpu: str, cuda: str) -> None:
    assert images(merged(MIXED, given)) == ours(cpu=cpu, cuda=cuda)


def test_a_simulated_model_may_try_the_cuda_image() -> None:
    tried = merged(MIXED, at("config.models.simulated.pods.image", "cuda"))
    assert {name for name, image in images(tried).items() if image.endswith("-cuda")} == OF_CUDA | OF_SIMULATED


def test_the_autoscaler_is_left_to_kuberay_which_gives_it_the_heads_image() -> None:
    assert "image" not in render(MIXED).cluster["autoscalerOptions"]


@pytest.mark.parametrize("model", [CPU, SIMULATED, CPU | {"model": "org/name"}], ids=["cpu", "simulated", "hub id"])
def test_pods_on_cpu_are_of_one_size(model: dict[str, Any]) -> None:
    assert sized(of_model(model)) == (asked("500m", "3Gi", "1Gi"), amounts("2", "6Gi"), "1Gi", "8Gi")


@pytest.mark.parametrize(
    ("gpus", "requests", "limits", "shm"),
    [
        (1, asked("3", "12Gi"), amounts("8", "24Gi"), "3Gi"),
        (4, asked("6", "36Gi"), amounts("20", "72Gi"), "6Gi"),
        (8, asked("10", "68Gi"), amounts("36", "136Gi"), "10Gi"),
    ],
)
def test_pods_on_cuda_are_sized_by_their_gpus(gpus: int, requests: Any, limits: Any, shm: str) -> None:
    model = CUDA | {"model": "/opt/m", "gpus_per_replica": gpus}
    assert sized(of_model(model)) == (requests, limits, shm, "8Gi")
    assert render(of_model(model)).container("model")["resources"]["limits"]["nvidia.com/gpu"] == gpus


@pytest.mark.parametrize(
    ("gpus", "size", "memory"),
    [(1, "15Gi", "29Gi"), (4, "15Gi", "72Gi"), (2, "132Gi", "167Gi"), (8, "132Gi", "215Gi"), (8, "140000000000", "213Gi")],
)
def test_the_memory_of_pods_on_cuda_holds_the_checkpoint_that_vllm_reads_ahead(gpus: int, size: str, memory: str) -> None:
    """vLLM reads no more than 90 % of what is free of it: here all but what the processes ask for."""
    model = CUDA | {"model": "/opt/m", "gpus_per_replica": gpus}
    requests, limits, *_ = sized(of_model(model, own={"checkpointSize": size}))
    assert limits["memory"] == memory
    assert requests["memory"] == f"{4 + 8 * gpus}Gi"
    assert sized(of_model(CPU, checkpointSize=size))[1]["memory"] == "6Gi"


@pytest.mark.parametrize(("model", "home"), [("org/name", "200Gi"), (EMBEDDED, "8Gi"), ("/opt/m", "8Gi")])
def test_the_home_has_room_for_weights_that_come_from_a_hub(model: str, home: str) -> None:
    assert sized(of_model(CUDA | {"model": model}))[3] == home


LOCAL = CUDA | {"model": "/opt/m"}
FOUR = (asked("6", "36Gi"), amounts("20", "72Gi"), "6Gi", "8Gi")
"""The resources of a pod with four GPUs."""


@pytest.mark.parametrize(
    ("pods", "requests", "limits", "shm", "home"),
    [
        ({"resources": {"limits": {"memory": "99Gi"}}}, FOUR[0], amounts("20", "99Gi"), "6Gi", "8Gi"),
        ({"resources": {"requests": {"cpu": 1}}}, asked(1, "36Gi"), FOUR[1], "6Gi", "8Gi"),
        ({"shmSize": "16Gi"}, *FOUR[:2], "16Gi", "8Gi"),
        ({"homeSize": "40Gi"}, *FOUR[:3], "40Gi"),
        (
            {
                "resources": {"requests": {"cpu": 1}, "limits": {"cpu": 30}},
                "shmSize": "16Gi",
                "own": {"resources": {"limits": {"cpu": 40}}, "shmSize": ""},
            },
            *(asked(1, "36Gi"), amounts(40, "72Gi"), "6Gi", "8Gi"),
        ),
    ],
    ids=["a limit", "a request", "shm", "home", "its own over all models'"],
)
def test_what_is_given_is_laid_over_what_is_computed(pods: Any, requests: Any, limits: Any, shm: str, home: str) -> None:
    assert sized(of_model(LOCAL, **pods)) == (requests, limits, shm, home)


def test_a_resource_of_another_name_is_added() -> None:
    made = render(of_model(LOCAL, resources={"limits": {"rdma/hca": 1}})).container("model")["resources"]
    assert made["limits"] == amounts("20", "72Gi") | {"nvidia.com/gpu": 4, "rdma/hca": 1}


def test_headroom_asks_for_what_the_computed_sizes_of_its_model_are() -> None:
    made = containers(render(MIXED))
    for name in ("cpu", "cuda", "simulated"):
        assert made[f"headroom-{name} headroom"]["resources"] == made[f"model-{name} ray-worker"]["resources"]


def test_pods_of_a_model_wait_for_all_weights_that_the_model_names_and_for_no_others() -> None:
    folders = ("a", "a-draft", "adapter", "b")
    downloads = [{"path": path, "source": "hf:o/n", "revision": "a" * 40} for path in folders]
    arguments = {"speculative_config": {"model": "/models/a-draft"}}
    named = CUDA | {"engine_args": arguments, "model": "/models/a", "adapters": {"x": {"path": "/models/adapter/x"}}}
    made = render(merged(models(named, CPU), at("weights", {"enabled": True, "downloads": downloads})))

    def waited(group: str) -> list[str]:
        return [a for c in made.pod(group).get("initContainers", []) for a in c["args"] if a.startswith("/models/")]

    assert waited("model-cuda") == ["/models/a", "/models/a-draft", "/models/adapter"]
    assert waited("model-cpu") == []


def test_ray_is_told_how_many_gpus_there_are() -> None:
    made = render(MIXED)
    told = {group: made.group(group)["rayStartParams"]["num-gpus"] for group in GROUPS}
    assert told == {"head": "0", "ingress": "0", "model-cuda": "4", "model-cpu": "0", "model-simulated": "2"}


def test_every_container_of_ours_without_a_gpu_sees_none_and_those_with_gpus_are_left_to_the_device_plugin() -> None:
    made = containers(render(MIXED))
    holds = {name for name, container in made.items() if "nvidia.com/gpu" in container["resources"]["limits"]}
    assert holds == OF_CUDA | OF_SIMULATED
    found = {name: [e for e in c.get("env", []) if e["name"] == VOID["name"]] for name, c in made.items()}
    assert found == {name: [VOID] if name in OF_OTHERS else [] for name in made}


CACHES = {
    "VLLM_CACHE_ROOT": "/var/cache/serve-app/vllm",
    "TRITON_CACHE_DIR": "/var/cache/serve-app/triton",
    "FLASHINFER_WORKSPACE_BASE": "/var/cache/serve-app",
    "CUDA_CACHE_PATH": "/var/cache/serve-app/nv",
}


def cached(made: Rendered, group: str) -> list[Any]:
    """Return the volume, the mount and the environment of compile caches, as far as they are there."""
    pod, container = made.pod(group), made.container(group)
    environment = {name: value for name, value in made.environment(group).items() if name in CACHES}
    volumes = [v for v in pod["volumes"] if v["name"] == "compile-cache"]
    mounts = [m for m in container["volumeMounts"] if m["name"] == "compile-cache"]
    return [*volumes, *mounts, *([environment] if environment else [])]


def on(claim: str) -> list[Any]:
    return [
        {"name": "compile-cache", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "compile-cache", "mountPath": "/var/cache/serve-app"},
        CACHES,
    ]


GROUPS = ("head", "ingress", "model-cuda", "model-cpu", "model-simulated")


def test_compile_caches_of_models_on_cuda_are_on_the_claim_and_of_nobody_else() -> None:
    made = render(merged(MIXED, at("modelPods.compileCache.existingClaim", "c")))
    assert {group: cached(made, group) for group in GROUPS} == {
        group: on("c") if group == "model-cuda" else [] for group in GROUPS
    }


def test_without_a_claim_compile_caches_stay_in_the_home() -> None:
    made = render(MIXED)
    assert [group for group in GROUPS if cached(made, group)] == []


def test_each_model_may_have_a_compile_cache_of_its_own_or_none() -> None:
    claims = {"b": {"compileCache": {"existingClaim": "777"}}, "c": {"compileCache": {"existingClaim": ""}}}
    several = models(*(LOCAL | {"name": name, "pods": claims.get(name, {})} for name in ("a", "b", "c")))
    made = render(merged(several, at("modelPods.compileCache.existingClaim", "all")))
    assert [cached(made, f"model-{name}") for name in ("a", "b", "c")] == [on("all"), on("777"), []]

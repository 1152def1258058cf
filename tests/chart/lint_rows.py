"""These rows of test_lint.py are about what values add to pods, about scaling and about the weights."""

from typing import Any

from serve_app.config.weight_places import FETCH
from tests.chart.places import CUDA, GPU, HUB, LOADED, S3
from tests.chart.render import at, merged, models

Check = tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]
"""Name, values that are refused, what the sentence says, and values beside them that are not."""

EMBEDDED = "embedded:smollm2-135m-instruct"
DIGEST = {"digest": "sha256:" + "a" * 64}
SIMULATED = {"profile": "a10g-llama-8b"}
CACHED = merged(GPU, at("modelPods.compileCache.existingClaim", "c"))


def memory(kind: str, amount: Any) -> dict[str, Any]:
    return {"resources": {kind: {"memory": amount}}}


LITTLE = memory("requests", "9Gi")


def model(path: str, **more: Any) -> dict[str, Any]:
    return models({"name": "m", "model": path, **more})


def weights(*downloads: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"weights": {"enabled": True, "downloads": list(downloads), **more}}


def variable(name: str, path: str = "modelPods") -> dict[str, Any]:
    return at(f"{path}.extraEnv", [{"name": name, "value": "x"}])


IMAGES: list[Check] = [
    (
        "latest of the CUDA image",
        at("cudaImage.tag", "latest"),
        ("cudaImage.tag is latest", "cudaImage.digest is empty"),
        at("cudaImage", {"tag": "latest", **DIGEST}),
    ),
    (
        "a tag in the repository of the CUDA image",
        at("cudaImage", {"repository": "host:5000/app:1", "tag": "2"}),
        ('cudaImage.repository is "host:5000/app:1" and cudaImage.tag is "2"',),
        at("cudaImage", {"repository": "host:5000/app", "tag": "2"}),
    ),
    (
        "a model on cuda in the CPU image",
        merged(GPU, at("modelPods.image", "cpu")),
        ("modelPods.image is cpu for config.models.m, whose device is cuda", "set image to auto"),
        merged(model("/opt/m"), at("modelPods.image", "cpu")),
    ),
    (
        "a model that computes on cpu in the CUDA image",
        merged(model("/opt/m"), at("modelPods.image", "cuda")),
        ("modelPods.image is cuda for config.models.m, which computes on cpu", "set image to auto, or simulate the model"),
        merged(model("/opt/m", simulated=SIMULATED), at("modelPods.image", "cuda")),
    ),
    (
        "a load format that no image can read",
        models(CUDA | {"engine_args": {"load_format": "runai_streamer"}}),
        ("engine_args.load_format is runai_streamer, but the images have no runai-model-streamer", "checkpointSize"),
        models(CUDA | {"engine_args": {"load_format": "fastsafetensors"}}),
    ),
    (
        "a digest without the CUDA image's",
        merged(GPU, {"image": {"tag": "1.2.3", **DIGEST}}),
        (f"image.digest is {DIGEST['digest']} and config.models.m runs the CUDA image", "1.2.3-cuda", "set cudaImage.digest"),
        merged(GPU, {"image": DIGEST, "cudaImage": DIGEST}),
    ),
    (
        "a digest without the CUDA image's of a model on cpu that tries it",
        merged(model("/opt/m", simulated=SIMULATED, pods={"image": "cuda"}), {"image": DIGEST}),
        ("config.models.m runs the CUDA image, but cudaImage.tag and cudaImage.digest are empty", "or cudaImage.tag"),
        merged(model("/opt/m"), {"image": DIGEST}),
    ),
    (
        "the CUDA image's tag for all pods",
        merged(GPU, at("image.tag", "1.2.3-cuda")),
        ("image.tag is 1.2.3-cuda", "the CUDA image 1.2.3-cuda-cuda", "set image.tag to 1.2.3,"),
        merged(GPU, {"image": {"tag": "1.2.3-cuda"}, "cudaImage": {"tag": "1.2.3-cuda"}}),
    ),
]

PODS: list[Check] = [
    *[
        (
            f"a choice of GPUs by {path}{' with GPUs' if gpus else ''}",
            merged(gpus, variable("NVIDIA_VISIBLE_DEVICES", path)),
            (f"{path}.extraEnv has NVIDIA_VISIBLE_DEVICES", "device plugin", "remove it"),
            merged(gpus, variable("NVIDIA_DRIVER_CAPABILITIES", path)),
        )
        for path, gpus in (("head", {}), ("modelPods", {}), ("modelPods", GPU))
    ],
    (
        "a compile cache elsewhere than the claim",
        merged(CACHED, variable("TRITON_CACHE_DIR")),
        ("modelPods.extraEnv has the name TRITON_CACHE_DIR,", "the chart uses itself"),
        merged(GPU, variable("TRITON_CACHE_DIR")),
    ),
    (
        "a request above the limit that the number of GPUs makes",
        merged(GPU, at("modelPods", memory("requests", "41Gi"))),
        ("modelPods.resources.requests.memory is 41Gi, but", "limits.memory is 40Gi for config.models.m"),
        merged(GPU, at("modelPods", memory("requests", "40Gi"))),
    ),
    (
        "a limit below the request that the number of GPUs makes",
        merged(GPU, at("modelPods", memory("limits", "19Gi"))),
        ("modelPods.resources.requests.memory is 20Gi, but", "limits.memory is 19Gi for config.models.m"),
        merged(GPU, at("modelPods", memory("limits", "20Gi"))),
    ),
    (
        "a checkpoint that vLLM would not read ahead",
        merged(GPU, at("modelPods", {"checkpointSize": "132Gi", **memory("limits", "146Gi")})),
        (
            "modelPods.checkpointSize is 132Gi, but modelPods.resources.limits.memory is 146Gi for config.models.m",
            "raise the latter above 147Gi",
        ),
        merged(GPU, at("modelPods", {"checkpointSize": "132Gi", **memory("limits", "147Gi")})),
    ),
    (
        "a /dev/shm in which a model's KV has no room",
        merged(GPU, at("config.models.m.kv.offload_gib", 9), at("modelPods.shmSize", "8Gi")),
        ("config.models.m.kv.offload_gib is 9, but modelPods.shmSize is 8Gi: vLLM keeps this KV in /dev/shm",),
        merged(GPU, at("config.models.m.kv.offload_gib", 8), at("modelPods.shmSize", "8Gi")),
    ),
    (
        "a limit that a model's KV alone takes",
        merged(GPU, at("config.models.m.kv.offload_gib", 64), at("modelPods", merged(memory("limits", "63Gi"), LITTLE))),
        ("config.models.m.kv.offload_gib is 64, but modelPods.resources.limits.memory is 63Gi: /dev/shm counts as memory",),
        merged(GPU, at("config.models.m.kv.offload_gib", 64), at("modelPods", merged(memory("limits", "64Gi"), LITTLE))),
    ),
    (
        "objects that the /dev/shm of a second model cannot hold",
        models(CUDA, {"name": "c", "model": "/opt/c", "pods": {"shmSize": "127Mi"}}),
        ("config.models.c.pods.shmSize is 127Mi for config.models.c, but Ray's object store there has 128Mi",),
        models(CUDA, {"name": "c", "model": "/opt/c", "pods": {"shmSize": "128Mi"}}),
    ),
    *[
        (
            f"more than the limit of {path}",
            at(path, memory("requests", "64Gi")),
            (f"{path}.resources.requests.memory is 64Gi, but {path}.resources.limits.memory is ", "raise the latter"),
            at(path, {"resources": {"requests": {"memory": "64Gi"}, "limits": {"memory": 68719476736}}}),
        )
        for path in ("head", "ingressPods", "modelPods", "autoscaler", "gcsFaultTolerance.redis", "weights", "test")
    ],
    (
        "more CPU than the limit",
        at("head.resources.requests.cpu", "2001m"),
        ("head.resources.requests.cpu is 2001m, but head.resources.limits.cpu is 2:",),
        at("head.resources.requests.cpu", 2),
    ),
    (
        "more than the limit of one model",
        model(EMBEDDED, pods=memory("requests", "7Gi")),
        ("config.models.m.pods.resources.requests.memory is 7Gi, but", "limits.memory is 6Gi"),
        model(EMBEDDED, pods=memory("limits", "7Gi")),
    ),
    (
        "GPUs requested twice",
        {"modelPods": {"resources": {"requests": {"nvidia.com/gpu": 4}}}},
        ("modelPods.resources.requests has nvidia.com/gpu 4", "gpus_per_replica is 0"),
        {"modelPods": {"resources": {"requests": {"ephemeral-storage": "1Gi"}}}},
    ),
    *[
        (
            f"a label of the chart in {path}",
            at(path, {label: "x"}),
            (f"{path} has {label}", "remove it"),
            at(path, {"app.kubernetes.io/part-of": "x"}),
        )
        for path, label in (
            ("head.podLabels", "app.kubernetes.io/name"),
            ("ingressPods.podLabels", "app.kubernetes.io/component"),
            ("modelPods.podLabels", "ray.io/group"),
            ("modelPods.podLabels", "serve-app/one-per-node"),
            ("jobs.podLabels", "app.kubernetes.io/instance"),
            ("commonLabels", "helm.sh/chart"),
        )
    ],
    *[
        (
            f"{what} twice",
            merged(LOADED, at(path, value)),
            (f"{path.partition('.')[0]}.{shown}", "or which is there twice"),
            merged(LOADED, at(path, right)),
        )
        for what, path, value, shown, right in (
            ("a sidecar's name", "head.extra.containers", [{"name": "ray-head"}], "extra.containers", [{"name": "sidecar"}]),
            (
                "an init container's name",
                "modelPods.extra.initContainers",
                [{"name": "ray-worker"}],
                "extra.containers or extra.initContainers has the name ray-worker",
                [{"name": "setup"}],
            ),
            (
                "a volume of the jobs",
                "weights.extraVolumes",
                [{"name": "tmp"}],
                "extraVolumes has the name tmp",
                [{"name": "ca"}],
            ),
        )
    ],
    *[
        (
            f"{what} of the chart's name",
            at(path, [entry]),
            (f"{path} has the {key} {entry[key]},", "choose another"),
            at(path, [entry | {key: "/other" if key == "mountPath" else "OTHER"}]),
        )
        for what, path, key, entry in (
            ("a variable", "head.extraEnv", "name", {"name": "RAY_LOG_TO_STDERR", "value": "0"}),
            ("a volume", "ingressPods.extraVolumes", "name", {"name": "api-keys", "emptyDir": {}}),
            ("a mount", "modelPods.extraVolumeMounts", "mountPath", {"name": "tmp", "mountPath": "/dev/shm"}),
        )
    ],
    (
        "a variable twice",
        at("head.extraEnv", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        ("head.extraEnv has the name A,", "twice"),
        at("head.extraEnv", [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]),
    ),
    (
        "a mount of no volume",
        at("head.extraVolumeMounts", [{"name": "v", "mountPath": "/v"}]),
        ("head.extraVolumeMounts mounts v at /v, but head.extraVolumes has no volume of that name",),
        at("head", {"extraVolumes": [{"name": "v"}], "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}]}),
    ),
]

LOW = at("modelPods.headroom.priorityClassName", "low")
SPARE = at("modelPods.headroom.pods", 2)

SCALING: list[Check] = [
    (
        "more ingresses than a replica takes links of, in an update",
        at("config.ingress.replicas.max", 33),
        ("config.protocol.max_ingresses is 64 and config.ingress.replicas.max is 33", "up to 66 ingresses", "to 66 or more"),
        merged(at("config.ingress.replicas.max", 33), at("config.protocol.max_ingresses", 66)),
    ),
    (
        "more ingresses than a replica can be told to take links of",
        at("config.ingress.replicas.max", 513),
        ("break 1 of", "config.ingress.replicas.max is 513", "up to 1026 ingresses", "set the latter to 512 or less\n"),
        merged(at("config.ingress.replicas.max", 512), at("config.protocol.max_ingresses", 1024)),
    ),
    (
        "more replicas than a worker group has pods for",
        models({"name": "m", "model": "/opt/m", "replicas": {"max": 5001}}),
        ("config.models.m.replicas.max is 5001, but a worker group has 10000 pods",),
        models({"name": "m", "model": "/opt/m", "replicas": {"max": 5000}}),
    ),
    (
        "a release that serves nothing",
        models({"name": "m", "model": "/opt/m", "served": False}, {"name": "n", "model": "/opt/m", "served": False}),
        ("served is false for each of config.models, m, n", "set served: true for one"),
        models({"name": "m", "model": "/opt/m", "served": False}, {"name": "n", "model": "/opt/m"}),
    ),
    (
        "a model from zero whose first request would not wait for it",
        models(CUDA | {"required": False, "replicas": {"min": 0, "max": 1}}),
        ("config.models.m.replicas.min is 0, but config.timeouts.no_replica_s is 30", "with timeouts.loadBalancerIdleSeconds"),
        merged(
            models(CUDA | {"required": False, "replicas": {"min": 0, "max": 1}}),
            at("config.timeouts.no_replica_s", 31),
            at("timeouts.loadBalancerIdleSeconds", 91),
        ),
    ),
    (
        "headroom that would not give way",
        SPARE,
        (
            "modelPods.headroom.pods is 2 for config.models.smollm2-135m-instruct",
            "headroom.priorityClassName is empty and priorityClasses.create is false",
        ),
        merged(SPARE, at("priorityClasses.create", True)),
    ),
    (
        "headroom of one model that would not give way",
        model(EMBEDDED, pods={"headroom": {"pods": 1}}),
        ("modelPods.headroom.pods is 1 for config.models.m", "name a class of a negative value"),
        merged(model(EMBEDDED, pods={"headroom": {"pods": 1}}), LOW),
    ),
    (
        "headroom of the model's own class",
        merged(SPARE, LOW, at("modelPods.priorityClassName", "low")),
        (
            "modelPods.headroom.priorityClassName is low for config.models.smollm2-135m-instruct, and so is modelPods.priorityClassName",
            "a lower value",
        ),
        merged(SPARE, LOW, at("modelPods.priorityClassName", "high")),
    ),
]

PLACES: list[Check] = [
    *[
        (
            f"{place!r} as weights{' in pods that reach every hub' if is_open else ''}",
            merged(model(place), at("networkPolicies.enabled", not is_open)),
            (f"weights-place-wrong: config.models.m.model: is {place!r}{said}", "break 1 of the chart's rules"),
            merged(model("org/name"), at("networkPolicies.enabled", False)),
        )
        for place, said in (
            ("s3://bucket/llama", f", and serve-app reads no object store; {FETCH}"),
            ("https://host/llama", f", and weights are not fetched from a web page; give the id ORG/NAME; or {FETCH}"),
            ("hf:org/name", f", in the form of the chart's weights.downloads; write the id alone, without hf:; or {FETCH}"),
            ("simulated:h100-llama-8b", ", but an accelerator is simulated, not its weights; set models.NAME.simulated: "),
            ("a/b/c", ", neither a Hugging Face id (ORG/NAME) nor an absolute path; a path begins with /"),
        )
        for is_open in (False, True)
    ],
    (
        "weights of a bucket in pods whose egress somebody chose",
        merged(model("s3://b/m"), at("networkPolicies.extraEgress", [{"to": []}])),
        (f"config.models.m.model: is 's3://b/m', and serve-app reads no object store; {FETCH}",),
        merged(model("org/name"), at("networkPolicies.extraEgress", [{"to": []}])),
    ),
    *[
        (
            f"{place!r} as an adapter",
            model("/opt/m", adapters={"x": {"path": place}}),
            (f"config.models.m.adapters.x.path: is {place!r}, {said}",),
            model("/opt/m", adapters={"x": {"path": "/opt/x"}}),
        )
        for place, said in (
            ("s3:/bucket/lora", f"not the absolute path of a folder; {FETCH}"),
            ("./lora", "a relative path; write it from /"),
        )
    ],
]

WEIGHTS: list[Check] = [
    *PLACES,
    (
        "weights without a volume",
        model("/models/m"),
        ("/models/m", "weights.enabled is false"),
        merged(model("/models/m"), weights(HUB)),
    ),
    (
        "weights that nothing fetches",
        merged(model("/models/x"), weights(HUB)),
        ("/models/x, but weights.downloads fetches /models/m", "existingClaim is empty", "path x"),
        merged(model("/models/x"), weights(HUB, existingClaim="c")),
    ),
    (
        "weights that pods would not wait for",
        merged(model("/models/m/"), weights(HUB, existingClaim="c")),
        ("config.models.m.model is /models/m/: write /models/m,",),
        merged(model("/models/m"), weights(HUB, existingClaim="c")),
    ),
    (
        "an adapter without a volume",
        model("/opt/m", adapters={"x": {"path": "/models/x"}}),
        ("config.models.m.adapters.x.path is /models/x", "weights.enabled is false"),
        model("/opt/m", adapters={"x": {"path": "/opt/x"}}),
    ),
    (
        "an adapter that nothing fetches",
        merged(model("/models/m", adapters={"x": {"path": "/models/mine/x"}}), weights(HUB)),
        ("adapters.x.path is /models/mine/x, but weights.downloads fetches /models/m", "path mine/x"),
        merged(model("/models/m", adapters={"x": {"path": "/models/mine/x"}}), weights(HUB, S3 | {"path": "mine"})),
    ),
    (
        "downloads into what cannot be written",
        weights(HUB, accessMode="ReadOnlyMany"),
        ("weights.accessMode is ReadOnlyMany, but weights.downloads has 1 entries", "ReadWriteMany"),
        weights(HUB, accessMode="ReadOnlyMany", existingClaim="c"),
    ),
    (
        "a revision that moves",
        weights(HUB | {"revision": "main"}),
        ("weights.downloads[0].revision is main", "git ls-remote https://huggingface.co/o/n main prints"),
        weights(HUB),
    ),
    (
        "two downloads to one place",
        weights(HUB, S3 | {"path": "m"}),
        ("weights.downloads[1].path is m", "a path of its own"),
        weights(HUB, S3),
    ),
    ("downloads without a volume", {"weights": {"downloads": [HUB]}}, ("hf:o/n", "weights.enabled is false"), weights(HUB)),
]

"""These rows of test_values.py are about serve-app's own configuration and the pods of the RayCluster."""

from tests.chart.places import (
    FT,
    GPU,
    LOADED,
    LOADED_S3,
    MODEL,
    MONITORS,
    NODES,
    Row,
    images,
    pods,
    pull_secrets,
    resources,
)
from tests.chart.render import Object, at, merged, models

DIGEST = "sha256:" + "d" * 64
SIMULATED = models({"name": "m", "model": "/opt/m", "simulated": {"profile": "a10g-llama-8b"}})
UNNAMED = {"model": "/opt/m", "device": "cuda", "gpus_per_replica": 2}
AMOUNTS = {"requests": {"cpu": "11m", "memory": "12Mi", "ephemeral-storage": "13Mi"}, "limits": {"cpu": "130", "memory": "140Gi"}}
EVERYTHING = merged(GPU, FT, LOADED, MONITORS, at("modelPods.headroom", {"pods": 1, "priorityClassName": "low"}))


def containers(spec: Object) -> list[Object]:
    return [*spec["containers"], *spec.get("initContainers", [])]


CONFIG: list[Row] = [
    ("config.models", {"m": UNNAMED, "n": UNNAMED}, lambda r: [*r.config["models"]], ["m", "n"], {}),
    ("config.ingress.port", 8011, lambda r: r.container("ingress")["ports"][0], {"name": "http", "containerPort": 8011}, {}),
    ("config.ingress.num_cpus", 2.5, lambda r: r.group("ingress")["rayStartParams"]["num-cpus"], "3", {}),
    ("config.ingress.keep_alive_s", 131, lambda r: r.config["ingress"]["keep_alive_s"], 131, {}),
    ("config.ingress.unready_s", 7, lambda r: r.environment("ingress")["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"], "627", {}),
    ("config.ingress.replicas.min", 2, lambda r: r.group("ingress")["replicas"], 2, at("config.ingress.replicas.max", 2)),
    ("config.ingress.replicas.max", 3, lambda r: r.config["ingress"]["replicas"]["max"], 3, {}),
    ("config.protocol.port", 8021, lambda r: r.container(MODEL)["ports"][0], {"name": "link", "containerPort": 8021}, {}),
    ("config.timeouts.drain_s", 100, lambda r: r.pod(MODEL)["terminationGracePeriodSeconds"], 141, {}),
    ("config.timeouts.no_replica_s", 31, lambda r: r.config["timeouts"]["no_replica_s"], 31, {}),
]

PODS: list[Row] = [
    (
        "global.imageRegistry",
        "r.example:5000/mirror/",
        lambda r: sorted({c["image"] for _, pod in r.pod_templates() for c in containers(pod["spec"])}),
        [
            f"r.example:5000/mirror/{name}"
            for name in ("aws-cli/aws-cli:2.31.18", "serve-app:0.2.0", "serve-app:0.2.0-cuda", "valkey/valkey:8.1.4-bookworm")
        ],
        merged(EVERYTHING, LOADED_S3),
    ),
    ("global.imagePullSecrets", ["s"], lambda r: {*map(tuple, pull_secrets(r).values())}, {("s",)}, EVERYTHING),
    *images("image", lambda r: r.container("head"), {}, name="localhost/serve-app"),
    ("image.pullSecrets", ["s"], lambda r: {*map(tuple, pull_secrets(r).values())}, {("s",)}, merged(EVERYTHING, LOADED_S3)),
    (
        "image.pullPolicy",
        "Always",
        lambda r: {c["imagePullPolicy"] for _, pod in r.pod_templates() for c in containers(pod["spec"])},
        {"Always"},
        merged(EVERYTHING, LOADED_S3),
    ),
    ("cudaImage.repository", "h/i", lambda r: r.container(MODEL)["image"], "h/i:0.2.0-cuda", GPU),
    ("cudaImage.tag", "9.9", lambda r: r.container(MODEL)["image"], "localhost/serve-app:9.9", GPU),
    ("cudaImage.digest", DIGEST, lambda r: r.container(MODEL)["image"], f"localhost/serve-app@{DIGEST}", GPU),
    ("rayVersion", "2.61.0", lambda r: r.cluster["rayVersion"], "2.61.0", {}),
    *pods("head", "head"),
    *resources("head.resources", lambda r: r.container("head")["resources"], disk=True),
    *pods("ingressPods", "ingress"),
    *resources("ingressPods.resources", lambda r: r.container("ingress")["resources"], disk=True),
    *pods("modelPods", MODEL),
    ("modelPods.resources", AMOUNTS, lambda r: r.container(MODEL)["resources"], AMOUNTS, {}),
    ("modelPods.checkpointSize", "90Gi", lambda r: r.container(MODEL)["resources"]["limits"]["memory"], "120Gi", GPU),
    ("modelPods.asleepSize", "48Gi", lambda r: r.container(MODEL)["resources"]["limits"]["memory"], "88Gi", GPU),
    ("modelPods.image", "cuda", lambda r: r.container(MODEL)["image"], "localhost/serve-app:0.2.0-cuda", SIMULATED),
    (
        "modelPods.compileCache.existingClaim",
        "c",
        lambda r: r.pod(MODEL)["volumes"][3],
        {"name": "compile-cache", "persistentVolumeClaim": {"claimName": "c"}},
        GPU,
    ),
    ("head.preStopSleepSeconds", 44, lambda r: r.pod("head")["terminationGracePeriodSeconds"], 74, {}),
    (
        "ingressPods.spot",
        True,
        lambda r: r.pod("ingress")["terminationGracePeriodSeconds"],
        141,
        at("config.timeouts.drain_s", 100),
    ),
    (
        "ingressPods.spotNoticeSeconds",
        606,
        lambda r: r.pod("ingress")["terminationGracePeriodSeconds"],
        641,
        at("ingressPods.spot", True),
    ),
    (
        "ingressPods.topologySpread",
        "DoNotSchedule",
        lambda r: [(c["whenUnsatisfiable"], c["nodeTaintsPolicy"]) for c in r.pod("ingress")["topologySpreadConstraints"]],
        [("DoNotSchedule", "Honor")] * 2,
        {},
    ),
    ("modelPods.topologySpread", "", lambda r: r.pod(MODEL).get("topologySpreadConstraints"), None, {}),
    (
        "modelPods.nodesWithin",
        "example.com/rack",
        lambda r: r.pod(MODEL)["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"],
        "example.com/rack",
        models({"name": "m", **NODES}),
    ),
    ("modelPods.onePerNode", False, lambda r: r.pod(MODEL).get("affinity"), None, GPU),
    ("modelPods.gpusPerNode", 2, lambda r: r.container(MODEL)["resources"]["limits"]["nvidia.com/gpu"], 2, GPU),
    ("modelPods.gpuResource", "amd.com/gpu", lambda r: r.container(MODEL)["resources"]["limits"]["amd.com/gpu"], 2, GPU),
    ("modelPods.runtimeClassName", "nvidia", lambda r: r.pod(MODEL)["runtimeClassName"], "nvidia", GPU),
    (
        "modelPods.headroom.pods",
        2,
        lambda r: r.of("Deployment")["headroom-smollm2-135m-instruct"]["spec"]["replicas"],
        2,
        at("modelPods.headroom.priorityClassName", "low"),
    ),
    (
        "modelPods.headroom.priorityClassName",
        "low",
        lambda r: r.of("Deployment")["headroom-smollm2-135m-instruct"]["spec"]["template"]["spec"]["priorityClassName"],
        "low",
        at("modelPods.headroom.pods", 1),
    ),
    ("autoscaler.idleTimeoutSeconds", 9, lambda r: r.cluster["autoscalerOptions"]["idleTimeoutSeconds"], 9, {}),
    *resources("autoscaler.resources", lambda r: r.cluster["autoscalerOptions"]["resources"]),
]

"""Kubernetes, KubeRay, Ray Serve and serve-app accept what the chart renders."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from serve_app.application import serve_config
from serve_app.cli.manifests import manifest_problems
from serve_app.config import parse_settings
from serve_app.ingress.routes.app import VLLM_ROUTES, WITHOUT_KEY
from serve_app.ingress.routes.sagemaker import INVOCATIONS, PING
from tests.chart.places import HUB, LOADED, MONITORS, NODES, OUTSIDE, ROUTE, S3, TOLERATION
from tests.chart.render import CHART, CI_FILES, Object, Rendered, at, merged, models, render
from tests.chart.schemas import check_with_kubeconform
from tests.k8s.test_cluster_files import our_values

NEAR = {"modelPods": {"nodesWithin": "example.com/rack", "headroom": {"pods": 1, "priorityClassName": "low"}}}
ALL = [
    *(pytest.param(((file,), {}), id=file.stem) for file in CI_FILES),
    pytest.param(((), our_values()), id="eks"),
    pytest.param(((), merged(models({"name": "wide", **NODES, "replicas": {"min": 2, "max": 3}}), NEAR)), id="nodes"),
]
"""Files and values of kinds of clusters."""


@pytest.fixture(params=ALL)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    files, values = request.param
    return render(values, files=files)


def test_there_are_values_for_three_kinds_of_cluster_beside_eks() -> None:
    assert [f.name.removesuffix("-values.yaml") for f in CI_FILES] == ["default", "production", "simulated"]


def test_kubeconform_accepts_every_object_strictly(rendered: Rendered, tmp_path: Path) -> None:
    check_with_kubeconform(rendered.text, len(rendered.objects), tmp_path)


def test_serve_app_accepts_the_configuration_and_says_the_same_to_serve(rendered: Rendered) -> None:
    settings = parse_settings(rendered.config)
    ours, theirs = serve_config(settings), rendered.serve
    policies = [serve["applications"][0].pop("autoscaling_policy", None) for serve in (ours, theirs)]
    assert parse_settings(theirs["applications"][0].pop("args")) == parse_settings(ours["applications"][0].pop("args"))
    assert theirs == ours
    assert (policies[0] is None) == (policies[1] is None)
    if policies[0] and policies[1]:
        assert parse_settings(policies[1]["policy_kwargs"].pop("settings")) == settings
        policies[0]["policy_kwargs"].pop("settings")
        assert policies[0] == policies[1]


def test_serve_accepts_the_configuration(rendered: Rendered) -> None:
    assert ServeDeploySchema.model_validate(rendered.serve).applications[0].name == "demo"


def test_serve_app_check_finds_nothing_wrong(rendered: Rendered) -> None:
    assert list(manifest_problems(rendered.text, client_s=None, load_balancer_idle_s=None)) == []


def test_every_replica_has_exactly_one_group_of_pods_whose_resource_it_asks_for(rendered: Rendered) -> None:
    asked = [rendered.config["ingress"]["resources"], *(m["resources"] for m in rendered.config["models"].values())]
    groups = rendered.cluster["workerGroupSpecs"]
    assert [_resources(g) for g in groups] == asked


def test_any_number_of_pods_may_run_and_serve_decides_how_many() -> None:
    model = MODEL | {"replicas": {"min": 2, "max": 9, "initial": 4}}
    made = render(merged(models(model), at("config.ingress.replicas", {"min": 3, "max": 5})))
    bounds = {g["groupName"]: (g["minReplicas"], g["replicas"], g["maxReplicas"]) for g in made.cluster["workerGroupSpecs"]}
    assert bounds == {"ingress": (0, 3, 10000), "model-m": (0, 4, 10000)}


@pytest.mark.parametrize("initial", [{}, {"initial": None}, {"initial": 0}, {"initial": 2}])
def test_serve_gets_no_number_to_start_with(initial: dict[str, Any]) -> None:
    """Serve would make it the target at each upgrade, however many replicas are busy."""
    made = render(models(MODEL | {"replicas": {"min": 0, "max": 9} | initial, "required": False}))
    (entry,) = made.serve["applications"][0]["deployments"]
    assert entry["autoscaling_config"]["initial_replicas"] is None
    assert (
        made.serve["applications"][0]["deployments"]
        == serve_config(parse_settings(made.config))["applications"][0]["deployments"]
    )


def groups(*several: dict[str, Any]) -> list[Object]:
    """Return the worker groups of these models, as KubeRay compares them."""
    return [{k: v for k, v in g.items() if k != "replicas"} for g in render(models(*several)).cluster["workerGroupSpecs"]]


def test_a_model_that_comes_or_goes_changes_no_other_models_group() -> None:
    first, second = MODEL | {"name": "b"}, MODEL | {"name": "c"}
    alone = groups(first, second)
    for other in ({"name": "a"}, {"name": "b/b"}, {"name": "B"}, {"name": "d" * 100}):
        assert [group for group in groups(first, second, MODEL | other) if group not in alone] != []
        assert [group for group in alone if group not in groups(first, second, MODEL | other)] == []


def test_a_model_of_a_higher_order_is_behind_the_others_where_kuberay_adds_it_in_place() -> None:
    first, second = MODEL | {"name": "b"}, MODEL | {"name": "c"}
    assert groups(first, second, MODEL | {"name": "a", "order": 1})[:-1] == groups(first, second)
    assert groups(first, second, MODEL | {"name": "a"})[:-1] != groups(first, second)


CANARY = {"name": "a", "model": "/opt/m", "canary": {"of": "b"}}


def test_a_canary_comes_and_goes_behind_the_models_and_leaves_only_its_worker_group() -> None:
    model = {"name": "b", "model": "/opt/m"}
    served, gone = (render(models(model, CANARY | {"served": is_served})) for is_served in (True, False))
    assert groups(model, CANARY)[:-1] == groups(model)
    assert groups(model, CANARY | {"served": False}) == groups(model, CANARY)
    assert [render.config["models"].keys() for render in (served, gone)] == [{"a", "b"}, {"b"}]
    assert [render.group("model-a")["replicas"] for render in (served, gone)] == [1, 0]
    alone = render(models(model))
    assert gone.config == alone.config
    assert [o["metadata"]["name"] for o in gone.objects] == [o["metadata"]["name"] for o in alone.objects]


def test_a_promotion_changes_no_pod_where_the_weights_are_on_a_claim_of_ones_own() -> None:
    claim = at("weights", {"enabled": True, "existingClaim": "weights", "downloads": []})
    before, after = (render(merged(models({"name": "b", "model": f"/models/v{version}"}), claim)) for version in (1, 2))
    assert before.config != after.config
    assert before.cluster == after.cluster


@pytest.mark.parametrize(("own", "headroom"), [({}, {"headroom-b"}), ({"headroom": {"pods": 1}}, {"headroom-a", "headroom-b"})])
def test_a_canary_keeps_a_node_free_only_if_its_own_pods_say_so(own: dict[str, Any], headroom: set[str]) -> None:
    """A node more for each model is one too many where a canary is to cost one replica."""
    spare = merged(at("modelPods.headroom.pods", 1), at("priorityClasses.create", True))
    made = render(merged(models({"name": "b", "model": "/opt/m"}, CANARY | {"pods": own}), spare))
    assert made.of("Deployment").keys() == headroom


def test_a_lower_number_of_replicas_takes_no_pod_of_a_running_ray_cluster_away() -> None:
    """KubeRay writes `replicas` into a running cluster when a model is appended, and removes pods by itself only without autoscaling."""
    fixed = {"min": 2, "max": 2}
    made = render(merged(models(MODEL | {"replicas": fixed}), at("config.ingress.replicas", fixed)))
    assert made.cluster["enableInTreeAutoscaling"] is True
    assert made.cluster["autoscalerOptions"]["version"] == "v2"


def _resources(group: Object) -> Object:
    """Ray's resources of a group: JSON in quotes for the shell, with the quotes inside escaped."""
    text = group["rayStartParams"]["resources"]
    assert text.startswith('"')
    assert text.endswith('"')
    return dict(json.loads(text[1:-1].replace('\\"', '"')))


def test_selectors_find_their_pods(rendered: Rendered) -> None:
    labels = [template["metadata"].get("labels", {}) for _, template in rendered.pod_templates()]
    for name, service in rendered.of("Service").items():
        wanted = service["spec"]["selector"].items()
        assert any(wanted <= found.items() for found in labels), name
    assert (
        rendered.of("Service")[""]["spec"]["selector"].items()
        <= rendered.group("ingress")["template"]["metadata"]["labels"].items()
    )


def test_a_chart_version_is_in_no_label_of_a_pod_of_ray(rendered: Rendered) -> None:
    """It would make a new Ray cluster of each upgrade of the chart."""
    assert "helm.sh/chart" not in json.dumps(rendered.cluster)
    assert "app.kubernetes.io/version" not in json.dumps(rendered.cluster)


def test_the_ray_cluster_is_the_same_when_only_serve_has_to_know() -> None:
    """KubeRay compares the RayCluster's spec without the numbers of replicas, their bounds and the tolerations: what differs makes a new
    cluster. It leaves the bounds of a running cluster as they are, so that they have to suit every change, too.
    """

    def compared(rendered: Rendered) -> Object:
        cluster = copy.deepcopy(rendered.cluster)
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            group["template"]["spec"].pop("tolerations", None)
        for group in cluster["workerGroupSpecs"]:
            del group["replicas"]
        return cluster

    base = render(at("config.ingress.replicas", {"min": 1, "max": 2}))
    ((name, made),) = base.config["models"].items()
    model = {key: value for key, value in made.items() if key != "resources"} | {"name": name}
    in_place = [
        at("config.ingress.replicas", {"min": 2, "max": 3, "target_streams": 10}),
        at("config.ingress.max_body_bytes", 1000),
        models(model | {"engine_args": {"max_model_len": 1024}}),
        models(model | {"replicas": {"min": 2, "max": 6}}),
        models(model | {"kv": {"transfer": "nixl", "port": 20000}}),
        at("networkPolicies.enabled", False),
        at("monitoring", {"podMonitors": True}),
    ]
    for change in in_place:
        assert compared(render(merged(at("config.ingress.replicas", {"min": 1, "max": 2}), change))) == compared(base), change
    anew = [at("image.tag", "0.2.1"), *(at(f"{pods}.tolerations", TOLERATION) for pods in ("head", "ingressPods", "modelPods"))]
    for change in anew:
        assert compared(render(merged(at("config.ingress.replicas", {"min": 1, "max": 2}), change))) != compared(base), change


OTHERS = ("/generate", "/version", "/v1/models")


def test_the_world_reaches_every_route_of_the_api_and_no_other() -> None:
    made = render({"ingress": {"enabled": True}, "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}})
    paths = [path["path"] for path in made.of("Ingress")[""]["spec"]["rules"][0]["http"]["paths"]]
    assert [match["path"]["value"] for match in made.of("HTTPRoute")[""]["spec"]["rules"][0]["matches"]] == paths
    own = {route: any(f"{route}/".startswith(f"{path}/") for path in paths) for route in {*WITHOUT_KEY, *VLLM_ROUTES, *OTHERS}}
    assert {route for route, reached in own.items() if not reached} == WITHOUT_KEY


def test_the_world_reaches_the_routes_of_sagemaker_where_there_are_any() -> None:
    routes = {"ingress": {"enabled": True}, "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}
    made = render(merged(routes, at("config.ingress.sagemaker_routes", True)))
    paths = {path["path"] for path in made.of("Ingress")[""]["spec"]["rules"][0]["http"]["paths"]}
    assert {match["path"]["value"] for match in made.of("HTTPRoute")[""]["spec"]["rules"][0]["matches"]} == paths
    plain = render(routes).of("Ingress")[""]["spec"]["rules"][0]["http"]["paths"]
    assert paths - {path["path"] for path in plain} == {PING, INVOCATIONS}


def test_numbers_are_whole_however_large() -> None:
    """Helm holds numbers as floats, which would print as 1.048576e+07."""
    config = render(merged(at("config.ingress.max_body_bytes", 10485760), at("config.protocol.max_frame_bytes", 1 << 30))).config
    assert (config["ingress"]["max_body_bytes"], config["protocol"]["max_frame_bytes"]) == (10485760, 1 << 30)


def test_the_runbook_forwards_to_the_services_port_by_its_name() -> None:
    """The number is a value."""
    runbook = (CHART.parents[1] / "docs" / "runbook.md").read_text(encoding="utf-8")
    (port,) = render(at("service.port", 81)).of("Service")[""]["spec"]["ports"]
    assert set(re.findall(r"port-forward svc/\$NAME \d+:(\w+)", runbook)) == {port["name"]}


NAMES = (
    *("ingress.className", "ingress.tlsSecretName", "head.priorityClassName", "modelPods.runtimeClassName"),
    *("rayToken.existingSecret", "clusterToken.existingSecret", "apiKeys.existingSecret"),
    *(
        "weights.storageClass",
        "weights.s3Region",
        "weights.huggingFaceTokenSecret",
        "gcsFaultTolerance.redis.persistence.storageClass",
    ),
    *("networkPolicies.operatorNamespace", "networkPolicies.prometheusNamespace"),
)


def numbers(value: Any) -> Iterator[Any]:
    """Yield what is no text, however deep."""
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from numbers(entry)
    elif not isinstance(value, str):
        yield value


def test_text_that_looks_like_a_number_stays_text() -> None:
    gpu = models({"name": "m", "model": "/opt/m", "device": "cuda", "gpus_per_replica": 1})
    downloads = at("weights", {"enabled": True, "downloads": [HUB, S3]})
    on = merged(downloads, MONITORS, gpu, at("ingress", {"enabled": True, "hosts": ["h"]}), at("image.pullSecrets", ["777"]))
    own = render(merged(on, at("gcsFaultTolerance.enabled", True), *(at(path, "777") for path in NAMES)))
    outside = {"enabled": True, "address": "redis://r", "username": "777", "existingSecret": "777", "existingSecretKey": "777"}
    theirs = render(merged(at("gcsFaultTolerance", outside), at("weights", {"enabled": True, "existingClaim": "777"})))
    assert own.text.count("777") >= len(NAMES)
    assert 777 not in [*numbers(own.objects), *numbers(theirs.objects)]


def test_rays_head_trusts_the_images_authorities_with_a_redis_over_tls_unless_told_others() -> None:
    """KubeRay's job that cleans Redis has the environment of the head's container."""
    own = at("head.extraEnv", [{"name": "RAY_REDIS_CA_CERT", "value": "/own.crt"}])
    plain = {"gcsFaultTolerance": {"enabled": True, "address": "redis://r"}}
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    for values, expected in ((OUTSIDE, bundle), (merged(OUTSIDE, own), "/own.crt"), (plain, None), ({}, None)):
        made = render(values)
        assert made.environment("head").get("RAY_REDIS_CA_CERT") == expected
        assert "RAY_REDIS_CA_CERT" not in made.environment("ingress")


@pytest.mark.parametrize("key", ["apiServerCidrs", "weightsCidrs", "redisCidrs"])
def test_a_policy_takes_ranges_of_ipv6(key: str) -> None:
    made = render(merged(LOADED, OUTSIDE, at(f"networkPolicies.{key}", ["::/0", "fd00::/8"])))
    blocks = [
        p["ipBlock"]
        for o in made.of("NetworkPolicy").values()
        for rule in o["spec"].get("egress", [])
        for p in rule.get("to", [])
        if "ipBlock" in p
    ]
    assert [block["cidr"] for block in blocks if ":" in block["cidr"]] == ["::/0", "fd00::/8"]
    excepted = [block["except"] for block in blocks if block["cidr"] == "::/0" and "except" in block]
    assert excepted == ([["fd00:ec2::254/128"]] if key == "weightsCidrs" else [])


def test_serve_app_check_reads_the_numbers_that_helm_writes() -> None:
    made = render(at("config.protocol.handshake_timeout_s", 1e-7))
    assert "handshake_timeout_s: 1e-07" in made.text
    assert list(manifest_problems(made.text, client_s=None, load_balancer_idle_s=None)) == []


def test_generated_secrets_are_long_and_differ() -> None:
    secrets = render(at("gcsFaultTolerance.enabled", True)).of("Secret")
    values = [secrets[name]["stringData"][key] for name, key in SECRETS.items()]
    assert min(map(len, values)) >= 43
    assert len(set(values)) == len(values)


def test_renderings_are_equal_when_every_secret_is_given() -> None:
    """A GitOps tool renders without a cluster, again and again, and applies what differs."""
    given = {key: {"existingSecret": "s"} for key in ("apiKeys", "clusterToken", "rayToken")}
    values = merged(given, LOADED, MONITORS, OUTSIDE, at("priorityClasses.create", True), at("modelPods.headroom.pods", 1))
    again = render(merged(values, at("global", {"again": True})))
    assert again.text == render(values).text
    own = merged(given, at("gcsFaultTolerance", {"enabled": True, "existingSecret": "s"}))
    assert render(merged(own, at("global", {"again": True}))).text == render(own).text


SECRETS = {"cluster-token": "token", "ray-token": "auth_token", "api-keys": "keys", "redis": "password"}
MODEL = {"name": "m", "model": "/opt/m"}
LOGS = {"RAY_LOG_TO_STDERR": "1", "RAY_ROTATION_MAX_BYTES": "33554432", "RAY_ROTATION_BACKUP_COUNT": "2"}


@pytest.mark.parametrize("group", ["head", "ingress", "model"])
def test_logs_are_kubectls_and_cannot_fill_tmp(group: str) -> None:
    assert render().environment(group).items() >= LOGS.items()


@pytest.mark.parametrize(
    ("bounds", "keep", "left"),
    [
        *[((1, 1), False, None), ((1, 2), False, None), ((2, 2), False, 1), ((2, 8), False, 1), ((5, 5), False, 4)],
        *[((1, 1), True, 1), ((1, 2), True, 1), ((2, 8), True, 1), ((5, 9), True, 4)],
    ],
    ids=str,
)
def test_a_drain_leaves_all_but_one_of_the_least_and_the_last_one_if_asked(
    bounds: tuple[int, int], keep: bool, left: int | None
) -> None:
    replicas = dict(zip(("min", "max"), bounds, strict=True))
    made = render(
        merged(
            models(MODEL | {"replicas": replicas}),
            at("config.ingress.replicas", replicas),
            at("podDisruptionBudgets.keepLast", keep),
        )
    )
    budgets = {name: budget["spec"]["minAvailable"] for name, budget in made.of("PodDisruptionBudget").items()}
    assert budgets == ({} if left is None else {"ingress": left, "model-m": left})


@pytest.mark.parametrize(("seconds", "has_hook"), [(1, True), (0, False)])
def test_a_sleep_of_no_second_is_no_hook(seconds: int, has_hook: bool) -> None:
    """Kubernetes up to 1.32 refuses a hook that sleeps 0 seconds."""
    assert ("lifecycle" in render(at("timeouts.preStopSleepSeconds", seconds)).container("ingress")) is has_hook


def test_a_model_pod_drains_at_the_notice_and_sleeps_for_no_kube_proxy() -> None:
    """Of the 120 s of a spot notice a sleep would let the replica take new requests for its length."""
    made = render(merged(models(MODEL), at("timeouts.preStopSleepSeconds", 15), at("head.preStopSleepSeconds", 30)))
    assert "lifecycle" not in made.container("model-m")
    assert made.pod("model-m")["terminationGracePeriodSeconds"] == made.pod("ingress")["terminationGracePeriodSeconds"]


def test_two_releases_under_one_parent_select_their_own_pods_by_their_own_names() -> None:
    made = [render(at("fullnameOverride", name)) for name in ("chat", "true")]
    assert [r.objects[-1]["metadata"]["labels"]["app.kubernetes.io/instance"] for r in made] == ["chat", "true"]
    selectors = [o["spec"]["selector"] for r in made for o in r.objects if o["kind"] == "Service"]
    assert [s["app.kubernetes.io/instance"] for s in selectors] == ["chat", "true"]


def test_a_large_number_of_seconds_is_written_without_an_exponent() -> None:
    assert "e+0" not in render(merged(ROUTE, at("timeouts.clientSeconds", 1_000_000))).text


def test_pull_secrets_of_a_parent_chart_may_be_written_as_kubernetes_does() -> None:
    secrets = [{"name": "a"}, "b"]
    assert render(at("global.imagePullSecrets", secrets)).pod("head")["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]

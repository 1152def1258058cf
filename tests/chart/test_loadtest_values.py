"""Every value of the chart loadtest has its effect: one row per value, and no value without a row."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import yaml

from tests.chart.loadtest_chart import CHART, KEY, PODS, S3, WEB, master, render, scenario, step, template, worker
from tests.chart.places import MAPPING, MOUNT, TOLERATION, VARIABLE, VOLUME, Place, Row, images, only, policy, resources
from tests.chart.render import Object, Rendered, at, merged
from tests.chart.test_generated import leaves

RANGE = ["10.1.0.0/16"]
PEER = [{"ipBlock": {"cidr": "10.1.0.0/16"}}]


def pods(path: str, place: Any, workload: str) -> Iterator[Row]:
    """Rows that master and workers have in common."""
    yield f"{path}.priorityClassName", "p", lambda r: place(r)["priorityClassName"], "p", {}
    yield f"{path}.nodeSelector", MAPPING, lambda r: place(r)["nodeSelector"], MAPPING, {}
    yield f"{path}.tolerations", TOLERATION, lambda r: place(r)["tolerations"], TOLERATION, {}
    yield f"{path}.affinity", {"nodeAffinity": {"a": 1}}, lambda r: place(r)["affinity"]["nodeAffinity"], {"a": 1}, {}

    def metadata(r: Rendered) -> Object:
        return dict(template(r, "Job", workload)["metadata"])

    yield f"{path}.podAnnotations", MAPPING, lambda r: metadata(r)["annotations"]["a/b"], "c", {}
    yield f"{path}.podLabels", MAPPING, lambda r: metadata(r)["labels"]["a/b"], "c", {}


def arguments(name: str) -> Place:
    """The arguments of a step as a mapping of options to values."""

    def place(r: Rendered) -> Any:
        args = step(r, name)["args"]
        return dict(pairwise(args))

    return place


def claim(r: Rendered) -> Object:
    return dict(only(r.of("PersistentVolumeClaim"))["spec"])


def both(r: Rendered) -> list[Object]:
    return [step(r, "run"), worker(r)["containers"][0]]


def volume(name: str) -> Place:
    return lambda r: next(v for v in master(r)["volumes"] if v["name"] == name)


def variables(name: str) -> Place:
    return lambda r: {e["name"]: e.get("value", e.get("valueFrom")) for e in step(r, name)["env"]}


def job(r: Rendered, name: str = "1") -> Object:
    return dict(r.of("Job")[name]["spec"])


ROWS: list[Row] = [
    ("mode", "web", lambda r: (sorted(r.of("Deployment")), r.of("Job")), (["master", "worker"], {}), {}),
    ("target.url", "http://x", lambda r: variables("run")(r)["TARGET_URL"], "http://x", {}),
    ("target.existingSecret", "k", lambda r: volume("api-key")(r)["secret"]["secretName"], "k", {}),
    ("target.apiKeySecretKey", "k", lambda r: volume("api-key")(r)["secret"]["items"], [{"key": "k", "path": "key"}], KEY),
    (
        "target.urlSecretKey",
        "u",
        lambda r: variables("run")(r)["TARGET_URL"],
        {"secretKeyRef": {"name": "s", "key": "u"}},
        merged(KEY, at("target.url", "")),
    ),
    ("scenario", {"seed": 1000000}, scenario, {"name": "s", "arrival": {"law": "poisson", "rate": 4}, "seed": 1000000}, {}),
    ("job.run", "nightly", lambda r: sorted(r.of("Job")), ["nightly", "nightly-workers"], {}),
    (
        "job.activeDeadlineSeconds",
        9999,
        lambda r: [job(r, n)["activeDeadlineSeconds"] for n in ("1", "1-workers")],
        [9999, 9999],
        {},
    ),
    ("job.workersWaitSeconds", 7, lambda r: arguments("run")(r)["--wait-s"], "7", {}),
    ("job.ttlSecondsAfterFinished", 7, lambda r: [job(r, n)["ttlSecondsAfterFinished"] for n in ("1", "1-workers")], [7, 7], {}),
    *images("image", lambda r: step(r, "run"), {}, name="localhost/serve-app"),
    ("image.pullPolicy", "Never", lambda r: step(r, "run")["imagePullPolicy"], "Never", {}),
    (
        "image.pullSecrets",
        ["p"],
        lambda r: [master(r)["imagePullSecrets"], worker(r)["imagePullSecrets"]],
        [[{"name": "p"}]] * 2,
        {},
    ),
    *resources("master.resources", lambda r: step(r, "run")["resources"]),
    *pods("master", master, "1"),
    (
        "workers.replicas",
        3,
        lambda r: (job(r, "1-workers")["completions"], job(r, "1-workers")["parallelism"], arguments("run")(r)["--workers"]),
        (3, 3, "3"),
        {},
    ),
    ("workers.maxRate", 1000, lambda r: scenario(r)["arrival"]["rate"], 900, at("scenario.arrival.rate", 900)),
    *resources("workers.resources", lambda r: worker(r)["containers"][0]["resources"]),
    (
        "workers.topologySpread",
        "DoNotSchedule",
        lambda r: worker(r)["topologySpreadConstraints"][0]["whenUnsatisfiable"],
        "DoNotSchedule",
        {},
    ),
    *pods("workers", worker, "1-workers"),
    ("extraEnv", [VARIABLE], lambda r: [c["env"][-1] for c in both(r)], [VARIABLE] * 2, {}),
    ("extraVolumes", [VOLUME], lambda r: [master(r)["volumes"][-1], worker(r)["volumes"][-1]], [VOLUME] * 2, {}),
    (
        "extraVolumeMounts",
        [MOUNT],
        lambda r: [c["volumeMounts"][-1] for c in both(r)],
        [MOUNT] * 2,
        at("extraVolumes", [VOLUME]),
    ),
    (
        "results.persistence.enabled",
        False,
        lambda r: (volume("results")(r), r.of("Deployment")),
        ({"name": "results", "emptyDir": {"sizeLimit": "4Gi"}}, {}),
        at("results.s3.uri", "s3://b/p"),
    ),
    (
        "results.persistence.existingClaim",
        "c",
        lambda r: (volume("results")(r)["persistentVolumeClaim"], r.of("PersistentVolumeClaim")),
        ({"claimName": "c"}, {}),
        {},
    ),
    ("results.persistence.storageClass", "fast", lambda r: claim(r)["storageClassName"], "fast", {}),
    (
        "results.persistence.accessMode",
        "ReadWriteMany",
        lambda r: (claim(r)["accessModes"], "affinity" in master(r)),
        (["ReadWriteMany"], False),
        {},
    ),
    ("results.persistence.size", "1Ti", lambda r: claim(r)["resources"], {"requests": {"storage": "1Ti"}}, {}),
    ("results.persistence.keep", False, lambda r: only(r.of("PersistentVolumeClaim"))["metadata"].get("annotations"), None, {}),
    ("results.emptyDirSize", "3Mi", lambda r: volume("results")(r)["emptyDir"], {"sizeLimit": "3Mi"}, S3),
    ("results.s3.uri", "s3://c/d/", lambda r: step(r, "upload")["args"], ["/results/$(POD_NAME)", "s3://c/d/$(POD_NAME)"], {}),
    ("results.s3.region", "eu-west-1", lambda r: variables("upload")(r)["AWS_REGION"], "eu-west-1", S3),
    ("results.s3.endpoint", "https://s", lambda r: variables("upload")(r)["AWS_ENDPOINT_URL_S3"], "https://s", S3),
    *images("results.s3.image", lambda r: step(r, "upload"), S3, name="public.ecr.aws/aws-cli/aws-cli"),
    ("results.s3.image.pullPolicy", "Never", lambda r: step(r, "upload")["imagePullPolicy"], "Never", S3),
    *resources("results.s3.resources", lambda r: step(r, "upload")["resources"], S3),
    (
        "report.enabled",
        False,
        lambda r: (r.of("Deployment"), sorted(r.of("Service")), "affinity" in master(r)),
        ({}, ["1-master"], False),
        {},
    ),
    *resources("report.resources", lambda r: template(r, "Deployment", "report")["spec"]["containers"][0]["resources"]),
    ("serviceAccount.annotations", MAPPING, lambda r: r.of("ServiceAccount")[""]["metadata"]["annotations"], MAPPING, {}),
    ("networkPolicies.enabled", False, lambda r: r.of("NetworkPolicy"), {}, {}),
    ("networkPolicies.targets", PEER, lambda r: policy("target")(r)["egress"][0]["to"], PEER, {}),
    (
        "networkPolicies.targetPorts",
        [444],
        lambda r: policy("target")(r)["egress"][0]["ports"],
        [{"protocol": "TCP", "port": 444}],
        {},
    ),
    ("networkPolicies.viewers", PEER, lambda r: policy("viewers")(r)["ingress"][0]["from"], PEER, {}),
    ("networkPolicies.dns", PEER, lambda r: policy("dns")(r)["egress"][0]["to"], PEER, {}),
    ("networkPolicies.s3Cidrs", RANGE, lambda r: policy("s3")(r)["egress"][0]["to"], PEER, S3),
    ("networkPolicies.apiServerCidrs", RANGE, lambda r: policy("api-server")(r)["egress"][0]["to"], PEER, PODS),
    (
        "networkPolicies.apiServerPorts",
        [444],
        lambda r: policy("api-server")(r)["egress"][0]["ports"],
        [{"protocol": "TCP", "port": 444}],
        PODS,
    ),
    ("test.timeoutSeconds", 99, lambda r: r.of("Pod")["test"]["spec"]["activeDeadlineSeconds"], 99, {}),
    *resources("test.resources", lambda r: r.of("Pod")["test"]["spec"]["initContainers"][1]["resources"]),
]


@pytest.mark.parametrize(("path", "value", "place", "expected", "context"), ROWS, ids=[row[0] for row in ROWS])
def test_a_value_shows_in_its_place(path: str, value: Any, place: Place, expected: Any, context: dict[str, Any]) -> None:
    assert place(render(merged(context, at(path, value)))) == expected


def test_every_value_has_a_row_and_every_row_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert sorted(row[0] for row in ROWS) == sorted(".".join(path) for path in leaves(values))


def test_the_web_ui_takes_the_same_values() -> None:
    found = render(merged(WEB, KEY, at("workers.replicas", 3), at("target.url", "http://x")))
    assert found.of("Deployment")["worker"]["spec"]["replicas"] == 3
    options = arguments("master")(found)
    assert (options["--host"], options["--scenario"], options["--api-key-file"]) == (
        "$(TARGET_URL)",
        "/etc/loadtest/scenario/scenario.yaml",
        "/etc/loadtest/api-key/key",
    )
    assert [c["name"] for c in master(found)["containers"]] == ["master", "report"]
    assert [p["port"] for p in found.of("Service")[""]["spec"]["ports"]] == [8089, 8090]

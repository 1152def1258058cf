"""The chart batch is one Job that continues where a killed pod stopped, restricted, and with the options that the command knows."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli.batch import run as command
from tests.chart.places import MAPPING, MOUNT, TOLERATION, VARIABLE, VOLUME, Row, images, only, resources
from tests.chart.render import Object, Refused, Rendered, at, check_readme, merged, types_of
from tests.chart.render import render as render_chart
from tests.chart.schemas import check_with_kubeconform
from tests.chart.test_generated import leaves
from tests.chart.test_network import CLIENT, DNS, NEIGHBOUR, NODE_CREDENTIALS, POD_IDENTITY, End, reaches
from tests.chart.test_security import beyond_restricted, not_restricted
from tools.batch_chart_schema import CHART, values_schema
from tools.chart_schema import descriptions

CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
BASE = merged(at("target.url", "http://demo"), at("batch.input", "in.jsonl"))
URL = at("batch.input", "https://h/in.jsonl")
KEY = at("target.existingSecret", "s")
PEER = [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
TCP_444 = [{"protocol": "TCP", "port": 444}]


def render(values: dict[str, Any] | None = None, **options: Any) -> Rendered:
    return render_chart(merged(BASE, values or {}), chart=CHART, **options)


def job(r: Rendered) -> Object:
    return dict(only(r.of("Job"))["spec"])


def pod(r: Rendered) -> Object:
    return dict(job(r)["template"]["spec"])


def container(r: Rendered) -> Object:
    return dict(pod(r)["containers"][0])


def volume(r: Rendered, name: str) -> Object:
    return next(v for v in pod(r)["volumes"] if v["name"] == name)


def claim(r: Rendered) -> Object:
    return only(r.of("PersistentVolumeClaim"))


def egress(r: Rendered) -> list[Any]:
    return list(only(r.of("NetworkPolicy"))["spec"]["egress"])


ROWS: list[Row] = [
    ("target.url", "http://x", lambda r: container(r)["args"][2], "--url=http://x", {}),
    ("target.existingSecret", "k", lambda r: volume(r, "api-key")["secret"]["secretName"], "k", {}),
    ("target.apiKeySecretKey", "k", lambda r: volume(r, "api-key")["secret"]["items"], [{"key": "k", "path": "key"}], KEY),
    ("batch.input", "/a.csv", lambda r: container(r)["args"][0], "/a.csv", {}),
    ("batch.output", "o.jsonl", lambda r: container(r)["args"][1], "--output=/data/o.jsonl", {}),
    ("batch.options", ["-p", "a=1"], lambda r: container(r)["args"][3:], ["-p", "a=1"], {}),
    ("job.run", "nightly", lambda r: list(r.of("Job")), ["nightly"], {}),
    ("job.backoffLimit", 7, lambda r: job(r)["backoffLimit"], 7, {}),
    ("job.activeDeadlineSeconds", 7, lambda r: job(r)["activeDeadlineSeconds"], 7, {}),
    ("job.ttlSecondsAfterFinished", 7, lambda r: job(r)["ttlSecondsAfterFinished"], 7, {}),
    *images("image", container, {}, name="localhost/serve-app"),
    ("image.pullPolicy", "Never", lambda r: container(r)["imagePullPolicy"], "Never", {}),
    ("image.pullSecrets", ["p"], lambda r: pod(r)["imagePullSecrets"], [{"name": "p"}], {}),
    (
        "data.existingClaim",
        "c",
        lambda r: (volume(r, "data")["persistentVolumeClaim"], r.of("PersistentVolumeClaim")),
        ({"claimName": "c"}, {}),
        {},
    ),
    ("data.storageClass", "fast", lambda r: claim(r)["spec"]["storageClassName"], "fast", {}),
    ("data.accessMode", "ReadWriteMany", lambda r: claim(r)["spec"]["accessModes"], ["ReadWriteMany"], {}),
    ("data.size", "1Ti", lambda r: claim(r)["spec"]["resources"], {"requests": {"storage": "1Ti"}}, {}),
    ("data.keep", False, lambda r: claim(r)["metadata"].get("annotations"), None, {}),
    *resources("pod.resources", lambda r: container(r)["resources"]),
    ("pod.priorityClassName", "p", lambda r: pod(r)["priorityClassName"], "p", {}),
    ("pod.nodeSelector", MAPPING, lambda r: pod(r)["nodeSelector"], MAPPING, {}),
    ("pod.tolerations", TOLERATION, lambda r: pod(r)["tolerations"], TOLERATION, {}),
    ("pod.affinity", {"nodeAffinity": {"a": 1}}, lambda r: pod(r)["affinity"], {"nodeAffinity": {"a": 1}}, {}),
    ("pod.annotations", MAPPING, lambda r: job(r)["template"]["metadata"]["annotations"], MAPPING, {}),
    ("pod.labels", MAPPING, lambda r: job(r)["template"]["metadata"]["labels"]["a/b"], "c", {}),
    ("serviceAccount.annotations", MAPPING, lambda r: only(r.of("ServiceAccount"))["metadata"]["annotations"], MAPPING, {}),
    ("extraEnv", [VARIABLE], lambda r: container(r)["env"][-1], VARIABLE, {}),
    ("extraVolumes", [VOLUME], lambda r: pod(r)["volumes"][-1], VOLUME, {}),
    ("extraVolumeMounts", [MOUNT], lambda r: container(r)["volumeMounts"][-1], MOUNT, at("extraVolumes", [VOLUME])),
    ("networkPolicies.enabled", False, lambda r: r.of("NetworkPolicy"), {}, {}),
    ("networkPolicies.targets", PEER, lambda r: egress(r)[0]["to"], PEER, {}),
    ("networkPolicies.targetPorts", [444], lambda r: egress(r)[0]["ports"], TCP_444, {}),
    ("networkPolicies.dns", PEER, lambda r: egress(r)[1]["to"], PEER, {}),
    ("networkPolicies.inputCidrs", ["10.1.0.0/16"], lambda r: egress(r)[2]["to"], PEER, URL),
    ("networkPolicies.inputPorts", [444], lambda r: [p["port"] for p in egress(r)[2]["ports"]], [444, 443], URL),
]


@pytest.mark.parametrize(("path", "value", "place", "expected", "context"), ROWS, ids=[row[0] for row in ROWS])
def test_a_value_shows_in_its_place(path: str, value: Any, place: Any, expected: Any, context: dict[str, Any]) -> None:
    assert place(render(merged(context, at(path, value)))) == expected


def test_every_value_has_a_row_and_a_description() -> None:
    paths = [".".join(path) for path in leaves(VALUES)]
    assert sorted(row[0] for row in ROWS) == sorted(paths)
    described = {path for path, _ in descriptions(CHART)}
    assert [p for p in leaves(VALUES) if not any(p[:depth] in described for depth in range(1, len(p) + 1))] == []


def test_schema_and_readme_are_those_that_the_values_make() -> None:
    assert json.loads((CHART / "values.schema.json").read_text()) == values_schema(), "run `make chart-files`"
    check_readme(CHART)


@pytest.mark.parametrize("file", CI_FILES, ids=lambda f: f.stem)
def test_kubeconform_accepts_the_objects_and_the_pod_is_restricted(file: Path, tmp_path: Path) -> None:
    found = render_chart(files=(file,), chart=CHART)
    ((_, template),) = found.pod_templates()
    assert [*not_restricted(template["spec"]), *beyond_restricted(template["spec"])] == []
    check_with_kubeconform(found.text, len(found.objects), tmp_path)


def test_a_killed_pod_has_a_successor_and_a_batch_with_failed_lines_has_none() -> None:
    spec = job(render())
    assert (spec["template"]["spec"]["restartPolicy"], spec["podReplacementPolicy"]) == ("Never", "Failed")
    rules = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"]}
    assert rules["FailJob"]["onExitCodes"] == {"containerName": container(render())["name"], "operator": "In", "values": [2, 3]}
    assert rules["Ignore"]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_the_command_is_one_and_knows_its_options() -> None:
    made = container(render(KEY))
    assert made["command"] == ["serve-app", "batch", "run"]
    given = {a.partition("=")[0].removeprefix("--").replace("-", "_") for a in made["args"] if a.startswith("--")}
    assert given == {"output", "url", "api_key_file"}
    assert given <= inspect.signature(command).parameters.keys()


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("in.jsonl", "/data/in.jsonl"),
        ("/input/in.csv", "/input/in.csv"),
        ("https://h/in.jsonl.gz", "https://h/in.jsonl.gz"),
        ("s3://b/in.jsonl?region=r", "s3://b/in.jsonl?region=r"),
    ],
)
def test_an_input_is_on_the_volume_anywhere_else_or_a_url(given: str, path: str) -> None:
    assert container(render(at("batch.input", given)))["args"][0] == path


def test_answers_go_to_an_object_store_and_their_journal_to_the_volume() -> None:
    made = render(at("batch.output", "s3://b/run/out.jsonl?region=r"))
    assert container(made)["args"][1:3] == ["--output=s3://b/run/out.jsonl?region=r", "--journal=/data/out.jsonl.journal"]
    assert reaches(made, OURS, OUTSIDE, 443)


CHECKS: list[tuple[dict[str, Any], str]] = [
    (at("target.url", ""), "target.url is empty"),
    (at("batch.input", ""), "batch.input is empty"),
    (
        at("batch.input", "ftp://b/in.jsonl"),
        "batch.input is ftp://b/in.jsonl, and the image reads s3://, gs://, http:// and https:// only",
    ),
    (at("batch.output", "https://b/o.jsonl"), "at '/batch/output': 'https://b/o.jsonl' does not match pattern"),
    (at("batch", {"input": "a.jsonl", "output": "a.jsonl"}), "are both a.jsonl"),
    (at("image.tag", "latest"), "image.tag is latest"),
    (at("extraEnv", [{"name": "API_KEY", "value": "x"}]), "extraEnv has API_KEY with a value"),
    (at("target.url", "http://u:p@demo"), "has credentials in it"),
]


@pytest.mark.parametrize(("values", "said"), CHECKS, ids=[said for _, said in CHECKS])
def test_values_that_cannot_work_are_refused_with_the_way_out(values: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as caught:
        render(values)
    assert said in str(caught.value)


def test_a_name_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(Refused, match="has 37 characters"):
        render(release="a" * 37)


OURS = End(labels=(("app.kubernetes.io/name", "batch"), ("app.kubernetes.io/instance", "demo")))
TARGET, OUTSIDE = End("serving", (("app", "x"),)), End(address="3.3.3.3")
GKE_METADATA = End(address="169.254.169.252")


def test_the_pod_reaches_its_service_and_nothing_else_and_nobody_reaches_it() -> None:
    found = render()
    assert reaches(found, OURS, TARGET, 8010, "TCP")
    assert reaches(found, OURS, DNS, 53, "UDP")
    assert [port for port in (80, 443, 8265) if reaches(found, OURS, TARGET, port)] == []
    assert not reaches(found, OURS, OUTSIDE, 443)
    assert [end for end in (CLIENT, NEIGHBOUR) if reaches(found, end, OURS, 8010)] == []
    assert reaches(render(URL), OURS, OUTSIDE, 443)
    assert not reaches(render(URL), OURS, NODE_CREDENTIALS, 443)


@pytest.mark.parametrize(
    ("batch", "ports"),
    [
        ({"input": "http://h/in.jsonl"}, [80, 443]),
        ({"input": "http://h:8080/in.jsonl?at=https://x:1"}, [443, 8080]),
        ({"input": "https://h:8443/in.jsonl"}, [443, 8443]),
        ({"input": "https://h:8443?name=in.jsonl"}, [443, 8443]),
        ({"output": "s3://b/o.jsonl?region=r"}, [443]),
        ({"output": "s3://b/o.jsonl?region=r&endpoint_override=minio:9000&scheme=http"}, [443, 9000]),
        ({"output": "s3://b/o.jsonl?endpoint_override=minio%3A9000"}, [443, 9000]),
        ({"output": "s3://b/o.jsonl?scheme=http&endpoint_override=minio"}, [80, 443]),
        ({"input": "https://h:8443/in.jsonl", "output": "gs://b/o.jsonl?endpoint_override=gcs:4443"}, [443, 4443, 8443]),
    ],
    ids=str,
)
def test_the_pod_reaches_a_url_at_its_port(batch: dict[str, str], ports: list[int]) -> None:
    found = render(at("batch", batch))
    assert [port for port in (80, 443, 4443, 8080, 8443, 9000) if reaches(found, OURS, OUTSIDE, port)] == ports


@pytest.mark.parametrize(
    ("given", "pod_identity", "metadata"),
    [("https://h/in.jsonl", False, False), ("s3://b/in.jsonl", True, False), ("gs://b/in.jsonl", False, True)],
)
def test_the_pod_reaches_the_credentials_of_its_object_store(given: str, pod_identity: bool, metadata: bool) -> None:
    found = render(at("batch.input", given))
    assert reaches(found, OURS, POD_IDENTITY, 80) is pod_identity
    assert [reaches(found, OURS, NODE_CREDENTIALS, 80), reaches(found, OURS, GKE_METADATA, 988)] == [metadata] * 2
    assert not reaches(found, OURS, NODE_CREDENTIALS, 443)


@pytest.mark.parametrize("release", ["20260730", "true"])
def test_a_release_may_be_called_like_a_number(release: str) -> None:
    found = render(release=release)
    assert types_of(found.objects) == types_of(render().objects)
    assert {o["metadata"]["labels"]["app.kubernetes.io/instance"] for o in found.objects} == {release}

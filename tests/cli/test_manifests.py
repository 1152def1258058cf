"""`serve-app check` of Kubernetes manifests checks the whole chain of timeouts, and the configuration inside."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.errors import ConfigError


def env(**variables: int) -> list[dict[str, str]]:
    return [{"name": name, "value": str(value)} for name, value in variables.items()]


def service(*, drain_s: int = 600, unready_s: int = 1, grace_s: int = 621, delay_s: int = 660, **pod: Any) -> dict[str, Any]:
    """A RayService whose chain is in order: 600 s of drain, 611 of Serve, 611 of the node, 621 of the pod."""
    config = {"models": {"a": {"model": "/a"}}, "ingress": {"unready_s": unready_s}, "timeouts": {"drain_s": drain_s}}
    variables = env(RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=611, RAY_gcs_rpc_server_reconnect_timeout_s=700)
    spec = {"terminationGracePeriodSeconds": grace_s, "containers": [{"name": "ray", "env": variables}], **pod}
    head = {"spec": {"containers": [{"name": "ray", "lifecycle": {"preStop": {"sleep": {"seconds": 15}}}}]}}
    group = {"template": {"metadata": {"labels": {"app.kubernetes.io/component": "ingress"}}, "spec": spec}}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "demo"},
        "spec": {
            "serveConfigV2": yaml.safe_dump({"applications": [{"name": "demo", "args": config}]}),
            "rayClusterDeletionDelaySeconds": delay_s,
            "rayClusterConfig": {"headGroupSpec": {"template": head}, "workerGroupSpecs": [group]},
        },
    }


def checked(tmp_path: Path, *documents: dict[str, Any], options: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    result = CliRunner().invoke(app, ["check", str(file), *options])
    errors = [line for line in result.output.splitlines() if line.startswith("error: ")]
    return result.exit_code, [line.removeprefix(f"error: {file}: ").split(":")[1].strip() for line in errors]


def test_a_sound_chain_is_valid(tmp_path: Path) -> None:
    assert checked(tmp_path, {"kind": "Service", "metadata": {"name": "demo"}}, service())[0] == 0


@pytest.mark.parametrize(
    ("strategy", "gpus", "said"),
    [
        ({}, "4", "waits for 8 GPUs"),
        ({}, "0.5", "waits for 1 GPU beside"),
        ({"type": "NewCluster"}, "4", "waits for 8 GPUs"),
        ({"type": "None"}, "4", ""),
        ({}, "0", ""),
    ],
)
def test_an_upgrade_that_waits_for_gpus_is_noted(tmp_path: Path, strategy: dict[str, str], gpus: str, said: str) -> None:
    manifest = service()
    manifest["spec"]["upgradeStrategy"] = strategy
    group = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"] += [group | {"replicas": 2, "rayStartParams": {"num-gpus": gpus}}]
    file = tmp_path / "m.yaml"
    file.write_text(yaml.safe_dump(manifest))
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 0, result.output
    notes = [line for line in result.output.splitlines() if line.startswith("note: ")]
    assert len(notes) == bool(said)
    assert all(said in note for note in notes)


def test_a_hook_and_a_probe_count(tmp_path: Path) -> None:
    hook = {"preStop": {"sleep": {"seconds": 5}}}
    container = {**service()["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]}
    container |= {"lifecycle": hook, "readinessProbe": {"periodSeconds": 2}}
    rules = ["unready-outlasts-probe", "pod-grace-outlasts-node-drain", "head-outlasts-worker-sleep"]
    assert checked(tmp_path, service(containers=[container])) == (1, rules)


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"grace_s": 60}, ["pod-grace-outlasts-node-drain"]),
        ({"delay_s": 60}, ["old-cluster-outlasts-drain"]),
        ({"drain_s": 620}, ["node-drain-outlasts-serve", "old-cluster-outlasts-drain"]),
        ({"nodeSelector": {"karpenter.sh/capacity-type": "spot"}}, ["spot-notice-outlasts-drain"]),
        ({"containers": [{"name": "ray"}]}, ["node-drain-outlasts-serve", "gcs-reconnect-outlasts-drain"]),
    ],
)
def test_a_link_that_is_too_short_is_refused(tmp_path: Path, changes: dict[str, Any], rules: list[str]) -> None:
    assert checked(tmp_path, service(**changes)) == (1, rules)


def test_the_idle_timeout_of_an_aws_load_balancer_is_in_its_annotation(tmp_path: Path) -> None:
    annotations = {"alb.ingress.kubernetes.io/load-balancer-attributes": "a.b=c,idle_timeout.timeout_seconds=30"}
    ingress = {"kind": "Ingress", "metadata": {"name": "demo", "annotations": annotations}}
    assert checked(tmp_path, ingress, service()) == (1, ["load-balancer-outlasts-silence"])
    assert checked(tmp_path, ingress, service(), options=("--load-balancer-idle-s", "60"))[0] == 0


@pytest.mark.parametrize(
    ("annotations", "rules"),
    [
        ({}, []),
        ({"healthcheck-interval-seconds": "5"}, []),
        ({"healthcheck-interval-seconds": "6"}, ["unready-outlasts-health-check"]),
        ({"healthcheck-interval-seconds": "5", "unhealthy-threshold-count": "3"}, ["unready-outlasts-health-check"]),
    ],
)
def test_the_health_check_of_an_aws_load_balancer_is_in_its_annotations(
    tmp_path: Path, annotations: dict[str, str], rules: list[str]
) -> None:
    annotated = {f"alb.ingress.kubernetes.io/{key}": value for key, value in annotations.items()}
    ingress = {"kind": "Ingress", "metadata": {"name": "demo", "annotations": annotated}}
    assert checked(tmp_path, ingress, service(drain_s=589, unready_s=12)) == (int(bool(rules)), rules)


def test_the_configuration_inside_is_checked_too(tmp_path: Path) -> None:
    wrong = service()
    wrong["spec"]["serveConfigV2"] = yaml.safe_dump({"applications": [{"name": "demo", "args": {"models": {}, "x": 1}}]})
    assert checked(tmp_path, wrong) == (1, ["x", "models"])


def test_manifests_without_a_rayservice_and_broken_ones_are_refused(tmp_path: Path) -> None:
    assert checked(tmp_path, {"kind": "Service", "metadata": {"name": "demo"}})[0] == 1
    broken = service()
    del broken["spec"]["serveConfigV2"]
    file = tmp_path / "broken.yaml"
    file.write_text(yaml.safe_dump(broken))
    result = CliRunner().invoke(app, ["check", str(file)])
    assert "RayService demo: has no serveConfigV2" in result.output
    file.write_text("kind: RayService\n\t-")
    result = CliRunner().invoke(app, ["check", str(file)])
    assert isinstance(result.exception, Exception)
    assert str(result.exception).startswith("not valid YAML")


def said_of(tmp_path: Path, text: str) -> str:
    """Return the one line that `serve-app check` says of a file."""
    file = tmp_path / "manifests.yaml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["check", str(file)])
    if isinstance(result.exception, ConfigError):
        return str(result.exception).removeprefix(f"{file}: ")
    assert (result.exit_code, type(result.exception), len(result.output.splitlines())) == (1, SystemExit, 1), result.exception
    return result.output.removeprefix(f"error: {file}: ").strip()


SPEC = ("spec",)
GROUP = (*SPEC, "rayClusterConfig", "workerGroupSpecs", 0, "template")
POD = (*GROUP, "spec")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("metadata",), None, "RayService: has no metadata.name; give it one"),
        (("apiVersion",), None, "RayService: has no apiVersion; give it one"),
        (
            ("metadata", "name"),
            123,
            "RayService: has 123 as its metadata.name, but should have text; put it in quotes, or correct it",
        ),
        (SPEC, None, "RayService demo: has no serveConfigV2; validate it"),
        (SPEC, [], "RayService demo: spec: is [], but should be a mapping; validate it"),
        ((*SPEC, "serveConfigV2"), None, "RayService demo: serveConfigV2: is None, but should be text; write it below"),
        ((*SPEC, "serveConfigV2"), "", "RayService demo: has no applications; validate it"),
        ((*SPEC, "serveConfigV2"), "[1]", "RayService demo: serveConfigV2: is [1], but should be a mapping; validate it"),
        ((*SPEC, "serveConfigV2"), "a: [", "RayService demo: line 1, column 5: not valid YAML: "),
        ((*SPEC, "serveConfigV2"), "applications:", "RayService demo: has no applications; validate it"),
        (
            (*SPEC, "serveConfigV2"),
            "applications: [x]",
            "RayService demo: serveConfigV2.applications[0]: is 'x', but should be a mapping",
        ),
        ((*POD, "containers"), [], "RayService demo: workerGroupSpecs[0].template.spec.containers: is empty; validate it"),
        ((*POD, "containers", 0, "env", 0, "value"), "soon", "is 'soon', but should be a number; correct it, or remove it"),
        ((*POD, "containers", 0, "env", 0, "value"), "nan", "is 'nan', but should be a number; correct it, or remove it"),
        ((*POD, "terminationGracePeriodSeconds"), float("inf"), "terminationGracePeriodSeconds: is inf, but should be a number"),
        ((*POD, "containers", 0, "env", 0), "x", "RayService demo: workerGroupSpecs[0]: env: is 'x', but should be a mapping"),
        ((*POD, "terminationGracePeriodSeconds"), "long", "workerGroupSpecs[0]: terminationGracePeriodSeconds: is 'long', but"),
        ((*SPEC, "rayClusterDeletionDelaySeconds"), [], "RayService demo: rayClusterDeletionDelaySeconds: is [], but should be"),
    ],
)
def test_a_manifest_of_another_form_is_one_line(tmp_path: Path, place: tuple[Any, ...], value: Any, said: str) -> None:
    broken = service()
    part: Any = broken
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    assert said in said_of(tmp_path, yaml.safe_dump(broken))


def test_a_variable_whose_name_is_no_text_is_none_of_those_that_are_read(tmp_path: Path) -> None:
    other = service()
    other["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["env"].append({"name": []})
    assert checked(tmp_path, other) == (0, [])


def test_null_is_to_kubernetes_a_key_that_is_not_given(tmp_path: Path) -> None:
    null, absent = service(terminationGracePeriodSeconds=None, nodeSelector=None), service()
    group = null["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]
    group["metadata"]["annotations"] = null["spec"]["rayClusterDeletionDelaySeconds"] = None
    del absent["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["terminationGracePeriodSeconds"]
    del absent["spec"]["rayClusterDeletionDelaySeconds"]
    expected = (1, ["pod-grace-outlasts-node-drain", "old-cluster-outlasts-drain"])
    assert (checked(tmp_path, absent), checked(tmp_path, null, {"kind": "Service", "metadata": None})) == (expected, expected)


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        (
            {"alb.ingress.kubernetes.io/healthcheck-interval-seconds": "often"},
            "alb.ingress.kubernetes.io/healthcheck-interval-seconds: is 'often', but should be a number; correct it, or remove it",
        ),
        (["a"], "metadata.annotations: is ['a'], but should be a mapping; validate it against KubeRay's schema first"),
    ],
)
def test_annotations_of_another_form_are_one_line(tmp_path: Path, annotations: Any, said: str) -> None:
    ingress = {"kind": "Ingress", "metadata": {"name": "demo", "annotations": annotations}}
    assert said_of(tmp_path, yaml.safe_dump_all([ingress, service()])) == said


def test_a_document_that_is_no_manifest_is_one_line(tmp_path: Path) -> None:
    assert said_of(tmp_path, f"{yaml.safe_dump(service())}---\nnotes\n").startswith("document 2: is 'notes', but should be")
    assert said_of(tmp_path, f"kind: List\nitems: {'[' * 3000}") == (
        "the YAML is nested too deep; remove unneeded brackets or levels"
    )

"""`serve-app check` of Kubernetes manifests: the whole chain of timeouts, and the configuration inside."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.main import app


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

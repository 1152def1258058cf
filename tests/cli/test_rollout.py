"""`serve-app rollout` and `serve-app status` run here against an API server that speaks what they need."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.errors import ServingError
from tests.cli.helpers import cluster, pod, rayservice, redis_pod, unschedulable, warning
from tests.cli.test_manifests import service as manifest
from tests.doubles.fake_kubernetes import FakeKubernetes, serving, write_kubeconfig

DEPLOYING = cluster("demo-new", application="DEPLOYING", deployment="UPDATING")
UPGRADING = rayservice(pending=DEPLOYING, conditions={"UpgradeInProgress": "True"})
UPGRADED = rayservice(generation=2, observed=2, active=cluster("demo-new"))


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    """A cluster in which `demo` is ready, and a kubeconfig that leads to it."""
    with serving(
        FakeKubernetes(
            services={"demo": [rayservice()]},
            pods=[pod("demo-old-head", group="headgroup"), pod("demo-old-i", group="ingress"), pod("demo-old-w")],
        )
    ) as fake:
        write_kubeconfig(tmp_path / "config", fake.host)
        use(monkeypatch, tmp_path / "config")
        monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path / "cache"))
        yield fake


def use(monkeypatch: pytest.MonkeyPatch, kubeconfig: Path) -> None:
    """The client reads the variable when it is imported."""
    import kubernetes.config.kube_config

    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def run(*command: str) -> tuple[int, str]:
    """Return exit status and output; an error of ours is what `main` prints."""
    result = CliRunner().invoke(app, command)
    if isinstance(result.exception, ServingError):
        return 1, f"error: {result.exception}"
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def rollout(*options: str) -> tuple[int, list[str]]:
    code, output = run("rollout", "demo", "--poll-s", "0", *options)
    return code, output.splitlines()


def test_a_rollout_is_watched_until_the_new_cluster_is_the_active_one(kubernetes: FakeKubernetes) -> None:
    kubernetes.services["demo"] = [rayservice(generation=2), UPGRADING, UPGRADING, UPGRADED]
    kubernetes.pods.append(unschedulable("demo-new-w", "demo-new"))
    assert rollout() == (
        0,
        [
            "  KubeRay has not acted on the change yet",
            "  new cluster demo-new: 0 of 1 pods ready; demo DEPLOYING; replica-tiny UPDATING; "
            "pod demo-new-w Unschedulable: 0/1 nodes: no GPU",
            "demo: cluster demo-new is ready",
        ],
    )


def test_how_it_ended_is_json_on_demand(kubernetes: FakeKubernetes) -> None:
    kubernetes.services["demo"] = [UPGRADED]
    code, lines = rollout("--json")
    assert (code, json.loads(lines[-1])["rollout"]["kind"]) == (0, "done")


def test_the_old_state_right_after_a_change_is_not_taken_for_the_end(kubernetes: FakeKubernetes) -> None:
    in_place = rayservice(generation=2, observed=2, active=cluster("demo-old", application="DEPLOYING"))
    done = rayservice(generation=2, observed=2)
    kubernetes.services["demo"] = [done, done, in_place, done]
    code, lines = rollout()
    assert (code, lines[-1]) == (0, "demo: cluster demo-old is ready")
    assert [line.split("; ")[1] for line in lines[:-1]] == ["demo DEPLOYING"]


def test_each_pod_that_is_not_ready_has_its_reason_and_pods_with_the_same_share_it(kubernetes: FakeKubernetes) -> None:
    starting = [pod(f"demo-new-{name}", "demo-new", ready=False) for name in ("a", "b", "c")]
    starting[2]["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "ContainerCreating"}}
    kubernetes.pods += starting
    kubernetes.warnings = [
        warning("demo-new-b", "Unhealthy", "Readiness probe failed: dial tcp 10.0.0.2:8020: refused"),
        warning("demo-new-c", "FailedMount", 'MountVolume.SetUp failed for volume "weights"\nmore'),
        warning("demo-new-a", "Unhealthy", "Readiness probe failed: dial tcp 10.0.0.1:8020: refused", at="2026-11-21T00:00:09Z"),
        warning("demo-new-a", "BackOff", "an older one"),
        warning("demo-new-a", "FailedScheduling", "it has a node now", at="2026-11-21T00:00:10Z"),
    ]
    kubernetes.services["demo"] = [UPGRADING, UPGRADED]
    _, lines = rollout()
    assert lines[0].split("; ")[3:] == [
        "pods demo-new-a, demo-new-b NotReady: Readiness probe failed: dial tcp POD:8020: refused",
        'pod demo-new-c FailedMount: MountVolume.SetUp failed for volume "weights"',
    ]


def test_without_the_right_to_read_events_the_state_alone_is_told(kubernetes: FakeKubernetes) -> None:
    kubernetes.pods.append(pod("demo-new-a", "demo-new", ready=False))
    kubernetes.forbidden = ("list events",)
    kubernetes.services["demo"] = [UPGRADING, UPGRADED]
    assert rollout()[1][0].endswith("; pod demo-new-a NotReady: ray-worker not ready")


def test_a_redis_that_does_not_start_fails_the_rollout(kubernetes: FakeKubernetes) -> None:
    kubernetes.pods.append(redis_pod(reason="CrashLoopBackOff", message="back-off 40s"))
    kubernetes.services["demo"] = [rayservice(pending=DEPLOYING, redis="redis://demo-redis.llm.svc:6379")]
    code, lines = rollout()
    assert (code, lines[0]) == (
        3,
        "error: the rollout of demo has failed: pod demo-redis-0: CrashLoopBackOff: back-off 40s, exit status 137",
    )


FAILED = rayservice(
    pending=cluster("demo-new", application="DEPLOY_FAILED", deployment="DEPLOY_FAILED", message="no memory"),
    annotations={"meta.helm.sh/release-name": "demo"},
)


def test_a_failed_rollout_ends_with_3_the_reason_and_helms_way_back(kubernetes: FakeKubernetes) -> None:
    kubernetes.services["demo"] = [FAILED]
    kubernetes.helm_revisions = {9: "superseded", 11: "failed", 10: "superseded", 12: "deployed"}
    assert rollout() == (
        3,
        [
            "error: the rollout of demo has failed: replica-tiny: no memory",
            "look:     serve-app status demo --context test -n llm",
            "way back: helm rollback demo 10 --kube-context test -n llm",
        ],
    )


@pytest.mark.parametrize(
    ("revisions", "way_back"),
    [
        ({4: "superseded", 5: "deployed", 6: "failed"}, "helm rollback demo 5 --kube-context test -n llm"),
        (
            {1: "failed", 2: "deployed"},
            "none, no revision before it was deployed; change the values and upgrade, or: helm uninstall demo ",
        ),
        ({}, "helm history demo --kube-context test -n llm, then helm rollback demo REVISION --kube-context test -n llm"),
    ],
)
def test_the_way_back_is_the_last_revision_that_was_deployed(
    kubernetes: FakeKubernetes, revisions: dict[int, str], way_back: str
) -> None:
    kubernetes.services["demo"] = [FAILED]
    kubernetes.helm_revisions = revisions
    assert rollout()[1][-1].startswith(f"way back: {way_back}")


def test_without_the_right_to_list_secrets_the_way_back_says_how_to_find_the_revision(kubernetes: FakeKubernetes) -> None:
    kubernetes.services["demo"] = [FAILED]
    kubernetes.forbidden = ("list secrets",)
    assert rollout()[1][-1].startswith("way back: helm history demo ")


def test_a_rollout_that_takes_too_long_ends_with_4(kubernetes: FakeKubernetes) -> None:
    kubernetes.services["demo"] = [UPGRADING]
    code, lines = rollout("--timeout-s", "1", "--poll-s", "0.1")
    assert code == 4
    assert lines[-3].startswith("error: the rollout of demo has not ended within 1 s: new cluster demo-new: ")


def test_without_nodes_for_a_new_cluster_the_way_back_makes_kuberay_forget_it(kubernetes: FakeKubernetes) -> None:
    kubernetes.services["demo"] = [UPGRADING]
    kubernetes.pods.append(unschedulable("demo-new-w", "demo-new"))
    code, lines = rollout("--timeout-s", "1", "--poll-s", "0.1")
    assert code == 4
    assert lines[-2].startswith("way back: ")
    forget = """--subresource=status --type=merge -p '{"status": {"pendingServiceStatus": null}}'"""
    assert lines[-1] == f"and then: kubectl patch rayservice demo --context test -n llm {forget}"


def write_manifests(tmp_path: Path, **changes: Any) -> str:
    file = tmp_path / "manifests.yaml"
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "extra", "namespace": "llm"}}
    file.write_text(yaml.safe_dump_all([config_map, manifest(**changes)]))
    return str(file)


def test_manifests_are_applied_in_their_order_and_what_was_there_is_kept(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    kubernetes.after_apply["demo"] = [UPGRADING, rayservice(pending=cluster("demo-new", application="DEPLOY_FAILED"))]
    code, lines = rollout("-f", write_manifests(tmp_path))
    assert code == 3
    assert [line for line in lines if line.startswith("  applied")] == ["  applied ConfigMap extra", "  applied RayService demo"]
    assert [value["kind"] for value in kubernetes.applied] == ["ConfigMap", "RayService"]
    saved = tmp_path / "cache" / "rollouts" / "demo-1234-1.yaml"
    assert lines[-1] == f"way back: serve-app rollout demo -f {saved} --context test -n llm"
    assert yaml.safe_load(saved.read_text())["spec"] == rayservice()["spec"]


def test_the_way_back_of_a_first_install_is_to_delete_it(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    kubernetes.services.clear()
    kubernetes.after_apply["demo"] = [rayservice(active=cluster("demo-old", application="DEPLOY_FAILED"))]
    code, lines = rollout("-f", write_manifests(tmp_path))
    assert (code, lines[-1]) == (3, "way back: kubectl delete rayservice demo --context test -n llm")


def test_wrong_manifests_change_nothing(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    code, lines = rollout("-f", write_manifests(tmp_path, grace_s=30))
    assert code == 1
    assert "RayService demo: pod-grace-outlasts-node-drain: terminationGracePeriodSeconds is 30" in lines[0]
    code, output = run("rollout", "other", "-f", write_manifests(tmp_path))
    assert (code, output) == (
        1,
        f"error: {tmp_path}/manifests.yaml: holds no RayService 'other'; give its name: serve-app rollout NAME -f FILE",
    )
    assert kubernetes.applied == []


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"a": 1}, "a document: has no kind"),
        ({"kind": "Service", "apiVersion": "v1"}, "Service: has no metadata.name"),
        ({"kind": "Service", "metadata": {"name": "extra"}}, "Service: has no apiVersion"),
    ],
)
def test_a_document_that_cannot_be_applied_is_refused_before_the_first_is(
    kubernetes: FakeKubernetes, tmp_path: Path, document: dict[str, Any], said: str
) -> None:
    file = Path(write_manifests(tmp_path))
    file.write_text(f"{file.read_text()}---\n{yaml.safe_dump(document)}")
    assert run("rollout", "demo", "-f", str(file)) == (1, f"error: {file}: {said}; give it one, or remove the document")
    assert kubernetes.applied == []


def test_what_others_own_is_not_taken_from_them(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    kubernetes.conflict = 'conflict with "helm": .spec'
    code, lines = rollout("-f", write_manifests(tmp_path))
    assert (code, lines[-1]) == (
        1,
        'error: another owner has fields that patch ConfigMap extra would change: conflict with "helm": .spec; '
        "let its owner change it: by helm upgrade if Helm owns it",
    )


def status(*options: str) -> tuple[int, str]:
    return run("status", "demo", "--context", "test", *options)


def test_status_shows_conditions_applications_and_pods_in_80_columns(
    kubernetes: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    kubernetes.services["demo"] = [UPGRADING]
    kubernetes.pods.append(pod("demo-new-w", "demo-new", reason="CrashLoopBackOff"))
    code, output = status()
    assert code == 0
    assert max(map(len, output.splitlines())) <= 80
    assert output.splitlines()[:2] == [
        "demo: deploying: 1 of 1 model pod ready; requests are answered",
        "namespace llm, context test",
    ]
    words = [line.split() for line in output.splitlines()]
    assert ["Ready", "True", "Because:", "it", "is", "so"] in words
    assert ["replica-tiny", "UPDATING"] in words
    assert ["head", "Running", "yes", "node1"] in words
    assert ["w", "Pending", "no", "2", "node1", "CrashLoopBackOff"] in words


@pytest.mark.parametrize(
    ("address", "pods", "shown"),
    [
        ("redis://demo-redis.llm.svc:6379", [redis_pod()], [["demo-redis-0", "Running", "yes", "node1"]]),
        (
            "redis://demo-redis.llm.svc:6379",
            [redis_pod(reason="ErrImagePull")],
            [["demo-redis-0", "Pending", "no", "node1", "ErrImagePull"]],
        ),
        ("rediss://elsewhere:6379", [], []),
    ],
)
def test_status_lists_redis(kubernetes: FakeKubernetes, address: str, pods: list[dict[str, Any]], shown: list[list[str]]) -> None:
    kubernetes.services["demo"] = [rayservice(redis=address)]
    kubernetes.pods += pods
    lines = status()[1].splitlines()
    (line,) = [i for i, line in enumerate(lines) if line.startswith("Redis at ")]
    assert lines[line] == f"Redis at {address}" + ("" if pods else ": no pod of this release")
    assert [text.split() for text in lines[line + 3 :]] == shown


def test_a_release_without_redis_has_no_line_about_it(kubernetes: FakeKubernetes) -> None:
    assert "Redis" not in status()[1]


def test_status_as_json_holds_the_rollouts_result(kubernetes: FakeKubernetes) -> None:
    code, output = status("--json")
    report = json.loads(output)
    assert (code, report["name"], report["rollout"]["kind"]) == (0, "demo", "done")
    assert report["state"] == {"word": "serving", "said": "1 of 1 model pod ready"}
    assert [p["name"] for p in report["pods"]] == ["demo-old-head", "demo-old-i", "demo-old-w"]


def test_a_release_that_is_not_there_is_named_with_those_that_are(kubernetes: FakeKubernetes) -> None:
    said = "error: no RayService 'other' in the namespace 'llm'; there: demo"
    assert run("status", "other", "-n", "llm") == (1, said)
    kubernetes.services.clear()
    code, output = run("rollout", "demo", "-n", "elsewhere")
    way_out = "install it with: helm install demo helm/serve-app --kube-context test -n elsewhere"
    assert (code, output) == (1, f"error: no RayService 'demo' in the namespace 'elsewhere'; {way_out}")


def test_without_kuberay_its_installation_is_the_way_out(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    kubernetes.has_kuberay = False
    said = "the cluster knows no RayService: KubeRay is not installed; "
    assert said in status()[1]
    assert said in rollout("-f", write_manifests(tmp_path))[1][-1]


@pytest.mark.parametrize("right", ["get rayservices", "list pods"])
def test_a_missing_right_is_named_with_the_command_that_asks_for_it(kubernetes: FakeKubernetes, right: str) -> None:
    kubernetes.forbidden = (right,)
    code, output = status()
    assert code == 1
    assert f'cannot {right.split()[0]} resource "{right.split()[1]}" in the namespace "llm"' in output
    wanted = right.replace("rayservices", "rayservices.ray.io")
    assert output.endswith(f"this command says yes once you have it: kubectl auth can-i {wanted} --context test -n llm")


def test_a_cluster_that_does_not_answer_is_named(
    kubernetes: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kubeconfig(tmp_path / "dead", "http://127.0.0.1:1")
    use(monkeypatch, tmp_path / "dead")
    code, output = status()
    assert code == 1
    assert output.startswith("error: the API server http://127.0.0.1:1 does not answer: ")


def test_no_kubeconfig_and_an_unknown_context_are_told_apart(
    kubernetes: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "error: the kubeconfig has no context 'prod'; it has: test"
    assert run("status", "demo", "--context", "prod") == (1, said)
    use(monkeypatch, tmp_path / "none")
    code, output = status()
    assert (code, output.split(":")[1]) == (1, " no kubeconfig")
    assert not os.path.exists(tmp_path / "none")

"""Every pod of every values file meets Pod Security "restricted" and more; checkov agrees, and has looked at all of them.

Scanners skip custom resources: a RayService scores perfectly by not being read. So its pod templates are taken out first, with the
autoscaler's container that KubeRay adds, and the number of what was audited is part of the test.
"""

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.render import CI_FILES, Object, Rendered, at, merged, render
from tests.k8s.test_cluster_files import our_values

DOWNLOADS = [
    {"path": "a", "source": "hf:o/n", "revision": "a" * 40},
    {"path": "b", "source": "s3://b/p", "sha256": "b" * 64},
]
EVERYTHING = merged(
    at("gcsFaultTolerance.enabled", True),
    {"weights": {"enabled": True, "downloads": DOWNLOADS}},
    at("modelPods.headroom", {"pods": 1, "priorityClassName": "low"}),
    at("ui.enabled", True),
)
NUM_PODS = {"default": 5, "eks": 8, "production": 7, "simulated": 5, "everything": 11}
NUM_CHECKS_PASSED = 2400
"""Checks that checkov passes over everything that it audits below: a renderer or scanner that covers less must not pass."""


def rendered(name: str) -> Rendered:
    if name == "everything":
        return render(EVERYTHING)
    if name == "eks":
        return render(our_values())
    (file,) = [f for f in CI_FILES if f.name == f"{name}-values.yaml"]
    return render(files=(file,))


def containers(pod: Object) -> Iterator[Object]:
    yield from pod.get("initContainers", [])
    yield from pod["containers"]


def not_restricted(pod: Object) -> Iterator[str]:
    """Yield what the Pod Security Standard "restricted" (v1.34) forbids of what the chart could do wrong."""
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    yield from (f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key))
    yield from (f"volume {v['name']}" for v in pod.get("volumes", []) if not allowed & v.keys())
    for c in containers(pod):
        context: dict[str, Any] = pod["securityContext"] | c["securityContext"]
        facts = {
            "privileged": not context.get("privileged", False),
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "capabilities": context.get("capabilities") == {"drop": ["ALL"]},
            "runAsNonRoot": context.get("runAsNonRoot") is True,
            "runAsUser": context.get("runAsUser", 0) >= 10000,
            "seccompProfile": context.get("seccompProfile") == {"type": "RuntimeDefault"},
            "hostPort": not any("hostPort" in port for port in c.get("ports", [])),
        }
        yield from (f"{c['name']}: {name}" for name, holds in facts.items() if not holds)


def beyond_restricted(pod: Object) -> Iterator[str]:
    """Yield what the chart promises besides: a read-only root, bounded writable places, no token, bounded resources."""
    if pod.get("automountServiceAccountToken") is not False or pod.get("enableServiceLinks") is not False:
        yield "the account's token or service links"
    yield from (
        f"{v['name']} has no size limit" for v in pod.get("volumes", []) if "emptyDir" in v and "sizeLimit" not in v["emptyDir"]
    )
    for c in containers(pod):
        if not c["securityContext"].get("readOnlyRootFilesystem"):
            yield f"{c['name']}: the root can be written"
        if {"cpu", "memory"} - c["resources"].get("limits", {}).keys() | {"cpu", "memory"} - c["resources"].get(
            "requests", {}
        ).keys():
            yield f"{c['name']}: resources"
        yield from (
            f"{c['name']}: {e['name']} comes from a secret"
            for e in c.get("env", [])
            if "secretKeyRef" in e.get("valueFrom", {}) and e["name"] != "REDIS_PASSWORD"  # the head has it from KubeRay likewise
        )


@pytest.mark.parametrize("name", NUM_PODS)
def test_every_pod_is_restricted_and_none_is_overlooked(name: str) -> None:
    pods = dict(rendered(name).pod_templates())
    assert len(pods) == NUM_PODS[name]
    wrong = {where: [*not_restricted(t["spec"]), *beyond_restricted(t["spec"])] for where, t in pods.items()}
    assert wrong == {where: [] for where in pods}


def test_the_check_finds_what_is_not_restricted() -> None:
    pod = {
        "hostNetwork": True,
        "securityContext": {"runAsUser": 1},
        "volumes": [{"name": "h", "hostPath": {}}],
        "containers": [{"name": "c", "securityContext": {"privileged": True}}],
    }
    assert len(list(not_restricted(pod))) == 2 + 6


def test_why_a_container_ended_is_kept_in_its_status() -> None:
    """KubeRay deletes a pod whose container has ended, and its log with it; the event that says so repeats the message."""
    for where, template in render(EVERYTHING).pod_templates():
        ours = [c for c in containers(template["spec"]) if c["name"] != "autoscaler"]  # KubeRay's own
        assert ours
        assert {c.get("terminationMessagePolicy") for c in ours} == {"FallbackToLogsOnError"}, where


def test_only_the_autoscaler_and_the_uninstall_have_a_token_of_the_cluster() -> None:
    expected = {"RayService demo head": ["autoscaler"], "Job demo-uninstall": ["uninstall"]}
    for where, template in render(EVERYTHING).pod_templates():
        mounts = {c["name"]: [m["mountPath"] for m in c.get("volumeMounts", [])] for c in containers(template["spec"])}
        with_token = [name for name, paths in mounts.items() if any("kubernetes.io" in path for path in paths)]
        assert with_token == expected.get(where, []), where


def test_every_secret_is_mounted_only_where_it_is_needed() -> None:
    found = {where: sorted(_secrets(t["spec"])) for where, t in render(EVERYTHING).pod_templates() if _secrets(t["spec"])}
    assert found == {
        "Pod demo-test": ["demo-api-keys"],
        "RayService demo ingress": ["demo-api-keys", "demo-cluster-token"],
        "RayService demo model-smollm2-135m-instruct": ["demo-cluster-token"],
    }
    tenants = render(merged(EVERYTHING, at("tenants.existingSecret", "s")))
    assert {where for where, t in tenants.pod_templates() if "s" in _secrets(t["spec"])} == {
        "Job demo-check",
        "RayService demo ingress",
    }


def _secrets(pod: Object) -> list[str]:
    volumes = pod.get("volumes", [])
    projected = [
        source["secret"]["name"] for v in volumes for source in v.get("projected", {}).get("sources", []) if "secret" in source
    ]
    return [v["secret"]["secretName"] for v in volumes if "secret" in v] + projected


def test_no_account_mounts_its_token_by_itself_and_only_the_uninstall_has_rights() -> None:
    objects = render(EVERYTHING)
    assert {a["automountServiceAccountToken"] for a in objects.of("ServiceAccount").values()} == {False}
    assert {o["kind"] for o in render().objects if "rbac" in o["apiVersion"]} == set()
    assert {name: role["rules"] for name, role in objects.of("Role").items()} == {
        "uninstall": [
            {"apiGroups": ["ray.io"], "resources": ["rayservices"], "resourceNames": ["demo"], "verbs": ["get", "delete"]},
            {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["list"]},
        ]
    }
    assert {o["kind"] for o in objects.objects if "ClusterRole" in o["kind"]} == set()


ACCEPTED = {
    "CKV_K8S_15": "IfNotPresent with a digest or a fixed tag; Always would make each start depend on the registry",
    "CKV_K8S_43": "a digest is the user's to give; production-values.yaml does",
    "CKV_K8S_35": "Redis reads its password from the environment, as KubeRay gives it to the head; no other secret is there",
}
WITHOUT_PROBES = {"CKV_K8S_8", "CKV_K8S_9"}
"""Jobs and the test end by themselves, headroom does nothing, and KubeRay's autoscaler container has no way to give it a probe."""


def test_checkov_finds_nothing_in_all_that_it_must_audit(tmp_path: Path) -> None:
    checkov = shutil.which("checkov")
    if checkov is None:
        pytest.skip("checkov is not on the PATH; make charts installs it")
    audited: Counter[str] = Counter()
    for name in NUM_PODS:
        documents = list(_for_checkov(rendered(name)))
        audited.update(d["kind"] for d in documents)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(documents))
    command = [checkov, "-d", str(tmp_path), "--framework", "kubernetes", "--skip-download", "--quiet", "--compact", "-o", "json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120).stdout)
    summary, failed = report["summary"], report["results"]["failed_checks"]
    assert (summary["skipped"], summary["parsing_errors"]) == (0, 0)
    assert summary["passed"] >= NUM_CHECKS_PASSED
    assert summary["resource_count"] == audited.total()
    assert {c["resource"].split(".")[0] for c in report["results"].get("passed_checks", [])} <= audited.keys()
    assert audited["Pod"] == sum(NUM_PODS.values())
    unexpected = [f"{c['check_id']} {c['check_name']}: {c['resource']} in {c['file_path']}" for c in failed if not _accepted(c)]
    assert unexpected == []


def _accepted(check: Object) -> bool:
    if check["check_id"] in WITHOUT_PROBES:
        unwatched = ("job-demo-weights", "job-demo-check", "deployment-demo-headroom")
        return check["resource"].endswith(("-test", "-head", "-uninstall")) or any(
            kind in check["resource"] for kind in unwatched
        )
    only = {
        "CKV_K8S_43": check["file_path"] != "/production.yaml",
        "CKV_K8S_35": "-redis" in check["resource"] or check["resource"].endswith("-head"),
    }
    return check["check_id"] in ACCEPTED and only.get(check["check_id"], True)


def _for_checkov(found: Rendered) -> Iterator[Object]:
    for where, template in found.pod_templates():
        name = where.lower().replace(" ", "-")
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": template["metadata"] | {"name": name, "namespace": "serving"},
            "spec": template["spec"],
        }
    for o in found.objects:
        if o["kind"] not in ("Pod", "RayService", "Deployment", "Job", "StatefulSet"):
            yield o | {"metadata": o["metadata"] | {"namespace": "serving"}}


def test_checkov_would_find_a_pod_that_is_not_hardened(tmp_path: Path) -> None:
    checkov = shutil.which("checkov")
    if checkov is None:
        pytest.skip("checkov is not on the PATH; make charts installs it")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    command = [checkov, "-d", str(tmp_path), "--framework", "kubernetes", "--skip-download", "--compact", "-o", "json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120).stdout)
    assert report["summary"]["failed"] > 10


def test_with_secrets_that_exist_every_rendering_is_the_same() -> None:
    """Or Argo CD and Flux, which render without a cluster, would see a change each time."""
    existing = {name: {"existingSecret": "s"} for name in ("apiKeys", "clusterToken", "rayToken")}
    outside = {"enabled": True, "address": "rediss://r:6380", "existingSecret": "s"}
    values = merged(existing, at("gcsFaultTolerance", outside))
    one, other = (
        render(merged(values, at("commonLabels.render", name))).text.replace(name, "x") for name in ("quagga-1", "quagga-2")
    )
    assert one == other
    assert "kind: Secret\n" not in one

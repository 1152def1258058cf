"""These tests check that k8s/ agrees with the chart, and that the plain manifests are the chart."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

from serve_app.cli.manifests import manifest_problems
from serve_app.simulated.profiles import ACCELERATORS
from serve_app.sizing.architecture import architecture_of
from serve_app.sizing.estimate import Wish, estimate
from tests.chart.render import CHART, Refused, merged, render, tool
from tests.monitoring.expressions import OF_DCGM
from tests.sizing.shapes import LLAMA_70B

K8S = Path(__file__).parents[2] / "k8s"
OUR_VALUES = K8S / "cluster/values/serve-app.yaml"
FILLED_IN = {"REGISTRY": "registry.example.com", "TAG": "1.0", "HOST": "llm.example.com", "VPC_CIDR": "10.0.0.0/16"}
"""The README's values in place of the variables of our values."""
AMPERE_AND_LATER = {"a10g", "a100", "l4", "l40s", "h100"}
"""Karpenter's names of AWS's GPUs whose compute capability is 8.0 or more, as vLLM's kernels for bfloat16 want."""


def documents(path: Path) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def values(path: Path) -> dict[str, Any]:
    (found,) = documents(path)
    return found


def karpenter(kind: str) -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d for d in documents(K8S / "cluster/karpenter.yaml") if d["kind"] == kind}


def gpu_pool() -> dict[str, Any]:
    return karpenter("NodePool")["gpu"]


def tolerated(pods: Mapping[str, Any], pool: Mapping[str, Any]) -> bool:
    """Return whether pods with these tolerations may run on the pool's nodes."""
    taken = {(t["key"], t.get("value"), t["effect"]) for t in pods["tolerations"]}
    taints = pool["spec"]["template"]["spec"]["taints"]
    return all({(t["key"], t["value"], t["effect"]), (t["key"], None, t["effect"])} & taken for t in taints)


def our_values() -> dict[str, Any]:
    """`cluster/values/serve-app.yaml` as `envsubst` fills it in."""
    return dict(yaml.safe_load(Template(OUR_VALUES.read_text()).substitute(FILLED_IN)))


def requirement(pool: dict[str, Any], key: str) -> list[str]:
    (found,) = [r for r in pool["spec"]["template"]["spec"]["requirements"] if r["key"] == key]
    return list(found["values"])


@pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
def test_the_plain_manifests_are_the_chart() -> None:
    """`make manifests` renews them."""
    helm = Path(tool("helm") or "")
    environment = {**os.environ, "PATH": f"{helm.parent}:{os.environ['PATH']}"}
    rendered = subprocess.run([K8S / "manifests/render"], capture_output=True, text=True, check=True, env=environment)
    assert rendered.stdout == (K8S / "manifests/serve-app.yaml").read_text()


def test_the_plain_manifests_pass_the_check_and_hold_no_secret() -> None:
    text = (K8S / "manifests/serve-app.yaml").read_text()
    assert list(manifest_problems(text, client_s=None, load_balancer_idle_s=None)) == []
    assert [d["kind"] for d in documents(K8S / "manifests/serve-app.yaml") if d["kind"] == "Secret"] == []


def test_the_gpu_nodes_take_the_model_pods() -> None:
    pool, pods = gpu_pool(), our_values()["modelPods"]
    template = pool["spec"]["template"]
    assert pods["nodeSelector"].items() <= template["metadata"]["labels"].items()
    assert requirement(pool, "karpenter.k8s.aws/instance-gpu-count") == [str(pods["gpusPerNode"])]
    assert tolerated(pods, pool)
    plugin = values(K8S / "cluster/values/nvidia-device-plugin.yaml")
    assert plugin["nodeSelector"].items() <= template["metadata"]["labels"].items()


@pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
def test_a_model_has_one_gpu_and_the_readme_gives_a_larger_one_the_four_of_a_node() -> None:
    """Four times the GPUs for a model that one holds cost more than twice as much."""
    (ours,) = our_values()["config"]["models"].values()
    assert ours["gpus_per_replica"] == 1
    text = (K8S / "README.md").read_text().replace("COMMIT", "a" * 40)
    (block,) = re.findall(r"\*\*A model that one GPU does not hold\*\*.*?```yaml\n(.*?)```", text, re.DOTALL)
    values_of_large = our_values()
    del values_of_large["config"]["models"]
    limits = render(merged(values_of_large, yaml.safe_load(block))).container("model")["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 4
    (large,) = yaml.safe_load(block)["config"]["models"].values()
    wish = Wish(accelerator=ACCELERATORS["l40s"], num_gpus=large["gpus_per_replica"], engine_args=large["engine_args"])
    found = estimate(architecture_of(LLAMA_70B, "config.json"), None, wish)
    assert found.fit.fits
    assert f"some {4 * found.fit.kv_bytes / 1e9:.0f} GB for the KV cache ({found.fit.longest_context // 1000},000 tokens" in text
    assert limits["memory"] == "183Gi"  # 132 / 0.9 and what the processes ask for: vLLM reads the weights ahead


def test_gpu_nodes_are_spot_or_on_demand_and_new_enough_for_vllm() -> None:
    """Karpenter takes spot first where both are allowed."""
    assert set(requirement(gpu_pool(), "karpenter.sh/capacity-type")) == {"spot", "on-demand"}
    (name,) = requirement(gpu_pool(), "karpenter.k8s.aws/instance-gpu-name")  # one kind has one capacity
    assert name in AMPERE_AND_LATER


def test_what_pods_write_on_gpu_nodes_is_on_nvme_disks_that_every_one_has() -> None:
    """The home of a model's pod may have 200Gi, and the volume of EBS has the system alone."""
    node_class = karpenter("EC2NodeClass")["gpu"]["spec"]
    assert node_class["instanceStorePolicy"] == "RAID0"
    (nvme_gb,) = requirement(gpu_pool(), "karpenter.k8s.aws/instance-local-nvme")
    assert int(nvme_gb) >= 199
    (disk,) = node_class["blockDeviceMappings"]
    assert disk["ebs"].keys() == {"volumeType", "volumeSize", "encrypted", "deleteOnTermination"}


def test_gpu_nodes_pull_images_in_parallel_and_are_large_enough_for_it() -> None:
    """AL2023's nodeadm ignores the gate below 4 CPUs. CPU nodes have EBS alone, where it would make pulls slower."""
    config = yaml.safe_load(karpenter("EC2NodeClass")["gpu"]["spec"]["userData"])
    assert (config["apiVersion"], config["kind"]) == ("node.eks.aws/v1alpha1", "NodeConfig")
    assert config["spec"] == {"featureGates": {"FastImagePull": True}}  # cluster, labels and taints are Karpenter's own part
    assert min(map(int, requirement(gpu_pool(), "karpenter.k8s.aws/instance-cpu"))) >= 4
    assert "userData" not in karpenter("EC2NodeClass")["cpu"]["spec"]


@pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
def test_karpenters_cpu_nodes_take_the_cpu_pods_of_the_release_and_prometheus() -> None:
    """Redis and Prometheus too: where their volume is, Karpenter's may be the only node. An ingress's streams end with its node."""
    pool, ours = karpenter("NodePool")["cpu"], our_values()
    prometheus = values(K8S / "cluster/values/kube-prometheus-stack.yaml")["prometheus"]["prometheusSpec"]
    for pods in (ours["head"], ours["ingressPods"], ours["gcsFaultTolerance"]["redis"], ours["jobs"], prometheus):
        assert pods["nodeSelector"].items() <= pool["spec"]["template"]["metadata"]["labels"].items()
        assert tolerated(pods, pool)
    assert requirement(pool, "karpenter.sh/capacity-type") == ["on-demand"]
    rendered = render(our_values())
    redis = rendered.of("StatefulSet")["redis"]["spec"]["template"]["spec"]
    assert all(tolerated(pod, pool) for pod in (rendered.pod("head"), rendered.pod("ingress"), redis))


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_nodes_of_a_pool_never_roll_together(name: str) -> None:
    """None ends by its age; one that drifted goes alone, outside of working hours; empty ones go at once."""
    spec = karpenter("NodePool")[name]["spec"]
    assert spec["template"]["spec"]["expireAfter"] == "Never"  # else nodes made together end together
    budgets = {(b["reasons"][0], b.get("schedule")): b["nodes"] for b in spec["disruption"]["budgets"]}
    assert all(len(b["reasons"]) == 1 for b in spec["disruption"]["budgets"])
    assert budgets == {("Drifted", None): "1", ("Drifted", "0 6 * * mon-fri"): "0", ("Empty", None): "100%"}


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_a_pool_makes_nodes_in_every_zone(name: str) -> None:
    """A volume of EBS is in one zone. Terraform gives the subnets of all zones the tag that the classes select by."""
    template = karpenter("NodePool")[name]["spec"]["template"]["spec"]
    assert [r for r in template["requirements"] if "zone" in r["key"]] == []
    node_class = karpenter("EC2NodeClass")[template["nodeClassRef"]["name"]]["spec"]
    assert node_class["subnetSelectorTerms"] == [{"tags": {"karpenter.sh/discovery": "${CLUSTER}"}}]
    gp3 = {d["metadata"]["name"]: d for d in documents(K8S / "cluster/storage.yaml")}["gp3"]
    assert gp3["volumeBindingMode"] == "WaitForFirstConsumer"
    assert "allowedTopologies" not in gp3


def test_karpenter_repairs_broken_nodes_and_stays_off_its_own() -> None:
    karpenters = values(K8S / "cluster/values/karpenter.yaml")
    assert karpenters["settings"]["featureGates"] == {"nodeRepair": True}
    labels = [pool["spec"]["template"]["metadata"]["labels"] for pool in karpenter("NodePool").values()]
    assert all(not karpenters["nodeSelector"].items() <= made.items() for made in labels)


@pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
def test_karpenter_takes_no_node_under_a_stream() -> None:
    """Only empty nodes by its own will, and where it must, later than the pods' own grace, which a budget lets begin one by one.

    A pod with karpenter.sh/do-not-disrupt would not be evicted at a spot notice either.
    """
    rendered = render(our_values())
    graces = [g["template"]["spec"]["terminationGracePeriodSeconds"] for g in rendered.cluster["workerGroupSpecs"]]
    for pool in karpenter("NodePool").values():
        assert pool["spec"]["disruption"]["consolidationPolicy"] == "WhenEmpty"
        minutes = re.fullmatch(r"(\d+)m", pool["spec"]["template"]["spec"]["terminationGracePeriod"])
        assert minutes is not None
        assert int(minutes[1]) * 60 >= our_values()["timeouts"]["nodeDrainSeconds"] >= max(graces)
    budgets = rendered.of("PodDisruptionBudget").values()
    assert [budget["spec"]["minAvailable"] for budget in budgets] == [1] * len(graces)
    assert "karpenter.sh/do-not-disrupt" not in rendered.text


def test_gpu_alerts_have_an_exporter_that_prometheus_scrapes_and_that_starts_no_second_engine() -> None:
    """Beside a second engine EKS's agent calls a GPU broken, and Karpenter ends the node."""
    exporter = values(K8S / "cluster/values/dcgm-exporter.yaml")
    assert exporter["nodeSelector"].items() <= gpu_pool()["spec"]["template"]["metadata"]["labels"].items()
    assert tolerated(exporter, gpu_pool())
    (host,) = exporter["extraEnv"]
    assert exporter["arguments"][:2] == ["-r", f"$({host['name']}):5555"]
    assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.hostIP"}}
    fields = dict(re.findall(r"^(DCGM_\w+), (\w+), .+\.$", exporter["customMetrics"], re.MULTILINE))
    assert (set(fields), set(fields.values())) == (OF_DCGM, {"gauge", "counter"})
    prometheus = values(K8S / "cluster/values/kube-prometheus-stack.yaml")["prometheus"]["prometheusSpec"]
    assert exporter["serviceMonitor"]["enabled"] is True
    assert prometheus["serviceMonitorSelectorNilUsesHelmValues"] is False
    installed = re.findall(r"-f k8s/cluster/values/(\S+)\.yaml", (K8S / "README.md").read_text())
    assert {"dcgm-exporter", "kube-prometheus-stack", "nvidia-device-plugin"} <= set(installed)


def test_no_alert_asks_for_what_eks_hides() -> None:
    """The chart's alerts KubeSchedulerDown and the like fire where their series are absent."""
    stack = values(K8S / "cluster/values/kube-prometheus-stack.yaml")
    hidden = ("kubeControllerManager", "kubeScheduler", "kubeEtcd", "kubeProxy")
    assert [stack[name] for name in hidden] == [{"enabled": False}] * len(hidden)


def test_grafana_has_a_password_of_its_own_before_it_is_installed() -> None:
    admin = values(K8S / "cluster/values/kube-prometheus-stack.yaml")["grafana"]["admin"]
    text = (K8S / "README.md").read_text()
    made = text.index(f"kubectl -n monitoring create secret generic {admin['existingSecret']} ")
    assert all(f"--from-literal={admin[key]}=" in text[made:] for key in ("userKey", "passwordKey"))
    assert made < text.index("helm upgrade --install monitoring ")


@pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
def test_external_secrets_makes_the_keys_that_the_chart_mounts() -> None:
    made = {
        d["metadata"]["name"]: {item["secretKey"] for item in d["spec"]["data"]}
        for d in documents(K8S / "cluster/secrets.yaml")
        if d["kind"] == "ExternalSecret"
    }
    names, ours = values(K8S / "manifests/values.yaml"), our_values()
    assert made == {
        ours["apiKeys"]["existingSecret"]: {"keys"},
        ours["clusterToken"]["existingSecret"]: {"token"},
        ours["rayToken"]["existingSecret"]: {"auth_token"},
        ours["gcsFaultTolerance"]["existingSecret"]: {"password"},
        ours["weights"]["huggingFaceTokenSecret"]: {"token"},
    }
    assert [names[key] for key in ("apiKeys", "clusterToken", "rayToken")] == [
        ours[key] for key in ("apiKeys", "clusterToken", "rayToken")
    ]
    text = (K8S / "manifests/serve-app.yaml").read_text()
    assert all(name in text for name in names["apiKeys"].values())


@pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
def test_our_values_are_production_on_eks_and_pass_the_check() -> None:
    """Ingresses and models survive the loss of a pod, the head of its own; storage classes are those that are made there."""
    rendered = render(our_values())
    mins = [dict(model["replicas"])["min"] for model in rendered.config["models"].values()]
    assert min(mins) >= 2
    assert rendered.config["ingress"]["replicas"]["min"] >= 2
    assert "gcsFaultToleranceOptions" in rendered.cluster
    assert rendered.of("Secret") == {}
    assert {*rendered.of("PodMonitor")} == {"ray", "ingress"}
    made = {d["metadata"]["name"] for d in documents(K8S / "cluster/storage.yaml")}
    claims = [
        *rendered.of("PersistentVolumeClaim").values(),
        *rendered.of("StatefulSet")["redis"]["spec"]["volumeClaimTemplates"],
    ]
    assert {claim["spec"]["storageClassName"] for claim in claims} == made
    assert list(manifest_problems(rendered.text, client_s=900, load_balancer_idle_s=None)) == []


@pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
def test_the_readme_builds_and_pushes_the_images_that_our_values_run() -> None:
    rendered = render(our_values())
    ours = [rendered.container(group)["image"] for group in ("head", "ingress", "model")]
    assert ours == ["registry.example.com/serve-app:1.0"] * 2 + ["registry.example.com/serve-app:1.0-cuda"]
    text = Template((K8S / "README.md").read_text()).safe_substitute(FILLED_IN)
    assert re.findall(r"^docker push (\S+)", text, re.MULTILINE) == ours[1:]
    made = re.findall(r"^make (image|image-cuda) .*?\b(IMAGE|CUDA_IMAGE)=(\S+)", text, re.MULTILINE)
    assert made == [("image", "IMAGE", ours[1]), ("image-cuda", "CUDA_IMAGE", ours[2])]


@pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
def test_the_runbook_explains_every_alert_of_the_chart() -> None:
    (rule,) = render({"monitoring": {"podMonitors": True, "prometheusRules": True}}).of("PrometheusRule").values()
    alerts = {r["alert"] for group in rule["spec"]["groups"] for r in group["rules"] if "alert" in r}
    runbook = (K8S.parent / "docs/runbook.md").read_text()
    assert set(re.findall(r"^### (\w+)$", runbook, re.MULTILINE)) == alerts


@pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
def test_pods_reach_the_dns_of_eks_auto_mode_by_the_values_of_the_readme() -> None:
    (block,) = re.findall(r"\*\*EKS Auto Mode\*\*.*?```yaml\n(.*?)```", (K8S / "README.md").read_text(), re.DOTALL)
    (rule,) = render(merged(our_values(), yaml.safe_load(block))).of("NetworkPolicy")["dns"]["spec"]["egress"]
    assert rule["to"] == [{"ipBlock": {"cidr": "172.20.0.10/32"}}]
    assert {(p["protocol"], p["port"]) for p in rule["ports"]} == {("UDP", 53), ("TCP", 53)}


@pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
def test_a_model_from_zero_is_refused_until_the_waits_of_the_readme_are_long_enough() -> None:
    (block,) = re.findall(r"\*\*From zero replicas\*\*.*?```yaml\n(.*?)```", (K8S / "README.md").read_text(), re.DOTALL)
    ours, waits = our_values(), yaml.safe_load(block)
    (name,) = ours["config"]["models"]
    ours = merged(ours, {"config": {"models": {name: {"required": False, "replicas": {"min": 0, "max": 1}}}}})
    with pytest.raises(Refused, match="wake-outlasts-wait"):
        render(merged(ours, {"config": {"timeouts": {"no_replica_s": 30}}}))
    rendered = render(merged(ours, waits))
    idle_s = waits["timeouts"]["loadBalancerIdleSeconds"]
    assert list(manifest_problems(rendered.text, client_s=900, load_balancer_idle_s=idle_s)) == []


def test_the_namespaces_are_those_of_the_charts_network_policies() -> None:
    names = {d["metadata"]["name"] for d in documents(K8S / "cluster/namespaces.yaml")}
    policies = values(CHART / "values.yaml")["networkPolicies"]
    assert {policies["operatorNamespace"], policies["prometheusNamespace"]} <= names


def test_every_variable_of_the_files_is_exported_in_a_readme() -> None:
    used = {v for f in (K8S / "cluster").rglob("*.yaml") for v in re.findall(r"\$\{(\w+)\}", f.read_text())}
    text = (K8S / "README.md").read_text() + (K8S / "cluster/values/models/README.md").read_text()
    exports = [line for line in text.splitlines() if line.startswith("export ")]
    exported = set(re.findall(r"\b([A-Z_]+)=", " ".join(exports)))
    assert set(FILLED_IN) < used
    assert used <= exported

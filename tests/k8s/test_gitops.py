"""These tests check k8s/gitops: what Argo CD and Flux sync, in which order, and how they judge a RayService."""

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli.rayservice import judge, ray_service
from tests.chart.render import CHART, tool
from tests.chart.schemas import check_with_kubeconform
from tests.k8s.ray_services import CASES, REFUSED, Case
from tests.k8s.test_cluster_files import FILLED_IN, K8S, documents, our_values

GITOPS = K8S / "gitops"
CLUSTER = "clusters/serve-app"
"""Where a cluster's files are in the repository that README.md lays out."""
VERDICTS = {"done": "Healthy", "progressing": "Progressing", "failed": "Degraded"}


def by_name(path: Path, kind: str) -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d for d in documents(path) if d["kind"] == kind}


def applications() -> dict[str, dict[str, Any]]:
    return by_name(GITOPS / "argocd/applications.yaml", "Application")


def kustomizations() -> dict[str, dict[str, Any]]:
    return by_name(GITOPS / "flux/kustomizations.yaml", "Kustomization")


def helm_releases() -> dict[str, dict[str, Any]]:
    files = sorted((GITOPS / "flux").glob("*/*.yaml"))
    return {name: release for file in files for name, release in by_name(file, "HelmRelease").items()}


def command_block(first: str) -> str:
    """Return the block of README.md's shell commands that begins with this comment."""
    (found,) = re.findall(rf"^```sh\n(# {re.escape(first)}.*?)^```", (GITOPS / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of a platform team, made by README.md's own commands."""
    if shutil.which("envsubst") is None:
        pytest.skip("envsubst is not installed")
    made = tmp_path_factory.mktemp("platform")
    variables = {**FILLED_IN, "CLUSTER": "prod", "REGION": "eu-west-1", "EFS_ID": "fs-1", "PLATFORM": str(made)}
    done = subprocess.run(
        ["bash", "-euc", command_block("The repository")],
        cwd=K8S.parent,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize("case", [*CASES, *REFUSED], ids=lambda case: case.name)
def test_argo_cd_judges_a_rayservice(case: Case) -> None:
    lupa = importlib.import_module("lupa.lua51")
    (config,) = documents(GITOPS / "argocd/argocd-cm.yaml")
    lua = lupa.LuaRuntime()
    check = lua.eval(
        "function(code, obj) local f = assert(loadstring(code)); setfenv(f, {obj = obj, ipairs = ipairs, pairs = pairs}); return f() end"
    )
    health = check(
        config["data"]["resource.customizations.health.ray.io_RayService"], lua.table_from(case.service, recursive=True)
    )
    assert health.status == case.meaning
    assert health.message


@pytest.mark.parametrize("case", [*CASES, *REFUSED], ids=lambda case: case.name)
def test_flux_judges_a_rayservice(case: Case) -> None:
    """Flux looks at the generation, then at inProgress, failed and current. If an expression names a missing field, Flux waits."""
    celpy = importlib.import_module("celpy")
    (checks,) = helm_releases()["demo"]["spec"]["healthCheckExprs"]
    assert (checks["apiVersion"], checks["kind"]) == ("ray.io/v1", "RayService")

    def says(expression: str) -> bool:
        environment = celpy.Environment()
        program = environment.program(environment.compile(expression))
        return bool(program.evaluate({key: celpy.json_to_cel(value) for key, value in case.service.items()}))

    def meaning() -> str:
        status = case.service.get("status")
        if status is None or status["observedGeneration"] != case.service["metadata"]["generation"] or says(checks["inProgress"]):
            return "Progressing"
        return "Degraded" if says(checks["failed"]) else "Healthy" if says(checks["current"]) else "Progressing"

    assert meaning() == case.meaning


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cases_mean_what_serve_app_rollout_says(case: Case) -> None:
    assert VERDICTS[judge(ray_service(case.service), []).kind] == case.meaning


def test_argo_cd_syncs_namespaces_then_operators_then_storage_and_secrets_then_the_chart() -> None:
    waves: dict[int, set[str]] = {}
    for name, application in applications().items():
        waves.setdefault(int(application["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"]), set()).add(name)
    assert waves == {
        0: {"namespaces"},
        1: {"kuberay-operator", "monitoring", "external-secrets"},
        2: {"storage-and-secrets"},
        3: {"demo"},
    }
    (config,) = documents(GITOPS / "argocd/argocd-cm.yaml")
    assert "resource.customizations.health.argoproj.io_Application" in config["data"]  # without it no wave waits
    (root,) = documents(GITOPS / "argocd/platform.yaml")
    assert root["spec"]["source"]["directory"] == {"include": "applications.yaml"}  # not itself, for which it would wait


def test_argo_cd_compares_as_kubernetes_would_apply() -> None:
    """Lists of which Kubernetes fills in a part are equal then: ports of a RayService, claims of Redis, entries of an ExternalSecret."""
    options = [a["metadata"]["annotations"]["argocd.argoproj.io/compare-options"] for a in applications().values()]
    assert set(options) == {"ServerSideDiff=true"}
    assert applications()["demo"]["spec"]["syncPolicy"]["syncOptions"] == ["ServerSideApply=true"]


def test_flux_syncs_in_the_same_order() -> None:
    after = {name: {d["name"] for d in k["spec"].get("dependsOn", [])} for name, k in kustomizations().items()}
    assert after == {
        "namespaces": set(),
        "values": set(),
        "operators": {"namespaces", "values"},
        "storage-and-secrets": {"operators"},
        "release": {"storage-and-secrets"},
    }
    assert [name for name, k in kustomizations().items() if not k["spec"].get("wait")] == ["release"]
    needed = {d["name"] for d in helm_releases()["demo"]["spec"]["dependsOn"]}
    assert needed == {"kuberay-operator", "monitoring", "external-secrets"}


def test_both_install_the_charts_that_the_readme_installs() -> None:
    commands = (K8S / "README.md").read_text().replace("\\\n", " ")
    installed = {
        name: (url, chart, f"${{{version}}}")
        for name, chart, url, version in re.findall(
            r"helm upgrade --install (\S+) (\S+) --repo (\S+)\s+--version \$(\w+)", commands
        )
    }
    names = ("kuberay-operator", "monitoring", "external-secrets")
    argo = {name: applications()[name]["spec"]["sources"][0] for name in names}
    assert {name: (s["repoURL"], s["chart"], s["targetRevision"]) for name, s in argo.items()} == {n: installed[n] for n in names}
    for name in names:
        (source,) = by_name(GITOPS / f"flux/operators/{name}.yaml", "HelmRepository").values()
        spec = helm_releases()[name]["spec"]
        assert (source["spec"]["url"], spec["chart"]["spec"]["chart"], spec["chart"]["spec"]["version"]) == installed[name]
        assert spec["targetNamespace"] == applications()[name]["spec"]["destination"]["namespace"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (repository,) = by_name(GITOPS / "flux/release/serve-app.yaml", "OCIRepository").values()
    assert repository["spec"]["ref"]["tag"] == applications()["demo"]["spec"]["sources"][0]["targetRevision"] == chart["version"]


def test_the_repository_has_every_path_that_they_name(repository: Path) -> None:
    paths = {k["spec"]["path"].removeprefix("./") for k in kustomizations().values()}
    for application in [*applications().values(), *documents(GITOPS / "argocd/platform.yaml")]:
        sources = application["spec"].get("sources") or [application["spec"]["source"]]
        paths |= {s["path"] for s in sources if "path" in s}
        paths |= {f.removeprefix("$platform/") for s in sources for f in s.get("helm", {}).get("valueFiles", [])}
    assert [path for path in sorted(paths) if not (repository / path).exists()] == []
    assert all(path.startswith(CLUSTER) for path in paths)
    assert {d["kind"] for f in (repository / CLUSTER / "flux").rglob("*.yaml") for d in documents(f)} == {"Kustomization"}
    generated = yaml.safe_load((repository / CLUSTER / "values/kustomization.yaml").read_text())["configMapGenerator"]
    files = {g["name"]: g["files"][0].removeprefix("values.yaml=") for g in generated}
    assert [f for f in files.values() if not (repository / CLUSTER / "values" / f).exists()] == []
    assert {r["spec"]["valuesFrom"][0]["name"] for r in helm_releases().values()} == set(files)


def test_the_repository_has_no_variable_and_no_secret_left_in_it(repository: Path) -> None:
    text = {f.name: f.read_text() for f in repository.rglob("*.yaml")}
    assert {name for name, content in text.items() if re.search(r"\$\{\w+\}", re.sub(r"#.*", "", content))} == set()
    kinds = {d.get("kind") for f in repository.rglob("*.yaml") if f.parent.name != "values" for d in documents(f)}
    assert "ExternalSecret" in kinds
    assert "Secret" not in kinds


def test_kubernetes_knows_the_objects_of_its_own_kinds(repository: Path, tmp_path: Path) -> None:
    files = [
        repository / CLUSTER / "namespaces/namespaces.yaml",
        repository / CLUSTER / "objects/storage.yaml",
        GITOPS / "argocd/argocd-cm.yaml",
    ]
    check_with_kubeconform("\n---\n".join(file.read_text() for file in files), 7, tmp_path)


@pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
def test_two_renderings_are_equal_with_secrets_of_ones_own() -> None:
    """Argo CD renders at each comparison, and reads nothing from the cluster."""

    def rendered() -> str:
        command = [tool("helm") or "", "template", "demo", str(CHART), "--namespace", "serve-app", "--values", "-"]
        return subprocess.run(command, input=yaml.safe_dump(our_values()), capture_output=True, text=True, check=True).stdout

    first = rendered()
    assert first == rendered()
    assert "kind: Secret\n" not in first

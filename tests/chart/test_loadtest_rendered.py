"""Kubernetes and the kit accept what the chart loadtest renders, which is restricted, and open only to whom it must be."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.cli import app
from loadtest.plan.scenario import load_scenario
from loadtest.proof.truth.settings import load_law
from tests.chart.loadtest_chart import CHART, CI_FILES, KEY, PODS, S3, WEB, master, render, render_file, template, worker
from tests.chart.render import Object, Rendered, at, merged, types_of
from tests.chart.schemas import check_with_kubeconform
from tests.chart.test_network import CLIENT, DNS, NEIGHBOUR, NODE_CREDENTIALS, POD_IDENTITY, End, reaches
from tests.chart.test_security import ACCEPTED, beyond_restricted, containers, not_restricted

NUM_PODS = {"eks-s3": 3, "job": 4, "web": 3}
NUM_CHECKS_PASSED = 880
"""Checks that checkov passes over everything that it audits below: a renderer or scanner that covers less must not pass."""


@pytest.fixture(params=CI_FILES, ids=lambda f: f.stem)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render_file(request.param)


def test_kubeconform_accepts_every_object_strictly(rendered: Rendered, tmp_path: Path) -> None:
    check_with_kubeconform(rendered.text, len(rendered.objects), tmp_path)


def test_there_are_values_for_both_modes_and_both_places_of_results() -> None:
    assert [f.name.removesuffix("-values.yaml") for f in CI_FILES] == list(NUM_PODS)


def test_every_pod_is_restricted_and_none_is_overlooked(rendered: Rendered, request: pytest.FixtureRequest) -> None:
    pods = dict(rendered.pod_templates())
    assert len(pods) == NUM_PODS[request.node.callspec.id.removesuffix("-values")]
    wrong = {where: [*not_restricted(t["spec"]), *beyond_restricted(t["spec"])] for where, t in pods.items()}
    address = ["run: TARGET_URL comes from a secret"] if "TARGET_URL" in str(wrong) else []  # an address, where it is asked for
    assert wrong == {where: address if where == "Job demo-1" else [] for where in pods}


@pytest.mark.parametrize("values", [merged(S3, PODS, KEY), {}, WEB], ids=["s3", "job", "web"])
@pytest.mark.parametrize("release", ["true", "null", "off"])
def test_a_release_may_be_called_like_what_is_no_text(values: dict[str, Any], release: str) -> None:
    assert types_of(render(values, release=release).objects) == types_of(render(values).objects)


def test_selectors_find_their_pods_and_only_one_run(rendered: Rendered) -> None:
    labels = [t["metadata"]["labels"] for _, t in rendered.pod_templates()]
    for service in rendered.of("Service").values():
        found = [each for each in labels if service["spec"]["selector"].items() <= each.items()]
        assert len(found) == 1
        ports = {p["targetPort"] for p in service["spec"]["ports"]}
        pod = next(t["spec"] for _, t in rendered.pod_templates() if t["metadata"]["labels"] == found[0])
        assert ports <= {p["name"] for c in containers(pod) for p in c.get("ports", [])}
    for deployment in rendered.of("Deployment").values():
        assert (
            deployment["spec"]["selector"]["matchLabels"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
        )


def test_another_run_has_jobs_of_another_name_and_workers_that_find_only_its_master() -> None:
    runs = {name: render(at("job.run", name)) for name in ("", "two")} | {"web": render(WEB)}
    assert [sorted(r.of("Job")) for r in runs.values()] == [["1", "1-workers"], ["two", "two-workers"], []]
    asked = [worker(r)["containers"][0]["args"][-1] for r in runs.values()]
    assert asked == ["demo-1-master", "demo-two-master", "demo-master"]
    assert all(name.removeprefix("demo-") in r.of("Service") for name, r in zip(asked, runs.values(), strict=True))
    selectors = [
        r.of("Service")["1-master" if name == "" else f"{name}-master"]["spec"]["selector"] for name, r in list(runs.items())[:2]
    ]
    labels = template(runs["two"], "Job", "two")["metadata"]["labels"]
    assert [selector.items() <= labels.items() for selector in selectors] == [False, True]
    assert runs[""].of("Deployment") == runs["two"].of("Deployment")  # the reports stay


@pytest.mark.parametrize("name", ["1", "1-workers"])
def test_nothing_of_a_run_is_tried_again(name: str) -> None:
    spec = render(at("workers.replicas", 3)).of("Job")[name]["spec"]
    assert (spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"] == {"operator": "NotIn", "values": [0]}
    assert spec["activeDeadlineSeconds"] == 60 + 120 + 600 + 900


def test_the_last_step_alone_judges_and_the_results_are_uploaded_before() -> None:
    pod = master(render(S3))
    assert [c["name"] for c in pod["initContainers"]] == ["run", "upload"]
    assert [(c["name"], c["command"], c["args"]) for c in pod["containers"]] == [
        ("verdict", ["serve-app-loadtest", "verdict"], ["/results/$(POD_NAME)"])
    ]
    assert "--judge-later" in pod["initContainers"][0]["args"]
    writes = [
        c["name"] for c in containers(pod) for m in c["volumeMounts"] if m["mountPath"] == "/results" and not m.get("readOnly")
    ]
    assert writes == ["run"]


def test_every_command_of_ours_is_one_and_knows_its_options(rendered: Rendered) -> None:
    commands = {c.name or str(getattr(c.callback, "__name__", "")): c for c in app.registered_commands}
    seen = set()
    for _, pod in rendered.pod_templates():
        for container in containers(pod["spec"]):
            if container["command"][0] != "serve-app-loadtest":
                continue
            name = container["command"][1]
            seen.add(name)
            known = {f"--{parameter.replace('_', '-')}" for parameter in commands[name].callback.__annotations__}
            given = {a.replace("--no-", "--") for a in container["args"] if a.startswith("--")}
            assert given - known - (_locusts_options() if name == "locust" else set()) == set()
    assert {"locust"} < seen or rendered.of("Deployment").keys() == {"master", "worker"}


LOCUSTS_OPTIONS = """
from locust.argument_parser import get_empty_argument_parser, setup_parser_arguments
from loadtest.control.locustfile import add_options

parser = get_empty_argument_parser()
setup_parser_arguments(parser)
add_options(parser)
print(*(option for action in parser._actions for option in action.option_strings))
"""


def _locusts_options() -> set[str]:
    """In a process of its own: Locust patches the sockets of the one that imports it."""
    command = [sys.executable, "-c", LOCUSTS_OPTIONS]
    return set(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split())


def test_the_test_pods_law_and_scenario_are_the_kits() -> None:
    assert load_scenario(CHART / "files" / "test-scenario.yaml").duration_s == 10
    assert load_law(CHART / "files" / "test-law.yaml").slots == 0


@pytest.mark.parametrize("values", [KEY, merged(KEY, WEB), merged(KEY, S3)])
def test_the_key_is_a_file_of_the_containers_that_send_it_and_of_no_other(values: dict[str, Any]) -> None:
    found = {
        (where, container["name"])
        for where, pod in render(values).pod_templates()
        for container in containers(pod["spec"])
        if any(mount["name"] == "api-key" for mount in container["volumeMounts"])
    }
    jobs = {("Job demo-1", "run"), ("Job demo-1-workers", "worker")}
    assert found == ({("Deployment demo-master", "master"), ("Deployment demo-worker", "worker")} if "mode" in values else jobs)


def test_a_token_of_the_cluster_is_mounted_only_where_pods_are_listed() -> None:
    for values in (PODS, merged(PODS, WEB)):
        found = render(values)
        mounted = [
            c["name"]
            for _, t in found.pod_templates()
            for c in containers(t["spec"])
            if "kubernetes.io" in str(c["volumeMounts"])
        ]
        assert mounted in (["run"], ["master"])
        assert found.of("Role")[""]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    assert render().of("Role") == {}
    assert "kubernetes.io" not in str([c["volumeMounts"] for _, t in render().pod_templates() for c in containers(t["spec"])])


def test_the_master_of_a_run_goes_where_a_volume_for_one_node_is() -> None:
    (term,) = master(render())["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    report = template(render(), "Deployment", "report")["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= report.items()
    assert "affinity" not in worker(render())


def ours(component: str) -> End:
    names = {"name": "loadtest", "instance": "demo", "component": component}
    return End(labels=tuple((f"app.kubernetes.io/{key}", value) for key, value in names.items()))


MASTER, WORKER, REPORT, TEST = map(ours, ("master", "worker", "report", "test"))
VIEWER, TARGET, OUTSIDE, API = (
    End("ingress-nginx"),
    End("serving", (("app", "x"),)),
    End(address="3.3.3.3"),
    End(address="10.96.0.1"),
)
VIEWERS = at(
    "networkPolicies.viewers", [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}]
)
ALL = merged(VIEWERS, PODS, at("results.s3.uri", "s3://b/p"))
ALLOWED = [
    (WORKER, MASTER, 5557),
    *((sender, TARGET, 8010) for sender in (MASTER, WORKER)),
    *((sender, DNS, 53) for sender in (MASTER, WORKER)),
    *((VIEWER, shown, port) for shown in (MASTER, REPORT) for port in (8089, 8090)),
    (MASTER, OUTSIDE, 443),
    (MASTER, POD_IDENTITY, 80),
    (MASTER, API, 6443),
]
DENIED = [
    *((outsider, MASTER, port) for outsider in (CLIENT, NEIGHBOUR, TEST, REPORT, VIEWER) for port in (5557,)),
    *(
        (outsider, shown, port)
        for outsider in (CLIENT, NEIGHBOUR, TEST, WORKER)
        for shown in (MASTER, REPORT)
        for port in (8089, 8090)
    ),
    *((any_of_ours, NODE_CREDENTIALS, port) for any_of_ours in (MASTER, WORKER, REPORT, TEST) for port in (80, 443)),
    *((any_of_ours, OUTSIDE, 443) for any_of_ours in (WORKER, REPORT, TEST)),
    *((any_of_ours, TARGET, 8010) for any_of_ours in (REPORT, TEST)),
    *((outsider, WORKER, 8089) for outsider in (CLIENT, NEIGHBOUR, MASTER)),
    (WORKER, API, 6443),
    (WORKER, TARGET, 6379),
]


@pytest.mark.parametrize(("source", "target", "port"), ALLOWED)
def test_who_must_reach_whom_does(source: End, target: End, port: int) -> None:
    assert reaches(render(ALL), source, target, port, "UDP" if port == 53 else "TCP")


@pytest.mark.parametrize(("source", "target", "port"), DENIED)
def test_nobody_else_reaches_anything(source: End, target: End, port: int) -> None:
    assert not reaches(render(ALL), source, target, port)


def test_nobody_but_a_port_forward_reaches_the_web_ui_by_default() -> None:
    found = render(WEB)
    assert [end for end in (CLIENT, NEIGHBOUR, VIEWER, WORKER) if reaches(found, end, MASTER, 8089)] == []


WITHOUT_PROBES = {"CKV_K8S_8", "CKV_K8S_9"}
"""Probes: a worker listens on nothing, and a probe that runs a program would take CPU from the load; Jobs and the test end themselves."""


def test_checkov_finds_nothing_in_all_that_it_must_audit(tmp_path: Path) -> None:
    checkov = shutil.which("checkov")
    if checkov is None:
        pytest.skip("checkov is not on the PATH; make charts installs it")
    num_pods = 0
    for file in CI_FILES:
        documents = list(_for_checkov(render_file(file)))
        num_pods += sum(d["kind"] == "Pod" for d in documents)
        (tmp_path / file.name).write_text(yaml.safe_dump_all(documents))
    command = [checkov, "-d", str(tmp_path), "--framework", "kubernetes", "--skip-download", "--quiet", "--compact", "-o", "json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120).stdout)
    summary, failed = report["summary"], report["results"]["failed_checks"]
    assert (summary["skipped"], summary["parsing_errors"]) == (0, 0)
    assert summary["passed"] >= NUM_CHECKS_PASSED
    assert num_pods == sum(NUM_PODS.values())
    assert [f"{c['check_id']} {c['check_name']}: {c['resource']} in {c['file_path']}" for c in failed if not _accepted(c)] == []


def _accepted(check: Object) -> bool:
    if check["check_id"] in WITHOUT_PROBES:
        return not str(check["resource"]).endswith(("deployment-demo-master", "deployment-demo-report"))
    if check["check_id"] == "CKV_K8S_35":  # a secret in the environment: the target's address, where it is asked for
        return str(check["resource"]).endswith("job-demo-1") and check["file_path"] == "/eks-s3-values.yaml"
    digest = check["check_id"] == "CKV_K8S_43" and check["file_path"] == "/eks-s3-values.yaml"
    return str(check["check_id"]) in ACCEPTED and not digest


def _for_checkov(found: Rendered) -> Iterator[Object]:
    for where, pod in found.pod_templates():
        metadata: dict[str, Any] = {"name": where.lower().replace(" ", "-"), "namespace": "serving"}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": pod["metadata"] | metadata, "spec": pod["spec"]}
    for o in found.objects:
        if o["kind"] not in ("Pod", "Job", "Deployment"):
            yield o | {"metadata": o["metadata"] | {"namespace": "serving"}}


@pytest.mark.parametrize(
    ("endpoint", "port"), [("", 443), ("https://s3.example.com/x", 443), ("http://minio:9000", 9000), ("http://minio", 80)]
)
def test_the_upload_reaches_its_endpoint_at_its_port(endpoint: str, port: int) -> None:
    rendered = render(merged(ALL, at("results.s3.endpoint", endpoint)))
    assert reaches(rendered, MASTER, OUTSIDE, port)
    assert reaches(rendered, MASTER, OUTSIDE, 9000) == (port == 9000)

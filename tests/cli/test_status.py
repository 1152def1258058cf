"""`serve-app status` on a machine prints the report of a fleet, readable at 80 columns."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from serve_app.cli.status import asked_by_http, show, target, with_losses
from serve_app.errors import ClusterFailed
from tests.ui.fake_service import KEY, fake_service, ingress, lost, member, starting
from tests.ui.fake_service import MODEL as OF_FAKE

LOAD = {"running": 12, "waiting": 3, "kv_usage": 0.455, "links": 2}
START = {
    "scheduled": 1234.5,
    "process": 2.0,
    "import": 14.0,
    "download": 1234.5,
    "load": 1234.5,
    "warm_up": 1234.5,
    "listen": 0.1,
}
QUICK = {"process": 2.5, "import": 8.0, "download": 0.0, "load": 1.5, "warm_up": 1.0, "listen": 0.1, "first_token": 7.0}
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def lease(replica_id: str, role: str, model: str, port: int, load: dict[str, Any]) -> dict[str, Any]:
    place = {"host": "255.255.255.255", "port": port, "pid": 4194304, "state": "draining"}
    return {"replica_id": replica_id, "role": role, "model": model, "load": load, "vllm_version": "0.32.0", **place}


REPORT = {
    "name": "serve-app",
    "url": "http://127.0.0.1:8010",
    "status": "DEPLOYING",
    "deployments": {
        "ingress": {"status": "HEALTHY", "message": "", "replica_states": {"RUNNING": 1, "STARTING": 0}},
        "replica-meta-llama-Llama-3-1-8B-Instruct-c14cdd": {
            "status": "UPDATING",
            "message": "Traceback\nserve_app.errors.EngineStartFailed: the engine core of 'a' did not start: no memory",
            "replica_states": {"RUNNING": 1, "STARTING": 1},
        },
    },
    "members": [
        lease("abcdefgh", "replica", MODEL, 65535, {**LOAD, "start_s": 4954.1, "cold_start": START}),
        lease("ijklmnop", "ingress", "", 8010, {"streams": 15, "models": {MODEL: {"waiting": 4}}}),
    ],
}


def shown(width: int, **changes: Any) -> list[str]:
    out = io.StringIO()
    show({**REPORT, **changes}, Console(file=out, width=width, highlight=False))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_every_line_fits_80_columns_and_nothing_is_cut() -> None:
    lines = shown(80)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert "replica-meta-llama-Llama-3-1-8B-Instruct-c14cdd" in "".join(line.split("  ")[0] for line in lines)


def test_a_line_is_one_member_with_its_load() -> None:
    words = [line.split() for line in shown(80)]
    assert words[0] == [
        "serve-app:",
        "deploying:",
        "1",
        "of",
        "1",
        "replica",
        "ready,",
        "1",
        "starting;",
        "requests",
        "are",
        "answered",
    ]
    assert words[1] == ["http://127.0.0.1:8010", "vLLM", "0.32.0", "Ray", "Serve", "reports", "DEPLOYING"]
    assert ["ijklmnop", "draining", "255.255.255.255:8010", "4194304", "15", "4"] in words
    assert [MODEL] in words
    assert ["abcdefgh", "draining", "255.255.255.255:65535", "4194304", "12", "3", "46%", "2"] in words


def test_an_ingress_that_refuses_the_changed_file_of_tenants_has_a_warning() -> None:
    said = "/tenants.yaml: tenants.t.weight: is 0"
    for change, expected in (
        ({}, "the changed file of tenants or keys has a mistake; the ingress's log says which"),
        ({"tenants_file_change": (1, said)}, said),
    ):
        refusing = [lease(name, "ingress", "", 8010, {"tenants_file_in_force": False, **change}) for name in ("i1", "i2")]
        assert f"warning: i1, i2: {expected}" in shown(200, members=refusing)
    for load in ({}, {"tenants_file_in_force": True}):
        assert "warning" not in "".join(shown(200, members=[lease("ijklmnop", "ingress", "", 8010, load)]))


def test_a_reason_is_in_our_own_words_and_across_the_whole_width() -> None:
    lines = shown(200)
    assert "replica-meta-llama-Llama-3-1-8B-Instruct-c14cdd: the engine core of 'a' did not start: no memory" in lines
    assert "Traceback" not in "\n".join(lines)


def test_why_serve_could_not_build_the_application_is_told_where_no_deployment_tells_it() -> None:
    lines = shown(200, status="DEPLOY_FAILED", message="Traceback\nserve_app.errors.ConfigInvalid: no model 'b'", deployments={})
    assert "serve-app: no model 'b'" in lines
    assert "Traceback" not in "\n".join(lines)


def test_starts_are_a_median_and_the_slowest_by_phase() -> None:
    quick = lease("a", "replica", MODEL, 8020, {**LOAD, "start_s": 13.1, "cold_start": QUICK})
    slow = lease("b", "replica", MODEL, 8020, {**LOAD, "start_s": 4954.1, "cold_start": START})
    of_an_older_version = lease("c", "replica", MODEL, 8020, LOAD)
    words = [line.split() for line in shown(80, members=[quick, slow, of_an_older_version])]
    assert words[-3:] == [
        ["start", "(s)", "whole", "scheduled", "process", "import", "download", "load", "warm_up"],
        ["median", "2483.6", "1234.5", "2.2", "11.0", "617.2", "618.0", "617.8"],
        ["slowest", "4954.1", "1234.5", "2.0", "14.0", "1234.5", "1234.5", "1234.5"],
    ]


def test_a_start_whose_phases_nobody_tells_has_its_whole() -> None:
    """`fleet_shape.py` lets such an answer to `status --url` through."""
    words = [line.split() for line in shown(80, members=[lease("a", "replica", MODEL, 8020, {**LOAD, "start_s": 13.1})])]
    assert words[-2:] == [["start", "(s)", "whole"], ["median", "13.1"]]


def test_an_ingress_is_asked_by_http_for_what_the_fleet_page_shows() -> None:
    with fake_service() as fake:
        report = asked_by_http(fake.url)
    out = io.StringIO()
    show(report, Console(file=out, width=80, highlight=False))
    assert report["members"] == fake.report["members"]
    assert "fake#replica#a" in out.getvalue()
    assert out.getvalue().startswith(f"fleet: serving: 1 of 1 replica ready\n{fake.url}  vLLM 0.32.0\n")


def test_an_ingress_asked_by_http_says_which_replicas_start_and_are_lost() -> None:
    with fake_service() as fake:
        models = {OF_FAKE: {"target": 2, "starting": [starting("c", since=988.0)]}}
        losses = [lost("b", time=998.0, cause="its engine was killed")]
        fake.report |= {"members": [*fake.report["members"], member("b", state="lost")], "models": models, "lost": losses}
        report = asked_by_http(fake.url)
    out = io.StringIO()
    show(report, Console(file=out, width=80, highlight=False))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert f"{OF_FAKE}: 1 of 2 ready, 1 starting, 1 lost" in lines
    assert [line for line in lines if line.startswith("fake#replica#") and ":4001" not in line] == [
        "fake#replica#c  starting for 12 s: loads the model",
        "fake#replica#b  lost 2 s ago: its engine was killed",
    ]
    assert not any(line.startswith("fake#replica#b") and ":4001" in line for line in lines)


def test_after_a_killed_engine_the_first_line_says_what_is_answered_and_rays_status_is_a_detail() -> None:
    serves = (
        "A replica's health check failed. This deployment will be UNHEALTHY until the replica recovers or a new deploy happens."
    )
    deployment = {"status": "UNHEALTHY", "message": serves, "replica_states": {"RUNNING": 1, "STARTING": 1}, "target": 2}
    of_serve = {
        "status": "UNHEALTHY",
        "message": "The deployments ['replica-fake-model'] are UNHEALTHY.",
        "deployments": {"replica-fake-model": deployment},
        "members": [ingress(), member("a"), member("b")],
    }
    with fake_service() as fake:
        losses = [lost("b", time=998.0, cause="its engine was killed")]
        fake.report |= {
            "members": [ingress(), member("a"), member("b", state="lost")],
            "models": {OF_FAKE: {"target": 2, "starting": [starting("c", since=988.0)]}},
            "lost": losses,
        }
        seen = asked_by_http(fake.url)
    lines = shown(200, **with_losses({**REPORT, **of_serve}, seen))
    assert lines[0] == "serve-app: degraded: 1 of 2 replicas ready, 1 starting, 1 lost; requests are answered"
    assert lines[1].endswith("  Ray Serve reports UNHEALTHY")
    assert "replica-fake-model: a replica was lost; Ray Serve starts another" in lines
    assert "fake#replica#b  lost 2 s ago: its engine was killed" in lines
    assert sum("UNHEALTHY" in line for line in lines) == 2  # in the detail of the head, and in the table of Serve's deployments


def test_an_address_where_nothing_listens_is_told_in_one_sentence() -> None:
    with pytest.raises(
        ClusterFailed, match=r"^nothing answers at http://127.0.0.1:1; start the service, or name another address by --url$"
    ):
        asked_by_http("http://127.0.0.1:1")


def test_an_address_without_its_scheme_is_told_as_a_url() -> None:
    with pytest.raises(ClusterFailed, match=r"^.localhost:80. is not a URL of http or https; for example http://localhost:80$"):
        asked_by_http("localhost:80")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "time: Field required"),
        ([], "Input should be"),
        ({"time": 1.0, "members": [{}], "decisions": []}, "members[0]: Unable to extract tag using discriminator 'role'"),
        ({"time": 1e300, "members": [], "decisions": []}, "time: Input should be less than or equal to 253402300799"),
        ({"time": 1.0, "members": [{**ingress(), "load": []}], "decisions": []}, "members[0].ingress.load: Input should be"),
        (
            {"time": 1.0, "members": [{**member("a"), "load": {}}], "decisions": []},
            "members[0].replica.load.running: Field required",
        ),
        ({"time": 1.0, "members": [], "decisions": [{}]}, "decisions[0].time: Field required"),
        ({"time": 1.0, "members": [], "decisions": [], "lost": [{}]}, "lost[0].replica_id: Field required"),
        ({"time": 1.0, "members": [], "decisions": [], "models": {"m": {"target": 1}}}, "models.m.starting: Field required"),
    ],
)
def test_an_answer_of_another_form_is_told_in_one_sentence(told: Any, said: str) -> None:
    with fake_service() as fake:
        fake.report = told
        with pytest.raises(ClusterFailed, match=rf"^{fake.url} does not report its fleet: {re.escape(said)}.*; is an ingress of"):
            asked_by_http(fake.url)


def test_a_missing_key_is_told_with_the_way_out() -> None:
    with (
        fake_service(asks_for_key=True) as fake,
        pytest.raises(ClusterFailed, match="answered 401 to GET /fleet; give an API key by --key"),
    ):
        asked_by_http(fake.url)
    with fake_service(asks_for_key=True) as fake:
        assert asked_by_http(fake.url, KEY)["decisions"] == []
        with pytest.raises(ClusterFailed, match="answered 401 to GET /fleet; give another API key by --key"):
            asked_by_http(fake.url, f"{KEY}-revoked")


@pytest.mark.parametrize(
    ("config", "status", "expected"),
    [
        ({"num_replicas": 2}, "HEALTHY", {"min": 2, "max": 2, "target": 2, "rollout": ""}),
        (
            {"autoscaling_config": {"min_replicas": 0, "max_replicas": 4}},
            "UPDATING",
            {"min": 0, "max": 4, "target": 2, "rollout": "config update started"},
        ),
    ],
)
def test_a_deployment_has_bounds_a_target_and_what_serve_is_about(
    config: dict[str, Any], status: str, expected: dict[str, Any]
) -> None:
    details = {"deployment_config": config, "target_num_replicas": 2, "status": status, "status_trigger": "CONFIG_UPDATE_STARTED"}
    assert target(details) == expected
    deployment = {"status": status, "message": "", "replica_states": {"RUNNING": 1}, **expected}
    words = [line.split() for line in shown(80, deployments={"replica-x": deployment}, members=[])]
    bounds = f"{expected['min']}..{expected['max']}"
    assert ["replica-x", status, "1", "running", "2", bounds, *expected["rollout"].split()] in words

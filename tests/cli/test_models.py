"""`serve-app models` changes Serve's config, describes each model, and refuses what cannot be."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from serve_app.application import bounds_entry
from serve_app.cli import models, running
from serve_app.cli.main import app
from serve_app.cli.model_rows import ModelRow, rows, state_of
from serve_app.cli.model_update import changed
from serve_app.cli.running import Running, _as_given
from serve_app.config import parse_settings
from serve_app.errors import ClusterFailed, ServingError
from tests.cli.helpers import rayservice
from tests.cli.model_fleet import MODELS, SETTINGS, fleet, report
from tests.cli.test_rollout import use
from tests.doubles.fake_kubernetes import FakeKubernetes, serving, write_kubeconfig


@pytest.fixture
def now() -> Running:
    return fleet()


def version(running: Running) -> str:
    """Return Serve's version of the application; another one replaces every replica."""
    return str(get_app_code_version(ServeDeploySchema.model_validate(running.serve).applications[0]))


def test_no_bound_that_is_changed_replaces_a_replica(now: Running) -> None:
    for name in ("chat", "org/code"):
        for minimum, initial in ((0, 0), (0, None), (1, None)):
            entry = bounds_entry(SETTINGS.models[name], minimum=minimum, initial=initial)
            operated = now.with_entry(entry)
            assert version(operated) == version(now)
            assert operated.entries()[entry["name"]] == entry
            assert operated.entries().keys() == now.entries().keys()


def test_another_applications_config_stays_as_it_is(now: Running) -> None:
    other = {"name": "other", "import_path": "other:app", "route_prefix": "/other"}
    both = Running("", SETTINGS, {**now.serve, "applications": [other, *now.serve["applications"]]})
    assert both.with_entry(bounds_entry(SETTINGS.models["chat"], minimum=0)).serve["applications"][0] == other
    assert both.with_settings(SETTINGS).serve["applications"][0] == other


def test_what_was_pinned_and_unloaded_outlasts_an_update_and_no_target_moves(now: Running) -> None:
    pinned = now.with_entry(bounds_entry(SETTINGS.models["org/code"], minimum=1))
    operated = pinned.with_entry(bounds_entry(SETTINGS.models["chat"], minimum=0, initial=0))
    updated = operated.with_settings(changed(SETTINGS, "chat", "/chat-v2", "", None))
    minimums = {name: updated.minimum(model) for name, model in updated.settings.models.items()}
    assert minimums == {"chat": 0, "org/code": 1, "vital": 1, "fixed": 1}
    assert updated.is_pinned(updated.model("org/code"))
    assert {e["autoscaling_config"]["initial_replicas"] for e in updated.entries().values()} == {None}
    assert updated.settings.models["chat"].model == "/chat-v2"
    assert parse_settings(updated.application["args"]) == updated.settings


def test_what_others_have_set_outlasts_an_update_and_a_changed_bound(now: Running) -> None:
    router = {"name": "ingress", "max_ongoing_requests": 7}
    entries = {**now.entries(), "replica-chat": {**now.entries()["replica-chat"], "health_check_timeout_s": 9}, "ingress": router}
    others = {"runtime_env": {"env_vars": {"A": "b"}}, "external_scaler_enabled": False, "logging_config": {"log_level": "DEBUG"}}
    (application,) = now.serve["applications"]
    given = {**application, **others, "deployments": [*entries.values()]}
    theirs = Running("", SETTINGS, _as_given({"target_capacity": 50.0}, [given]))
    updated = theirs.with_settings(changed(SETTINGS, "chat", "/chat-v2", "", None))
    for after in (updated, theirs.with_entry(bounds_entry(SETTINGS.models["chat"], minimum=0))):
        assert after.serve["target_capacity"] == 50.0
        assert {name: after.application[name] for name in others} == others
        assert after.entries()["ingress"] == router
        assert after.entries()["replica-chat"]["health_check_timeout_s"] == 9
        assert ServeDeploySchema.model_validate(after.serve)
    fixed = {name: {**MODELS[name], "replicas": {}} for name in MODELS}
    assert theirs.with_settings(parse_settings({"models": fixed})).entries()["replica-chat"] == {
        "name": "replica-chat",
        "health_check_timeout_s": 9,
    }
    assert "autoscaling_policy" not in theirs.with_settings(parse_settings({"models": fixed})).application


@pytest.mark.parametrize(
    ("states", "target", "status", "rollout", "state"),
    [
        ({"RUNNING": 2}, 2, "HEALTHY", "", "loaded"),
        ({"RUNNING": 1, "STARTING": 1}, 2, "UPSCALING", "autoscaling", "loaded"),
        ({"RUNNING": 1, "STARTING": 1}, 1, "UPDATING", "config update started", "updating"),
        ({"STARTING": 1}, 1, "UPDATING", "config update started", "loading"),
        ({}, 1, "UPSCALING", "autoscaling", "loading"),
        ({"STOPPING": 1}, 0, "UPDATING", "config update started", "unloading"),
        ({"RUNNING": 1}, 0, "UPDATING", "", "unloading"),
        ({"RUNNING": 0}, 0, "HEALTHY", "", "unloaded"),
        ({"STARTING": 1}, 1, "DEPLOY_FAILED", "config update started", "failed"),
        ({"RUNNING": 1, "STARTING": 1}, 2, "UNHEALTHY", "health check failed", "degraded"),
        ({"STARTING": 2}, 2, "UNHEALTHY", "health check failed", "failed"),
        ({"RUNNING": 1, "STARTING": 1}, 2, "UNHEALTHY", "replica startup failed", "failed"),
        ({}, 0, "", "", "updating"),
    ],
)
def test_a_model_has_one_state(states: dict[str, int], target: int, status: str, rollout: str, state: str) -> None:
    assert state_of(states, target, status, rollout) == state


def test_a_row_says_what_is_loaded_how_often_and_what_it_does(now: Running) -> None:
    replica = {"model": "chat", "load": {"running": 3, "waiting": 1}}
    ingress = {"model": "", "load": {"models": {"chat": {"waiting": 2, "cold_start_s": 7.5}}}}
    deployment = {
        "replica_states": {"RUNNING": 2, "STARTING": 1},
        "target": 3,
        "status": "UPSCALING",
        "rollout": "",
        "message": "",
    }
    report = {"deployments": {"replica-chat": deployment}, "members": [replica, replica, ingress]}
    chat, code, *_ = rows(now.with_entry(bounds_entry(SETTINGS.models["org/code"], minimum=1)), report)
    assert chat.cells()[:7] == ("chat", "loaded", "2/3", "1..4", "6+4", "7.5 s", "/chat@v1")
    assert (code.model, code.pinned, code.min, code.cold_start_s) == ("org/code", True, 1, None)
    assert chat.json()["release"] == SETTINGS.models["chat"].release()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["load", "none"], "'serve-app' has no model 'none'; its models: chat, org/code, vital, fixed"),
        (["load", "fixed"], "'fixed' has a fixed number of replicas (replicas.min and max are 1): it is always loaded"),
        (["pin", "fixed"], "models.fixed: {required: false, replicas: {min: 0, max: 1}}"),
        (["unload", "vital"], "set models.vital.required: false"),
        (["unload", "org/code"], "'org/code' is pinned; first: serve-app models pin org/code --off"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_way_out(
    command: list[str], said: str, now: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = now.with_entry(bounds_entry(SETTINGS.models["org/code"], minimum=1))
    monkeypatch.setattr(running, "running", lambda *_: pinned)
    result = CliRunner().invoke(app, ["models", *command])
    assert isinstance(result.exception, ServingError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("last", "minimums", "said"),
    [
        ("loaded", [1, 0], "org/code is loaded: 1 of 1 replicas"),
        ("failed", [1, 0], ""),
        ("loading", [1], "stays pinned until: serve-app models pin org/code --off"),
        ("Ctrl-C", [1], "stays pinned until: serve-app models pin org/code --off"),
    ],
)
def test_what_a_load_has_begun_goes_on_after_it(
    last: str, minimums: list[int], said: str, now: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [now]

    def take(serve: Mapping[str, Any]) -> None:
        given.append(Running("", SETTINGS, serve))

    def shown(*_: object) -> tuple[ModelRow, dict[str, Any]]:
        if last == "Ctrl-C":
            raise KeyboardInterrupt
        report: dict[str, Any] = {"deployments": {}, "members": []}
        code = list(rows(given[-1], report))[1]
        return replace(code, state=last, ready=int(last == "loaded"), target=1), report

    monkeypatch.setattr(running, "running", lambda *_: now)
    monkeypatch.setattr(running, "look", lambda *_: given[-1])
    monkeypatch.setattr(running, "hand_over", take)
    monkeypatch.setattr(models, "_look", shown)
    monkeypatch.setattr(models, "POLL_S", 0.0)
    with contextlib.suppress(ClusterFailed, KeyboardInterrupt):
        models.load("org/code", timeout_s=0.01)
    assert [running.minimum(SETTINGS.models["org/code"]) for running in given[1:]] == minimums
    assert said in "".join(capsys.readouterr())


def test_the_list_has_what_ails_a_model_below_the_table_in_our_own_words(now: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(running, "running", lambda *_: now)
    why = "serve_app.errors.EngineStartFailed: the engine core of 'chat' did not start: no memory"
    monkeypatch.setattr(models, "_report", lambda _: report("RUNNING", "i1", "r1", chat=f"Traceback\n{why}"))
    lines = CliRunner().invoke(app, ["models", "list"]).stdout.splitlines()
    assert lines[-2:] == ["", "chat: the engine core of 'chat' did not start: no memory"]
    assert max(map(len, lines)) <= 80
    (row,) = [line.split() for line in lines if line.startswith("chat  ")]
    assert row[:5] == ["chat", "loaded", "1/1", "1..4", "0+0"]
    (told,) = [row for row in json.loads(CliRunner().invoke(app, ["models", "list", "--json"]).stdout) if row["message"]]
    assert (told["model"], told["message"]) == ("chat", "the engine core of 'chat' did not start: no memory")


def test_without_a_fleet_each_command_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path))
    for command in (["list"], ["load", "a"], ["unload", "a"], ["pin", "a"], ["update", "a", "--model", "/b"]):
        result = CliRunner().invoke(app, ["models", *command])
        assert str(result.exception) == (
            "no application named 'serve-app' runs on this machine; start it with: serve-app up -f FILE"
        )


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    with serving(FakeKubernetes(services={"demo": [rayservice()]})) as fake:
        write_kubeconfig(tmp_path / "config", fake.host)
        use(monkeypatch, tmp_path / "config")
        yield fake


def test_on_kubernetes_the_commands_that_change_the_release_are_printed(kubernetes: FakeKubernetes) -> None:
    kubernetes.services["demo"] = [rayservice(annotations={"meta.helm.sh/release-name": "prod"})]
    command = ["models", "update", "a.b", "--model", "org/x", "--revision", "v 2", "--name", "demo", "-n", "llm"]
    upgrade, rollout = CliRunner().invoke(app, command).output.splitlines()
    assert upgrade.startswith("helm upgrade prod CHART ")
    assert upgrade.endswith(
        "-n llm --reset-then-reuse-values --set-string 'config.models.a\\.b.model=org/x'"
        " --set-string 'config.models.a\\.b.engine_args.revision=v 2'"
    )
    assert rollout.startswith("serve-app rollout demo ")
    upgrade, _ = (
        CliRunner()
        .invoke(app, ["models", "update", "chat", "--model", "org/x", "--name", "demo", "-n", "llm"])
        .output.splitlines()
    )
    assert upgrade.endswith("=org/x --set config.models.chat.engine_args.revision=null"), "a revision of other weights"
    kubernetes.services["demo"] = [rayservice()]
    assert "Helm has not made the RayService 'demo'" in str(CliRunner().invoke(app, command).exception)

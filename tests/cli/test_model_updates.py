"""`serve-app models update` changes one model, waits until nothing of before is left, and names the way back."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from serve_app.cli import models, running
from serve_app.cli.main import app
from serve_app.cli.model_update import changed, way_back, where_to_look
from serve_app.cli.running import Running
from serve_app.errors import ClusterFailed, ConfigError
from tests.cli.model_fleet import SETTINGS, fleet, report


@pytest.fixture
def now() -> Running:
    return fleet()


def test_an_update_changes_one_model_and_drops_a_revision_of_other_weights(tmp_path: Path) -> None:
    to = changed(SETTINGS, "chat", "/chat-v2", "", None)
    assert {n for n, m in to.models.items() if m != SETTINGS.models[n]} == {"chat"}
    assert "revision" not in to.models["chat"].engine_args
    assert changed(SETTINGS, "chat", "", "v2", None).models["chat"].engine_args["revision"] == "v2"
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump({"models": {"chat": {"model": "/of-file", "replicas": {"min": 2, "max": 3}}}}))
    assert changed(SETTINGS, "chat", "", "", file).models["chat"].replicas.min == 2
    with pytest.raises(ClusterFailed, match="has no model 'vital'; its models: chat"):
        changed(SETTINGS, "vital", "", "", file)
    with pytest.raises(ConfigError, match=r"models\.chat\.model: is '\./v2', a relative path"):
        changed(SETTINGS, "chat", "./v2", "", None)


def test_the_way_back_from_an_update_has_the_revision_of_before_and_asks_the_same_fleet() -> None:
    chat, code = SETTINGS.models["chat"], SETTINGS.models["org/code"]
    assert way_back(chat, None) == "serve-app models update chat --model /chat --revision v1"
    assert way_back(code, None) == "serve-app models update org/code --model /code"
    assert way_back(code, None, name="staging", address="10.0.0.1:6379") == (
        "serve-app models update org/code --model /code --name staging --address 10.0.0.1:6379"
    )
    assert way_back(chat, Path("fleet.yaml")) == "the same command with the earlier file"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "does not exist"),
        ("", "config.json is no JSON object: half written, or damaged"),
        ('{"architectures": ["Llam', "config.json is no JSON object: half written, or damaged"),
        ("[]", "config.json is no JSON object: half written, or damaged"),
    ],
)
def test_an_update_to_a_folder_that_no_ingress_could_read_changes_nothing(
    config: str | None, said: str, now: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "v2"
    if config is not None:
        folder.mkdir()
        (folder / "config.json").write_text(config)
    given: list[Mapping[str, Any]] = []
    monkeypatch.setattr(running, "running", lambda *_: replace(now, url="http://127.0.0.1:8010"))
    monkeypatch.setattr(running, "hand_over", given.append)
    monkeypatch.setattr(models, "_follow", lambda *_, **__: None)
    result = CliRunner().invoke(app, ["models", "update", "org/code", "--model", str(folder)])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert not given


def test_an_update_on_another_cluster_is_not_judged_by_the_folders_of_this_machine(
    now: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Mapping[str, Any]] = []
    monkeypatch.setattr(running, "running", lambda *_: now)
    monkeypatch.setattr(running, "hand_over", given.append)
    monkeypatch.setattr(models, "_report", lambda _: {"members": []})
    monkeypatch.setattr(models, "_follow", lambda *_, **__: None)
    result = CliRunner().invoke(
        app, ["models", "update", "org/code", "--model", str(tmp_path / "v2"), "--address", "10.0.0.1:6379"]
    )
    assert result.exit_code == 0
    assert len(given) == 1


def update_with(
    monkeypatch: pytest.MonkeyPatch,
    now: Running,
    *reports: dict[str, Any],
    timeout_s: str = "60",
    to: Sequence[str] = ("/chat-v2",),
) -> Result:
    """Run an update of `chat` that sees these reports, and the last one for ever."""
    left = [*reports]
    monkeypatch.setattr(running, "running", lambda *_: now)
    monkeypatch.setattr(running, "hand_over", lambda serve: None)
    monkeypatch.setattr(models, "_report", lambda _: left.pop(0) if len(left) > 1 else left[0])
    monkeypatch.setattr(models, "POLL_S", 0.0)
    monkeypatch.setattr(models, "SETTLE_S", 0.0)
    return CliRunner().invoke(app, ["models", "update", "chat", "--model", *to, "--timeout-s", timeout_s])


def test_an_update_ends_when_nothing_of_before_is_left_and_serve_says_that_all_runs(
    now: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = update_with(
        monkeypatch,
        now,
        report("RUNNING", "i1", "r1"),  # before it
        report("DEPLOYING", "i1", "r2", ingress="UPDATING"),
        report("RUNNING", "i1", "r2"),  # the autoscaler has scaled the ingresses meanwhile
        report("DEPLOYING", "r2", ingress="UPDATING"),
        report("RUNNING", "i2", "r2"),
    )
    line = "  chat: loaded, 1 of 1 replicas, 0 requests run, 0 wait; "
    assert (result.exit_code, result.stderr.splitlines()) == (
        0,
        [
            f"{line}old ingresses and replicas: 1; Serve says DEPLOYING: ingress updating",
            f"{line}old ingresses and replicas: 1",
            f"{line}Serve says DEPLOYING: ingress updating",
        ],
    )
    assert result.stdout.startswith("chat is updated on all replicas and ingresses; ")


def test_an_update_that_is_given_again_waits_for_the_one_that_continues(now: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    same = ("/chat", "--revision", "v1")
    busy = report("DEPLOYING", "i1", "r2", ingress="UPDATING")
    again = update_with(monkeypatch, now, busy, busy, report("RUNNING", "i2", "r2"), to=same)
    assert again.exit_code == 0
    waits = "Serve says DEPLOYING: ingress updating"
    assert again.stderr.splitlines()[0] == f"chat has these settings already, and the update to them is not complete: {waits}"
    assert again.stdout.startswith("chat is updated on all replicas and ingresses; ")
    complete = update_with(monkeypatch, now, report("RUNNING", "i2", "r2"), to=same)
    assert complete.stdout == "chat has these settings already; nothing was changed\n"


WAY_BACK = """
see its progress: serve-app status
old replicas that serve continue; the way back: serve-app models update chat --model /chat --revision v1"""


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (
            report("DEPLOY_FAILED", "i1", "r2", ingress="DEPLOY_FAILED", why="serve_app.errors.A: the tokenizer is damaged"),
            f"Serve has given up the update of 'chat'; ingress: the tokenizer is damaged{WAY_BACK}",
        ),
        (
            report("DEPLOY_FAILED", "i1", "r1", message="cannot import serve_app") | {"deployments": {}},
            f"Serve has given up the update of 'chat'; serve-app: cannot import serve_app{WAY_BACK}",
        ),
        (
            report("DEPLOYING", "i1", "r2", ingress="UPDATING"),
            "'chat' is loaded after 1 s; old ingresses and replicas: 1; Serve says DEPLOYING: ingress updating; "
            f"the change continues: serve-app models list{WAY_BACK}",
        ),
    ],
)
def test_an_update_that_does_not_come_through_says_why_and_what_to_look_at(
    last: dict[str, Any], said: str, now: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = update_with(monkeypatch, now, report("RUNNING", "i1", "r1"), last, timeout_s="1")
    assert (result.exit_code, str(result.exception)) == (1, said)


def test_a_failed_update_of_another_fleet_names_the_commands_for_that_fleet() -> None:
    assert where_to_look() == "serve-app status"
    assert where_to_look("staging", "10.0.0.1:6379") == "serve-app status staging --address 10.0.0.1:6379"

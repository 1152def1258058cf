"""The hook before an install and an upgrade runs serve-app check on the configuration that the release will have."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.main import app
from tests.chart.render import Object, Rendered, at, merged, models, render


def checked(made: Rendered, folder: Path, existing: Mapping[str, Mapping[str, str]] | None = None) -> tuple[int, str]:
    """Run what the job's container runs, in a cluster with these Secrets; return its exit status and output."""
    template = made.of("Job")["check"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    hook = {
        o["metadata"]["name"]: o["stringData"]
        for o in made.of("Secret").values()
        if "helm.sh/hook" in o["metadata"].get("annotations", {})
    }
    for path, text in files_of(template, {**(existing or {}), **hook}):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text.replace(mount["mountPath"], str(folder)))
    command: list[str] = [*container["command"], *container["args"]]
    assert command[0] == "serve-app"
    result = CliRunner().invoke(app, [argument.replace(mount["mountPath"], str(folder)) for argument in command[1:]])
    return result.exit_code, result.output


def files_of(template: Object, secrets: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield path and text of each file in the pod's only volume, as the kubelet makes them."""
    (volume,) = template["spec"]["volumes"]
    for source in volume["projected"]["sources"]:
        if (secret := source.get("secret")) is not None:
            if secret["name"] in secrets or not secret["optional"]:
                yield from ((item["path"], secrets[secret["name"]][item["key"]]) for item in secret["items"])
            continue
        for item in source["downwardAPI"]["items"]:
            annotation = item["fieldRef"]["fieldPath"].removeprefix("metadata.annotations['").removesuffix("']")
            yield item["path"], template["metadata"]["annotations"][annotation]


@pytest.mark.parametrize("values", [{}, merged(at("timeouts.clientSeconds", 599), at("ignoredRules", ["client-outlasts-drain"]))])
def test_a_configuration_that_the_chart_renders_is_valid(values: dict[str, Any], tmp_path: Path) -> None:
    code, output = checked(render(values), tmp_path)
    assert code == 0, output


def test_what_only_the_application_knows_ends_the_upgrade_with_its_reason(tmp_path: Path) -> None:
    code, output = checked(render(models({"name": "m", "model": "/opt/m", "engine_args": {"max_model_length": 7}})), tmp_path)
    assert code == 1
    assert "models.m.engine_args.max_model_length" in output
    assert "did you mean max_model_len" in output


WRONG = {"red": {"keys": [{"id": "Red_1", "sha256": "a" * 64}]}}
RIGHT = {"red": {"models": ["smollm2-135m-instruct"], "keys": [{"id": "red-1", "sha256": "a" * 64, "expires": "2027-01-31"}]}}


def test_the_tenants_of_the_values_are_checked_before_the_release_has_their_secret(tmp_path: Path) -> None:
    code, output = checked(render(at("tenants.inline", RIGHT)), tmp_path / "right")
    assert code == 0, output
    code, output = checked(render(at("tenants.inline", WRONG)), tmp_path / "wrong")
    assert code == 1
    assert "tenants.red.keys[0].id: " in output


def test_the_tenants_of_a_secret_are_checked_with_the_models_that_will_be_served(tmp_path: Path) -> None:
    made = render(at("tenants.existingSecret", "mine"))
    tenants = {"old": RIGHT, "new": {"red": {"models": ["chat"]}}}
    old, new = ({"mine": {"tenants.yaml": yaml.safe_dump({"tenants": tenants[name]})}} for name in ("old", "new"))
    code, output = checked(made, tmp_path / "old", old)
    assert code == 0, output
    code, output = checked(made, tmp_path / "new", new)
    assert code == 1
    assert "tenants.red.models[0]: is 'chat'" in output


def test_a_secret_of_tenants_that_comes_after_the_job_is_not_missed(tmp_path: Path) -> None:
    code, output = checked(render(at("tenants.existingSecret", "mine")), tmp_path)
    assert code == 0, output


@pytest.mark.parametrize(
    ("values", "is_made"),
    [
        (at("tenants.inline", RIGHT), True),
        (merged(at("tenants.inline", RIGHT), at("check.enabled", False)), False),
        (at("tenants.existingSecret", "mine"), False),
        ({}, False),
    ],
)
def test_the_hook_has_a_secret_only_for_tenants_of_the_values(values: dict[str, Any], is_made: bool) -> None:
    secrets = render(values).of("Secret")
    assert ("check-tenants" in secrets) is is_made
    if is_made:
        assert secrets["check-tenants"]["metadata"]["annotations"] == {
            "helm.sh/hook": "pre-install,pre-upgrade",
            "helm.sh/hook-weight": "-1",
            "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded",
        }


def test_a_failed_check_shows_its_reason_and_leaves_nothing_behind() -> None:
    job = render().of("Job")["check"]
    assert "--no-vllm" in job["spec"]["template"]["spec"]["containers"][0]["args"], (
        "the pod has no folder that vLLM could write to"
    )
    assert job["metadata"]["annotations"] == {
        "helm.sh/hook": "pre-install,pre-upgrade",
        "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded",
        "helm.sh/hook-output-log-policy": "hook-failed",
    }
    assert (job["spec"]["backoffLimit"], job["spec"]["ttlSecondsAfterFinished"]) == (0, 3600)

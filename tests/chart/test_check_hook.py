"""The hook before an install and an upgrade runs serve-app check on the configuration that the release will have."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app
from tests.chart.render import Rendered, at, merged, models, render


def checked(made: Rendered, folder: Path) -> tuple[int, str]:
    """Run what the job's container runs; return its exit status and output."""
    template = made.of("Job")["check"]["spec"]["template"]
    (volume,) = template["spec"]["volumes"]
    (item,) = volume["downwardAPI"]["items"]
    annotation = item["fieldRef"]["fieldPath"].removeprefix("metadata.annotations['").removesuffix("']")
    (container,) = template["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    (folder / item["path"]).write_text(template["metadata"]["annotations"][annotation])
    command: list[str] = [*container["command"], *container["args"]]
    assert command[0] == "serve-app"
    result = CliRunner().invoke(app, [argument.replace(mount["mountPath"], str(folder)) for argument in command[1:]])
    return result.exit_code, result.output


@pytest.mark.parametrize("values", [{}, merged(at("timeouts.clientSeconds", 599), at("ignoredRules", ["client-outlasts-drain"]))])
def test_a_configuration_that_the_chart_renders_is_valid(values: dict[str, Any], tmp_path: Path) -> None:
    code, output = checked(render(values), tmp_path)
    assert code == 0, output


def test_what_only_the_application_knows_ends_the_upgrade_with_its_reason(tmp_path: Path) -> None:
    code, output = checked(render(models({"name": "m", "model": "/opt/m", "engine_args": {"max_model_length": 7}})), tmp_path)
    assert code == 1
    assert "models.m.engine_args.max_model_length" in output
    assert "did you mean max_model_len" in output


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

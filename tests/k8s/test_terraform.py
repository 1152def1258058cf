"""k8s/eks: formatted, valid, and planned against a pretended AWS. Needs terraform and its AWS provider; no account, no network."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

EKS = Path(__file__).parents[2] / "k8s" / "eks"
TERRAFORM = shutil.which("terraform")
MIRRORS = [
    *(
        Path("~/.terraform.d/plugins").expanduser(),
        Path("/usr/local/share/terraform/plugins"),
        Path("/usr/share/terraform/plugins"),
    ),
    *Path("/opt").glob("*"),
]
"""Where terraform looks for providers before it asks the registry, and where machines without a way to it keep them."""


def terraform(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    assert TERRAFORM is not None
    environment = {k: v for k, v in os.environ.items() if k != "TF_CLI_CONFIG_FILE" or Path(v).exists()}
    return subprocess.run([TERRAFORM, *command, "-no-color"], cwd=folder, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with the provider in place."""
    if TERRAFORM is None:
        pytest.skip("terraform is not installed")
    copy = tmp_path_factory.mktemp("terraform") / "eks"
    shutil.copytree(EKS, copy, ignore=shutil.ignore_patterns(".terraform*"))
    mirrors = [path for path in MIRRORS if (path / "registry.terraform.io/hashicorp/aws").is_dir()]
    options = [f"-plugin-dir={mirrors[0]}"] if mirrors else []
    made = terraform(copy, "init", "-backend=false", "-input=false", *options)
    if made.returncode != 0:
        pytest.skip(f"the AWS provider cannot be had here: {made.stderr.strip().splitlines()[-1] if made.stderr else ''}")
    return copy


def test_it_is_formatted_and_valid(folder: Path) -> None:
    assert terraform(folder, "fmt", "-check", "-recursive").stdout == ""
    validated = terraform(folder, "validate")
    assert validated.returncode == 0, validated.stdout + validated.stderr


def test_the_plans_hold(folder: Path) -> None:
    tested = terraform(folder, "test")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "3 passed, 0 failed" in tested.stdout

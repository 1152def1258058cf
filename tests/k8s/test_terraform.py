"""These tests format, validate and plan k8s/eks against a pretended AWS, with terraform and its provider; no account or network."""

import filecmp
import os
import re
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
    shutil.copytree(EKS, copy, ignore=shutil.ignore_patterns(".terraform"))
    mirrors = [path for path in MIRRORS if (path / "registry.terraform.io/hashicorp/aws").is_dir()]
    options = [f"-plugin-dir={mirrors[0]}"] if mirrors else []
    options.append("-lockfile=readonly")
    made = terraform(copy, "init", "-backend=false", "-input=false", *options)
    # Words may be on two lines.
    assert "match any of the checksums" not in " ".join(made.stderr.replace("│", " ").split()), made.stderr
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
    assert "6 passed, 0 failed" in tested.stdout


def test_the_lock_file_knows_the_provider_that_is_installed(folder: Path) -> None:
    """`terraform init` refuses a provider with another checksum, and with -lockfile=readonly one that it would have to add."""
    lock = (EKS / ".terraform.lock.hcl").read_text()
    (constraint,) = re.findall(r'version = "~> (\d+\.\d+)"', (EKS / "versions.tf").read_text())
    (version,) = re.findall(r'version     = "(\S+)"', lock)
    assert version.startswith(f"{constraint}.")
    assert filecmp.cmp(EKS / ".terraform.lock.hcl", folder / ".terraform.lock.hcl", shallow=False)


def test_the_state_is_in_s3_and_locked_there() -> None:
    (backend,) = re.findall(r'backend "s3" \{(.*?)\n  \}', (EKS / "versions.tf").read_text(), re.DOTALL)
    settings = dict(re.findall(r"(\w+)\s*=\s*(\S+)", backend))
    assert settings == {"encrypt": "true", "use_lockfile": "true"}  # bucket, key and region are the user's own
    example = (EKS / "backend.hcl.example").read_text()
    assert set(re.findall(r"^(\w+)", example, re.MULTILINE)) == {"bucket", "key", "region"}


def test_zones_that_eks_refuses_are_left_out() -> None:
    """Their ids mean the same zone in every account; names do not."""
    (zones,) = re.findall(r'data "aws_availability_zones" "this" \{(.*?)\n\}', (EKS / "vpc.tf").read_text(), re.DOTALL)
    assert "exclude_zone_ids = var.exclude_zone_ids" in zones
    (ids,) = re.findall(r'variable "exclude_zone_ids" \{.*?default +=(.*?)\n', (EKS / "variables.tf").read_text(), re.DOTALL)
    assert re.findall(r'"([a-z0-9-]+)"', ids) == ["use1-az3", "usw1-az2", "cac1-az3"]

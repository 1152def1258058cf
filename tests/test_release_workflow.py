"""The workflow of a tag publishes nothing before its reviewers agree, and a second run continues where the first one failed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
COMMAND = """#!/bin/bash
echo "${0##*/} $*" >> commands
[[ "${0##*/} $*" != "gh release view v1.2.3" || $IS_THERE = yes ]]
"""
FILES = "build/release/NOTES.md build/release/a.tar.gz build/release/a.whl"


def test_every_job_that_may_write_or_sign_has_the_environment_with_the_reviewers() -> None:
    writers = {name: job.get("environment") for name, job in JOBS.items() if "write" in job["permissions"].values()}
    assert writers == {"image": "release", "files": "release"}


@pytest.mark.parametrize(
    ("is_there", "last"),
    [
        ("no", f"gh release create v1.2.3 --verify-tag --title v1.2.3 --notes-file build/release/NOTES.md {FILES}"),
        ("yes", f"gh release upload v1.2.3 --clobber {FILES}"),
    ],
)
def test_what_an_earlier_run_published_is_no_error(tmp_path: Path, is_there: str, last: str) -> None:
    (publish,) = (step["run"] for step in JOBS["files"]["steps"] if step.get("name") == "Publish")
    for name in ("bin/docker", "bin/skopeo", "bin/cosign", "bin/gh", ".venv/bin/uv"):
        command = tmp_path / name
        command.parent.mkdir(parents=True, exist_ok=True)
        command.write_text(COMMAND)
        command.chmod(0o755)
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    for name in (*FILES.split(), "build/digest"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    job = {"GITHUB_REF_NAME": "v1.2.3", "GITHUB_REPOSITORY_OWNER": "Owner", "GITHUB_ACTOR": "someone", "GH_TOKEN": "t"}
    variables = {**job, "IS_THERE": is_there, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    subprocess.run(["bash", "-eo", "pipefail", "-c", publish], cwd=tmp_path, env=variables, check=True)
    *_, upload, look, page = (tmp_path / "commands").read_text().splitlines()
    names = dict(re.findall(r"^(\w+)=(.+)$", (ROOT / ".github" / "release.env").read_text(), re.MULTILINE))
    assert upload == (
        f"uv publish --trusted-publishing always --publish-url {names['PYTHON_REPOSITORY']} --check-url {names['PYTHON_INDEX']} "
        "build/release/a.whl build/release/a.tar.gz"
    )
    assert (look, page) == ("gh release view v1.2.3", last)

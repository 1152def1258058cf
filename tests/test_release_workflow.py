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
for argument; do
  [[ $before != --digestfile ]] || echo sha256:d1 > "$argument"
  before=$argument
done
[[ "${0##*/} $*" != "gh release view v1.2.3" || $IS_THERE = yes ]]
"""
FILES = "build/release/NOTES.md build/release/a.tar.gz build/release/a.whl"
JOB = {"GITHUB_REF_NAME": "v1.2.3", "GITHUB_REPOSITORY_OWNER": "Owner", "GITHUB_ACTOR": "someone", "GH_TOKEN": "t", "TOKEN": "t"}


def script(job: str, name: str) -> str:
    """Return what a step of the workflow runs; its name begins with `name`."""
    (found,) = (step["run"] for step in JOBS[job]["steps"] if step.get("name", "").startswith(name))
    assert isinstance(found, str)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout in which every command that publishes only writes down what it was asked."""
    for name in ("docker", "skopeo", "cosign", "gh", "make", "jq", "helm", "tools/verify-release", ".venv/bin/uv"):
        command = tmp_path / (name if "/" in name else f"bin/{name}")
        command.parent.mkdir(parents=True, exist_ok=True)
        command.write_text(COMMAND)
        command.chmod(0o755)
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    for name in FILES.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def run(folder: Path, commands: str, **variables: str) -> list[str]:
    """Return what the commands of publishing were asked."""
    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", **variables}
    subprocess.run(["bash", "-e", "-c", commands], cwd=folder, env=environment, check=True)
    return (folder / "commands").read_text().splitlines()


def names_of(owner: str) -> dict[str, str]:
    text = (ROOT / ".github" / "release.env").read_text().replace("${GITHUB_REPOSITORY_OWNER,,}", owner)
    return dict(re.findall(r"^(\w+)=(.+)$", text, re.MULTILINE))


def test_every_job_that_may_write_or_sign_has_the_environment_with_the_reviewers() -> None:
    writers = {name: job.get("environment") for name, job in JOBS.items() if "write" in job["permissions"].values()}
    assert writers == {"image": "release", "files": "release"}


@pytest.mark.parametrize(
    ("heading", "version", "reason"),
    [
        ("## 1.2.3 - 2026-12-01", "1.2.3", ""),
        ("## 1.2.3 - unreleased", "1.2.3", "CHANGELOG.md begins with '## 1.2.3 - unreleased', not with '## 1.2.3 - ' and a date"),
        ("## 1.2.4 - 2026-12-01", "1.2.3", "CHANGELOG.md begins with '## 1.2.4 - 2026-12-01', not with '## 1.2.3 - ' and a date"),
        ("## 1x2.3 - 2026-12-01", "1.2.3", "CHANGELOG.md begins with '## 1x2.3 - 2026-12-01', not with '## 1.2.3 - ' and a date"),
        ("## 1.2.3 - 2026-12-01", "1.2.4", "pyproject.toml has another version than v1.2.3"),
    ],
)
def test_a_tag_that_changelog_or_package_does_not_name_as_released_is_refused(
    tmp_path: Path, heading: str, version: str, reason: str
) -> None:
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\nText.\n\n## 1.2.3 - 2026-01-01\n")
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    command = ["bash", "-e", "-c", script("locks", "Require the tag")]
    said = subprocess.run(command, cwd=tmp_path, env={**os.environ, **JOB}, capture_output=True, text=True)
    assert (said.returncode, said.stdout) == ((1, f"::error::{reason}\n") if reason else (0, ""))


def test_both_images_are_built_on_one_digest_of_the_base_that_the_dockerfile_names(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Dockerfile", tmp_path)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(
        '#!/bin/bash\n[ "$*" = "buildx imagetools inspect $BASE --format {{.Manifest.Digest}}" ] && echo sha256:ba5e\n'
    )
    docker.chmod(0o755)
    (base,) = re.findall(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    variables = {"PATH": f"{docker.parent}:{os.environ['PATH']}", "BASE": base, "GITHUB_OUTPUT": "output"}
    subprocess.run(["bash", "-e", "-c", script("locks", "Find the digest")], cwd=tmp_path, env=variables, check=True)
    assert (tmp_path / "output").read_text() == f"base={base}@sha256:ba5e\n"
    assert JOBS["locks"]["outputs"] == {"base": "${{ steps.base.outputs.base }}"}
    assert [step["id"] for step in JOBS["locks"]["steps"] if "id" in step] == ["base"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_image_is_pushed_as_it_was_saved_and_its_digest_signed_and_attested(folder: Path, kind: str) -> None:
    (matrix,) = (row for row in JOBS["image"]["strategy"]["matrix"]["include"] if row["kind"] == kind)
    (step,) = (step for step in JOBS["image"]["steps"] if step.get("name", "").startswith("Build"))
    given = {name: matrix[name.lower()] for name in ("TARGET", "VARIABLE", "OTHER", "SUFFIX", "KIND")}
    assert {name: step["env"][name] for name in given} == {name: f"${{{{ matrix.{name.lower()} }}}}" for name in given}
    assert step["env"]["BASE"] == "${{ needs.locks.outputs.base }}"
    repository = names_of("owner")["IMAGE_REPOSITORY"]
    image, saved = f"{repository}:1.2.3{matrix['suffix']}", "build/images/serve-app-1.2.3-image"
    assert run(folder, step["run"], **JOB, **given, BASE="b@sha256:ba5e") == [
        f"make {matrix['target']} {matrix['variable']}={image} BASE=b@sha256:ba5e",
        "docker builder prune --all --force",
        f"make dist-images {matrix['variable']}={image} {matrix['other']}= BASE=b@sha256:ba5e DIST_IMAGES=build/images",
        f"docker login {repository.partition('/')[0]} -u someone --password-stdin",
        f"skopeo copy --preserve-digests --digestfile build/digest oci-archive:{saved}-{kind}.oci.tar docker://{image}",
        f"cosign sign --yes {repository}@sha256:d1",
        f"cosign attest --yes --type cyclonedx --predicate {saved}-{kind}.cdx.json {repository}@sha256:d1",
        f"jq .predicate {saved}s-provenance.json",
        f"cosign attest --yes --type slsaprovenance1 --predicate build/provenance.json {repository}@sha256:d1",
    ]


@pytest.mark.parametrize(
    ("is_there", "last"),
    [
        ("no", f"gh release create v1.2.3 --verify-tag --title v1.2.3 --notes-file build/release/NOTES.md {FILES}"),
        ("yes", f"gh release upload v1.2.3 --clobber {FILES}"),
    ],
)
def test_what_an_earlier_run_published_is_no_error(folder: Path, is_there: str, last: str) -> None:
    *_, upload, look, page = run(folder, script("files", "Publish"), **JOB, IS_THERE=is_there)
    names = names_of("owner")
    assert upload == (
        f"uv publish --trusted-publishing always --publish-url {names['PYTHON_REPOSITORY']} --check-url {names['PYTHON_INDEX']} "
        "build/release/a.whl build/release/a.tar.gz"
    )
    assert (look, page) == ("gh release view v1.2.3", last)


def test_the_docs_pull_a_release_under_the_names_that_the_workflow_publishes(folder: Path) -> None:
    section = (ROOT / "docs" / "start.md").read_text().partition("## Pull a release\n")[2]
    commands = section.partition("```sh\n")[2].partition("```")[0].replace("OWNER", "Owner").replace("_Owner", "_OWNER")
    check, pull, install, download, verify = run(folder, commands, **JOB | {"GITHUB_REPOSITORY_OWNER": ""})
    image = f"{names_of('owner')['IMAGE_REPOSITORY']}:0.2.0"
    workflow = "https://github.com/Owner/serve-app/.github/workflows/release.yml@refs/tags/v0.2.0"
    issuer = "https://token.actions.githubusercontent.com"
    assert check == f"cosign verify {image} --certificate-identity {workflow} --certificate-oidc-issuer {issuer}"
    assert verify == f"verify-release release {workflow}"
    assert download == "gh release download v0.2.0 --dir release"
    (folder / "commands").unlink()
    published = run(folder, script("files", "Publish"), **JOB | {"GITHUB_REF_NAME": "v0.2.0"}, IS_THERE="no")
    (chart,) = re.findall(r"docker://(\S+/charts/serve-app):0\.2\.0", "\n".join(published))
    assert install.startswith(f"helm install demo oci://{chart} --version 0.2.0 ")
    assert pull == f"docker pull {image}"

"""`make dist` makes files from which both parts of a release install."""

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.render import CHART, render, tool

ROOT = CHART.parents[1]
REPOSITORY = "registry.example.com/team/serve-app"
UNLISTED = {"SHA256SUMS", "SHA256SUMS.sig"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if tool("helm") is None:
        pytest.skip("helm is neither on the PATH nor in $KUBE_TESTBED/bin")
    folder, key = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("keys") / "release.key"
    subprocess.run(["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", key.with_suffix(".pub")], check=True)
    variables = [f"DIST={folder}", f"SIGNING_KEY={key}", f"IMAGE_REPOSITORY={REPOSITORY}"]
    subprocess.run(["make", "-s", "dist", *variables], cwd=ROOT, check=True, timeout=240)
    verify = [ROOT / "tools" / "verify-release", folder, key.with_suffix(".pub")]
    subprocess.run(verify, check=True)
    return folder


def test_the_checksums_are_of_every_file(dist: Path) -> None:
    said = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=dist, capture_output=True, text=True, check=True).stdout
    assert {line.partition(":")[0] for line in said.splitlines()} == {path.name for path in dist.iterdir()} - UNLISTED


def test_the_provenance_names_every_file_by_its_digest_and_the_commit(dist: Path) -> None:
    (provenance,) = dist.glob("*-provenance.json")
    made = json.loads(provenance.read_text())
    files = {path.name: path for path in dist.iterdir() if path.name not in UNLISTED | {provenance.name}}
    assert {subject["name"]: subject["digest"]["sha256"] for subject in made["subject"]} == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()
    }
    build = made["predicate"]["buildDefinition"]
    assert build["externalParameters"] == {"target": "dist", "variables": {"IMAGE_REPOSITORY": REPOSITORY}}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert build["resolvedDependencies"][0]["digest"] == {"gitCommit": commit}


def test_wheel_and_source_hold_all_that_the_packages_need(dist: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "serve_app", "loadtest"], cwd=ROOT, capture_output=True, text=True, check=True)
    # serve_app/examples is a link to the folder beside it, and the packages hold its files.
    paths = [
        path
        for name in listed.stdout.split()
        for path in ([*(ROOT / name).rglob("*")] if (ROOT / name).is_dir() else [ROOT / name])
        if path.is_file() and path.suffix != ".pyc"
    ]
    ours = {str(path.relative_to(ROOT)) for path in paths}
    (wheel,) = dist.glob("*.whl")
    assert ours - set(zipfile.ZipFile(wheel).namelist()) == set()
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert ours - {name.partition("/")[2] for name in archive.getnames()} == set()


def test_the_source_archive_has_the_date_of_the_commit_so_that_a_second_build_is_the_same(dist: Path) -> None:
    committed = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (source,) = dist.glob("*.tar.gz")
    assert source.read_bytes()[4:8] == bytes(4), "the time in the gzip header"
    with tarfile.open(source) as archive:
        members = [(member.mtime, member.uid, member.uname) for member in archive]
        assert set(members) == {(int(committed), 0, "")}


def test_the_archived_chart_renders_as_the_folder_with_the_images_of_the_release(dist: Path) -> None:
    (archive,) = dist.glob("serve-app-*.tgz")
    given = {name: {"existingSecret": "s"} for name in ("apiKeys", "clusterToken", "rayToken")}  # generated ones differ
    assert render(given, chart=archive).text == render(given | {"image": {"repository": REPOSITORY}}).text


def test_helm_lints_the_archived_charts(dist: Path) -> None:
    for chart in ("serve-app", "loadtest", "batch"):
        job = CHART.parent / chart / "ci" / "job-values.yaml"
        values = ["--values", str(job)] if job.exists() else []
        (archive,) = dist.glob(f"{chart}-*.tgz")
        subprocess.run([str(tool("helm")), "lint", "--strict", "--quiet", archive, *values], check=True)


@pytest.mark.parametrize("chart", ["serve-app", "loadtest", "batch"])
def test_the_oci_archive_of_a_chart_holds_the_package_under_its_version(dist: Path, chart: str) -> None:
    about = yaml.safe_load((CHART.parent / chart / "Chart.yaml").read_text())
    with tarfile.open(dist / f"{chart}-{about['version']}-chart.oci.tar") as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]

    def blob(descriptor: dict[str, Any]) -> bytes:
        content = files.pop("blobs/" + descriptor["digest"].replace(":", "/"))
        assert descriptor["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert descriptor["size"] == len(content)
        return content

    assert json.loads(files.pop("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads(files.pop("index.json"))["manifests"]
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": about["version"]}
    manifest = json.loads(blob(entry))
    assert json.loads(blob(manifest["config"])) == about
    (layer,) = manifest["layers"]
    assert blob(layer) == (dist / f"{chart}-{about['version']}.tgz").read_bytes()
    assert files == {}
    types = [descriptor["mediaType"].partition("application/vnd.")[2] for descriptor in (entry, manifest["config"], layer)]
    assert types == ["oci.image.manifest.v1+json", "cncf.helm.config.v1+json", "cncf.helm.chart.content.v1.tar+gzip"]


def test_skopeo_reads_the_oci_archive_of_a_chart(dist: Path, tmp_path: Path) -> None:
    if (skopeo := tool("skopeo")) is None:
        pytest.skip("skopeo is not on the PATH")
    (archive,) = dist.glob("serve-app-*-chart.oci.tar")
    (package,) = dist.glob("serve-app-*.tgz")
    subprocess.run([skopeo, "--insecure-policy", "copy", "--quiet", f"oci-archive:{archive}", f"dir:{tmp_path}"], check=True)
    assert package.read_bytes() in [file.read_bytes() for file in tmp_path.iterdir()]


def test_equal_packages_make_equal_oci_archives(dist: Path, tmp_path: Path) -> None:
    (archive,) = dist.glob("serve-app-*-chart.oci.tar")
    (package,) = dist.glob("serve-app-*.tgz")
    again = tmp_path / archive.name
    subprocess.run([sys.executable, "-m", "tools.chart_layout", package, again], cwd=ROOT, check=True)
    assert again.read_bytes() == archive.read_bytes()


@pytest.mark.parametrize(("kind", "apart"), [("cpu", {("torch", "2.13.0+cpu")}), ("cuda", set())])
def test_an_sbom_lists_every_package_of_its_lock(dist: Path, kind: str, apart: set[tuple[str, str]]) -> None:
    (lock,) = dist.glob(f"*-{kind}.txt")
    (sbom,) = dist.glob(f"*-{kind}.cdx.json")
    locked = set(re.findall(r"^([a-z0-9.-]+)(?:\[[a-z,-]+\])?==([^ ]+)", lock.read_text(), re.MULTILINE))
    assert len(locked) > 150
    listed = json.loads(sbom.read_text())
    assert {(part["name"], part["version"]) for part in listed["components"]} == locked | apart
    assert (listed["bomFormat"], listed["metadata"]["component"]["name"]) == ("CycloneDX", "serve-app")


def test_one_file_has_the_names_under_which_a_release_is_published() -> None:
    found = subprocess.run(
        ["git", "grep", "-lE", "ghcr[.]io|upload[.]pypi"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == ".github/release.env\n"


def test_the_notes_are_the_newest_section_of_the_changelog(dist: Path) -> None:
    notes = (dist / "NOTES.md").read_text()
    assert notes.startswith("## ")
    assert notes.count("\n## ") == 0
    assert notes in (ROOT / "CHANGELOG.md").read_text()


def test_the_table_in_the_docs_names_every_file(dist: Path) -> None:
    named = re.findall(r"`([^` ]+)`", (ROOT / "docs" / "release.md").read_text())
    version = re.search(r"serve_app-([0-9.]+)-cpu.txt", " ".join(path.name for path in dist.iterdir()))
    assert version is not None
    made = [path.name.replace(version[1], "VERSION") for path in dist.iterdir()]
    short = tuple(name for name in named if name.startswith("-cuda."))  # behind the same name with cpu
    assert [name for name in made if name not in named and not name.endswith(short)] == []

"""`make dist` makes files from which both parts of a release install."""

import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.chart.render import CHART, render, tool

ROOT = CHART.parents[1]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if tool("helm") is None:
        pytest.skip("helm is neither on the PATH nor in $KUBE_TESTBED/bin")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(["make", "-s", "dist", f"DIST={folder}"], cwd=ROOT, check=True, timeout=120)
    return folder


def test_the_checksums_are_of_every_file(dist: Path) -> None:
    said = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=dist, capture_output=True, text=True, check=True).stdout
    assert {line.partition(":")[0] for line in said.splitlines()} == {path.name for path in dist.iterdir()} - {"SHA256SUMS"}


def test_wheel_and_source_hold_all_that_the_packages_need(dist: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "serve_app", "loadtest"], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = set(listed.stdout.split())
    (wheel,) = dist.glob("*.whl")
    assert ours - set(zipfile.ZipFile(wheel).namelist()) == set()
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert ours - {name.partition("/")[2] for name in archive.getnames()} == set()


def test_the_archived_chart_renders_as_the_folder(dist: Path) -> None:
    (archive,) = dist.glob("serve-app-*.tgz")
    given = {name: {"existingSecret": "s"} for name in ("apiKeys", "clusterToken", "rayToken")}  # generated ones differ
    assert render(given, chart=archive).text == render(given).text


def test_the_notes_are_the_newest_section_of_the_changelog(dist: Path) -> None:
    notes = (dist / "NOTES.md").read_text()
    assert notes.startswith("## ")
    assert notes.count("\n## ") == 0
    assert notes in (ROOT / "CHANGELOG.md").read_text()

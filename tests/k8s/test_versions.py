"""k8s/cluster/versions.env is the only place that names a version of what the chart stands on, and Renovate reads all of it."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PINS: dict[str, str] = dict(re.findall(r"^([A-Z_]+)=(\S+)$", (ROOT / "k8s/cluster/versions.env").read_text(), re.MULTILINE))
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "helm/serve-app/values.yaml").read_text())
IMAGES = {
    name: image["tag"]
    for name, image in {"valkey": VALUES["gcsFaultTolerance"]["redis"]["image"], "aws": VALUES["weights"]["s3Image"]}.items()
}
HISTORY = {"docs/platform.md"}
"""Pages on how one version differs from the next."""
SHOWN = {f"helm/{chart}/{file}" for chart in ("serve-app", "loadtest") for file in ("values.yaml", "README.md")}
"""Values of charts, and what is made from them."""


def texts() -> dict[str, str]:
    """Return the files that a reader copies commands or versions from, by path."""
    files = [ROOT / "README.md"]
    files += [file for folder in ("k8s", "docs", "helm", "examples") for file in (ROOT / folder).rglob("*") if file.is_file()]
    kinds = {".md", ".yaml", ".tf", ".gotmpl", ".tpl", ".env", ""}
    return {str(f.relative_to(ROOT)): f.read_text() for f in files if f.suffix in kinds and ".terraform" not in f.parts}


def places_of(version: str) -> set[str]:
    whole = re.compile(rf"(?<![\w.-]){re.escape(version)}(?![\w.]*\d)")
    return {path for path, text in texts().items() if whole.search(text)}


def test_no_other_file_names_a_pinned_version() -> None:
    assert len(PINS) == 7
    found = {name: places_of(version) - HISTORY for name, version in PINS.items()}
    assert {name: places for name, places in found.items() if places != {"k8s/cluster/versions.env"}} == {}


def test_images_of_others_have_their_version_in_the_charts_values_alone() -> None:
    assert {path for tag in IMAGES.values() for path in places_of(tag)} - SHOWN == set()
    of_load_tests = (ROOT / "helm/loadtest/values.yaml").read_text()
    assert f"tag: {IMAGES['aws']}\n" in of_load_tests, "both charts fetch by the same image"


def test_every_pin_is_used_and_the_commands_read_the_file_first() -> None:
    readme = (ROOT / "k8s/README.md").read_text()
    assert readme.index(". k8s/cluster/versions.env") < min(readme.index(f"${name}") for name in PINS)
    assert [name for name in PINS if f"--version ${name}" not in readme] == []
    assert re.findall(r"--version (?!\$)\S+", readme) == []


def test_renovate_reads_every_pin_with_its_source() -> None:
    settings = json.loads((ROOT / "renovate.json").read_text())
    pins, eks = settings["customManagers"]
    (pattern,) = pins["matchStrings"]
    found = re.finditer(pattern.replace("(?<", "(?P<"), (ROOT / "k8s/cluster/versions.env").read_text())
    sources = {match["currentValue"]: (match["datasource"], match["registryUrl"]) for match in found}
    assert sources.keys() == {*PINS.values()}
    assert {kind for kind, registry in sources.values() if registry is None} == {"docker"}
    (pattern,) = eks["matchStrings"]
    match = re.search(pattern.replace("(?<", "(?P<"), (ROOT / "k8s/eks/variables.tf").read_text())
    assert match is not None
    assert re.fullmatch(r"1\.\d\d", match["currentValue"])
    for manager in settings["customManagers"]:
        (path,) = manager["managerFilePatterns"]
        assert (ROOT / path.strip("/^$").replace("\\", "")).exists()

"""The command of docs/release.md lists every image of a release, for registries without internet; the chart knows what the images lack."""

import re
import subprocess
from pathlib import Path

import yaml

from tests.chart.places import LOADED_S3
from tests.chart.pod_rows import EVERYTHING
from tests.chart.render import CHART, Object, merged, render

RELEASE_MD = Path(__file__).parents[2] / "docs/release.md"


def test_the_load_formats_that_the_chart_refuses_are_those_whose_packages_no_image_has() -> None:
    tables = yaml.safe_load((CHART / "files/lints/content.yaml").read_text())
    locked = {m[1] for kind in ("cpu", "cuda") for m in re.finditer(r"^([a-z0-9-]+)==", lock(kind), re.MULTILINE)}
    assert {row["package"] for row in tables["packagesOfFormats"]} & locked == set()
    assert {"fastsafetensors", "instanttensor"} <= locked  # vLLM's other formats that want a package


def lock(kind: str) -> str:
    return (RELEASE_MD.parents[1] / f"requirements/{kind}.lock").read_text()


def images_of(pod: Object) -> set[str]:
    return {container["image"] for container in [*pod["containers"], *pod.get("initContainers", [])]}


def test_the_documented_command_lists_every_image_of_a_release() -> None:
    """All that the chart can make is on: both of our images, Redis, and AWS's command line; no image is in two places."""
    rendered = render(merged(EVERYTHING, LOADED_S3))
    (command,) = re.findall(r"^helm template .*?\| (sed .*?) +#", RELEASE_MD.read_text(), re.MULTILINE)
    listed = subprocess.run(["bash", "-c", command], input=rendered.text, capture_output=True, text=True, check=True).stdout
    used = set().union(*(images_of(template["spec"]) for _, template in rendered.pod_templates()))
    assert len(used) == 4
    assert sorted(listed.splitlines()) == sorted(used)


def test_the_command_that_copies_them_gives_them_the_names_of_global_image_registry() -> None:
    values = merged(EVERYTHING, LOADED_S3)
    (suffix,) = re.findall(r"^  skopeo copy .*docker://\$image docker://\$R/(\S+)$", RELEASE_MD.read_text(), re.MULTILINE)
    plain, mirrored = (
        set().union(*(images_of(template["spec"]) for _, template in render(v).pod_templates()))
        for v in (values, merged(values, {"global": {"imageRegistry": "r.example"}}))
    )
    script = f"R=r.example; for image; do echo $R/{suffix}; done"
    done = subprocess.run(["bash", "-c", script, "copy", *sorted(plain)], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == mirrored

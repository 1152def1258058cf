"""`make dist-images` writes the SBOM of a saved image; the tests use images of a few files."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.chart.render import CHART, tool
from tools.image_sbom import debian_components, image_sbom

ROOT = CHART.parents[1]
Files = Mapping[str, str]
IMAGE = "localhost/serve-app:0"
OWN_SBOM = {
    "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
    "bomFormat": "CycloneDX",
    "specVersion": "1.6",
    "version": 1,
    "metadata": {"component": {"bom-ref": "root-component", "type": "application", "name": "serve-app", "version": "0"}},
    "components": [{"bom-ref": "ray==2", "type": "library", "name": "ray", "version": "2", "purl": "pkg:pypi/ray@2"}],
}
BASE_LAYER = {
    "usr/lib/os-release": 'NAME="Debian GNU/Linux"\nVERSION_ID="12"\n',
    "var/lib/dpkg/status": "Package: old\nStatus: install ok installed\nArchitecture: all\nVersion: 1\n\n",
}
NEXT_LAYER = {"var/lib/dpkg/status": "Package: wget\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1.21\n\n"}
LAST_LAYER = {"usr/share/doc/serve-app/sbom.cdx.json": json.dumps(OWN_SBOM)}


def packed(files: Mapping[str, bytes], mode: str) -> bytes:
    to = io.BytesIO()
    with tarfile.open(fileobj=to, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return to.getvalue()


def layout(*layers: Files, env: list[str]) -> dict[str, bytes]:
    """Return the files of an OCI image layout with one image."""
    files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def add(kind: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = content
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    tars = [packed({name: text.encode() for name, text in layer.items()}, "w") for layer in layers]
    ids = [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]
    settings = {"architecture": "amd64", "os": "linux", "config": {"Env": env}, "rootfs": {"type": "layers", "diff_ids": ids}}
    manifest = {
        "schemaVersion": 2,
        "config": add("config.v1+json", json.dumps(settings).encode()),
        "layers": [add("layer.v1.tar", tar) for tar in tars],
    }
    entry = add("manifest.v1+json", json.dumps(manifest).encode())
    entry["annotations"] = {"org.opencontainers.image.ref.name": IMAGE}
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    return files


def archived(*layers: Files, env: list[str] | None = None) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(packed(layout(*layers, env=env or []), "w")))


def purls(sbom: dict[str, Any]) -> list[str]:
    return [component["purl"] for component in sbom["components"]]


def test_it_lists_python_packages_the_debian_packages_of_the_last_layer_and_the_base_images_python() -> None:
    sbom = image_sbom(archived(BASE_LAYER, NEXT_LAYER, LAST_LAYER, env=["PATH=/bin", "PYTHON_VERSION=3.11.14"]))
    assert purls(sbom) == ["pkg:pypi/ray@2", "pkg:deb/debian/wget@1.21?arch=amd64&distro=debian-12", "pkg:generic/python@3.11.14"]


def test_an_image_without_python_version_has_no_such_component() -> None:
    assert "python" not in {component["name"] for component in image_sbom(archived(BASE_LAYER, LAST_LAYER))["components"]}


def test_it_is_of_the_image_with_the_manifests_digest() -> None:
    archive = archived(BASE_LAYER, LAST_LAYER)
    index = archive.extractfile("index.json")
    assert index is not None
    digest = json.load(index)["manifests"][0]["digest"].removeprefix("sha256:")
    about = image_sbom(archive)["metadata"]["component"]
    assert (about["type"], about["purl"]) == ("container", f"pkg:oci/serve-app@sha256%3A{digest}")


def test_removed_packages_are_left_out_and_versions_are_encoded() -> None:
    status = (
        "Package: libstdc++6\nStatus: install ok installed\nArchitecture: amd64\nMulti-Arch: same\nVersion: 1:12.2~rc1+deb12u1\n"
        "Description: a library\n Version: in a text\n\n"
        "Package: binutils\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 2.40\n"
    )
    (component,) = debian_components(status, release="12")
    assert component["purl"] == "pkg:deb/debian/libstdc%2B%2B6@1:12.2~rc1%2Bdeb12u1?arch=amd64&distro=debian-12"
    assert component["version"] == "1:12.2~rc1+deb12u1"


def test_an_image_without_its_own_sbom_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    archive = tmp_path / "image.oci.tar"
    archive.write_bytes(packed(layout(BASE_LAYER, env=[]), "w"))
    command = [sys.executable, "-m", "tools.image_sbom", str(archive), str(tmp_path / "sbom.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == f"error: {archive}: the image has no /usr/share/doc/serve-app/sbom.cdx.json\n"
    assert done.returncode == 1


STAND_IN = f"""#!/bin/bash
# Called as: skopeo copy --quiet oci:FOLDER:{IMAGE} oci-archive:FILE:{IMAGE}
from=${{3#oci:}} to=${{4#oci-archive:}}
cd "${{from%:{IMAGE}}}" && tar -cf "${{to%:{IMAGE}}}" *
"""


def dist_images(*variables: str, path: str) -> subprocess.CompletedProcess[str]:
    """Run `make dist-images` in the environment of the tests, as it is."""
    command = ["make", "-s", "-o", ".venv/.installed", "dist-images", *variables]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120)


def test_dist_images_without_an_image_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    made = dist_images("IMAGE=", f"DIST_IMAGES={tmp_path / 'out'}", path=os.environ["PATH"])
    assert made.returncode != 0
    assert made.stderr.startswith("error: IMAGE and CUDA_IMAGE are both empty: name one of them\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("variable", "other", "kind"), [("IMAGE", "CUDA_IMAGE", "cpu"), ("CUDA_IMAGE", "IMAGE", "cuda")])
def test_dist_images_saves_an_image_with_sbom_provenance_and_signed_checksums(
    tmp_path: Path, variable: str, other: str, kind: str
) -> None:
    """Without skopeo on the PATH, tar takes its place, which for images that are in an OCI layout already does the same."""
    path = os.environ["PATH"]
    if tool("skopeo") is None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "skopeo").write_text(STAND_IN)
        (tmp_path / "bin" / "skopeo").chmod(0o755)
        path = f"{tmp_path / 'bin'}:{path}"
    store, out, key = tmp_path / "store", tmp_path / "out", tmp_path / "release.key"
    for name, content in layout(BASE_LAYER, LAST_LAYER, env=[]).items():
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(content)
    subprocess.run(["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", key.with_suffix(".pub")], check=True)
    names = [f"IMAGE_STORE=oci:{store}:", f"{variable}={IMAGE}", f"{other}=", f"DIST_IMAGES={out}", "VERSION=0"]
    made = dist_images(*names, f"SIGNING_KEY={key}", "BASE=base@sha256:ba5e", path=path)
    assert made.returncode == 0, made.stderr
    saved = [f"serve-app-0-image-{kind}.cdx.json", f"serve-app-0-image-{kind}.oci.tar", "serve-app-0-images-provenance.json"]
    assert sorted(file.name for file in out.iterdir()) == ["SHA256SUMS", "SHA256SUMS.sig", *saved]
    verify = [ROOT / "tools" / "verify-release", out, key.with_suffix(".pub")]
    assert subprocess.run(verify, capture_output=True, text=True).stdout.endswith("; 3 files, none missing, changed or added\n")
    assert purls(json.loads((out / saved[0]).read_text())) == ["pkg:pypi/ray@2", "pkg:deb/debian/old@1?arch=all&distro=debian-12"]
    provenance = json.loads((out / saved[2]).read_text())
    assert [subject["name"] for subject in provenance["subject"]] == saved[:2]
    asked = provenance["predicate"]["buildDefinition"]["externalParameters"]
    assert asked == {"target": "dist-images", "variables": {"BASE": "base@sha256:ba5e"}}

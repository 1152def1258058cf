"""This script writes the SBOM of an image that was saved as an OCI archive (CycloneDX 1.6, JSON).

``python -m tools.image_sbom ARCHIVE.oci.tar SBOM.cdx.json`` runs it. The image's own SBOM, which the Dockerfile makes, lists Python
packages. This SBOM adds Debian's packages, the Python of the base image, and the digest by which a registry knows the image.
"""

import argparse
import json
import re
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

_PYTHON_PACKAGES = "usr/share/doc/serve-app/sbom.cdx.json"
_DEBIAN_PACKAGES = "var/lib/dpkg/status"
_DEBIAN_RELEASE = "usr/lib/os-release"
Object = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("sbom", type=Path)
    arguments = parser.parse_args()
    with tarfile.open(arguments.archive) as archive:
        try:
            made = image_sbom(archive)
        except KeyError as missing:
            sys.exit(f"error: {arguments.archive}: {missing.args[0]}")
    arguments.sbom.write_text(json.dumps(made, indent=2) + "\n")


def image_sbom(archive: tarfile.TarFile) -> Object:
    """Return the SBOM of the only image in an OCI archive. Every layer is read, which takes 11 s for the CPU image.

    Raises:
        KeyError: The archive or the image lacks a file; its argument is a sentence that names the file.
    """
    (entry,) = json.load(_file(archive, "index.json"))["manifests"]
    manifest = json.load(_blob(archive, entry))
    settings = json.load(_blob(archive, manifest["config"]))["config"]
    texts = _texts(archive, manifest["layers"], {_PYTHON_PACKAGES, _DEBIAN_PACKAGES, _DEBIAN_RELEASE})
    sbom: Object = json.loads(texts[_PYTHON_PACKAGES])
    release = re.search(r'^VERSION_ID="?([^"\n]*)', texts[_DEBIAN_RELEASE], re.MULTILINE)
    sbom["components"] += debian_components(texts[_DEBIAN_PACKAGES], release=release[1] if release else "")
    sbom["components"] += python_component(settings.get("Env", []))
    image = sbom["metadata"]["component"]
    image |= {"type": "container", "purl": f"pkg:oci/{image['name']}@{quote(entry['digest'])}"}
    return sbom


def debian_components(status: str, *, release: str) -> list[Object]:
    """Return a component for each installed package of dpkg's status file."""
    components = []
    for paragraph in status.strip().split("\n\n"):
        about = dict(re.findall(r"^(Package|Status|Version|Architecture): (.*)$", paragraph, re.MULTILINE))
        if about["Status"].endswith(" installed"):
            name, version = about["Package"], quote(about["Version"], safe=":")
            purl = f"pkg:deb/debian/{quote(name)}@{version}?arch={about['Architecture']}&distro=debian-{release}"
            components.append({"bom-ref": purl, "type": "library", "name": name, "version": about["Version"], "purl": purl})
    return components


def python_component(environment: Iterable[str]) -> list[Object]:
    """Return the interpreter that the base image names in PYTHON_VERSION. Docker's Python images compile it, so it is not a package."""
    versions = dict(setting.split("=", 1) for setting in environment)
    if (version := versions.get("PYTHON_VERSION")) is None:
        return []
    purl = f"pkg:generic/python@{version}"
    return [{"bom-ref": purl, "type": "application", "name": "python", "version": version, "purl": purl}]


def _texts(archive: tarfile.TarFile, layers: Iterable[Object], names: set[str]) -> dict[str, str]:
    """Return the text of each named file, from the image's topmost layer that has it."""
    texts: dict[str, str] = {}
    for layer in layers:
        with tarfile.open(fileobj=_blob(archive, layer), mode="r|*") as files:
            for member in files:
                name = member.name.removeprefix("./")
                if name in names and (content := files.extractfile(member)):
                    texts[name] = content.read().decode()
    if missing := names - texts.keys():
        raise KeyError(f"the image has no /{min(missing)}")
    return texts


def _blob(archive: tarfile.TarFile, descriptor: Object) -> IO[bytes]:
    return _file(archive, "blobs/" + descriptor["digest"].replace(":", "/"))


def _file(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is not a file")
    return file


if __name__ == "__main__":
    main()

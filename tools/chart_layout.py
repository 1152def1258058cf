"""This script writes a Helm chart package as an OCI archive: a tar of an OCI image layout, which copies to a registry without Helm.

``python -m tools.chart_layout PACKAGE.tgz ARCHIVE.oci.tar`` runs it. Helm itself writes charts in OCI's form only into a registry
(`helm push`). Sources: the OCI image specification 1.0 (image-layout.md, manifest.md) and Helm's two media types. Manifest and
configuration are those of `helm push` for the same package, without the time of the push: equal packages make equal archives.
"""

import argparse
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import yaml

_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_CONFIG_TYPE = "application/vnd.cncf.helm.config.v1+json"
_CHART_TYPE = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
Files = dict[str, bytes]
Object = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("archive", type=Path)
    arguments = parser.parse_args()
    files = layout(arguments.package.read_bytes())
    with tarfile.open(arguments.archive, "w") as archive:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def layout(package: bytes) -> Files:
    """Return the files of an OCI image layout that holds this chart package under its version as tag."""
    about = _about(package)
    files: Files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"})}
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST_TYPE,
        "config": _add(files, _CONFIG_TYPE, _json(about)),
        "layers": [_add(files, _CHART_TYPE, package)],
        "annotations": {
            "org.opencontainers.image.title": about["name"],
            "org.opencontainers.image.version": about["version"],
            "org.opencontainers.image.description": about["description"],
        },
    }
    tag = about["version"].replace("+", "_")  # as Helm does, because a tag has no plus sign
    entry = _add(files, _MANIFEST_TYPE, _json(manifest)) | {"annotations": {"org.opencontainers.image.ref.name": tag}}
    files["index.json"] = _json({"schemaVersion": 2, "manifests": [entry]})
    return files


def _about(package: bytes) -> Object:
    """Return the Chart.yaml of a package, whose only folder is the chart's."""
    with tarfile.open(fileobj=io.BytesIO(package)) as chart:
        name = next(name for name in chart.getnames() if name.count("/") == 1 and name.endswith("/Chart.yaml"))
        content = chart.extractfile(name)
        assert content is not None
        return dict(yaml.safe_load(content))


def _add(files: Files, media_type: str, content: bytes) -> Object:
    """Add a blob and return its descriptor."""
    digest = hashlib.sha256(content).hexdigest()
    files[f"blobs/sha256/{digest}"] = content
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def _json(value: Object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


if __name__ == "__main__":
    main()

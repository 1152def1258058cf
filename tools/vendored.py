"""This module finds the packages and CA bundles that installed packages carry inside of them, which no lock names.

`tools.lock_audit` compares them with the known-bad versions. Where they are found: metadata below another package (Ray's thirdparty_files,
setuptools' _vendor), lists named vendor.txt (pip), versions of modules in folders for such copies, certifi wherever it is, and PEM files
with as many certificates as only a CA bundle has. Code without any of these, as in compiled libraries, is not found.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

_METADATA = re.compile(r"/([^/]+?)-([^/-]+)(?:-[^/]*)?\.(?:dist-info/METADATA|egg-info/PKG-INFO)$")
_MODULE = re.compile(
    r"(?:/(?:_?vendor(?:ed)?|third_?party(?:_files)?)/([^/]+)|/(certifi))/(?:__init__|_version|__version__)\.py$"
)
_VERSION = re.compile(r"""^__version__ = (?:version = )?["']([^"']+)""", re.MULTILINE)
_LISTED = re.compile(r"^\s*([A-Za-z0-9._-]+)==([^\s;#]+)", re.MULTILINE)
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_FEWEST_ROOTS = 20
"""The smallest CA bundle seen in a package has 99 certificates; files for tests and for one service have at most 4."""


@dataclass(frozen=True, order=True)
class Copy:
    """A package inside of another one."""

    owner: str
    name: str
    version: str
    path: str
    """Relative to site-packages."""


def copies(site: Path) -> list[Copy]:
    """Return the packages inside of those installed in the folder `site`; each version once for an owner, though several files name it."""
    found = sorted(copy for owner, path in _files(site) for copy in _copies_of(site, owner, path))
    return list({(copy.owner, copy.name, copy.version): copy for copy in reversed(found)}.values())[::-1]


def distrusted_roots(site: Path) -> dict[tuple[str, str], int]:
    """Return for the owner and path of each CA bundle how many of its certificates certifi, as installed in `site`, does not have.

    A bundle names no version. A certificate that certifi lacks shows that the bundle is older, or less strict.

    Raises:
        FileNotFoundError: certifi is not installed in `site`.
    """
    trusted = _roots(site / "certifi" / "cacert.pem")
    bundles = ((owner, path) for owner, path in _files(site) if path.endswith((".pem", ".crt")))
    found = {(owner, path): _roots(site / path) for owner, path in bundles}
    return {where: len(roots - trusted) for where, roots in sorted(found.items()) if len(roots) >= _FEWEST_ROOTS}


def _files(site: Path) -> Iterator[tuple[str, str]]:
    """Yield owner and path of every file that the installed packages' own lists name."""
    for record in sorted(site.glob("*.dist-info/RECORD")):
        owner = canonicalize_name(record.parent.name.partition("-")[0])
        for line in record.read_text().splitlines():
            yield owner, line.split(",")[0].strip('"')


def _copies_of(site: Path, owner: str, path: str) -> Iterator[Copy]:
    found: list[tuple[str, str]] = []
    if metadata := _METADATA.search(path):
        found = [(metadata[1], metadata[2])]
    elif path.endswith("/vendor.txt"):
        found = _LISTED.findall((site / path).read_text())
    elif (module := _MODULE.search("/" + path)) and owner != (name := module[1] or module[2]):
        found = [(name, version) for version in _VERSION.findall((site / path).read_text())]
    for name, version in found:
        try:
            yield Copy(owner, canonicalize_name(name), str(Version(version)), path)
        except InvalidVersion:
            continue  # no version of a package on PyPI


def _roots(bundle: Path) -> set[bytes]:
    """Return the certificates in a PEM file, without line breaks."""
    return {b"".join(body.split()) for body in _CERTIFICATE.findall(bundle.read_bytes())}

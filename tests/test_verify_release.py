"""tools/verify-release accepts a folder of a release only as it was signed."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

VERIFY = Path(__file__).parents[1] / "tools" / "verify-release"
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on the PATH")


def run(*command: str | Path, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True)


def verify(folder: Path, signer: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([VERIFY, folder, signer], capture_output=True, text=True)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with two pairs of keys, made as docs/release.md says."""
    for name in ("release", "other"):
        run("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", f"{name}.key", cwd=tmp_path)
        run("openssl", "pkey", "-in", f"{name}.key", "-pubout", "-out", f"{name}.pub", cwd=tmp_path)
    return tmp_path


@pytest.fixture
def release(keys: Path) -> Path:
    folder = keys / "0.0.1"
    folder.mkdir()
    (folder / "chart.tgz").write_bytes(b"chart")
    (folder / "serve_app.whl").write_bytes(b"wheel")
    sign(folder)
    return folder


def sign(folder: Path, key: str = "release") -> None:
    run("bash", "-c", "sha256sum -- *.tgz *.whl > SHA256SUMS", cwd=folder)
    run("openssl", "dgst", "-sha256", "-sign", f"../{key}.key", "-out", "SHA256SUMS.sig", "SHA256SUMS", cwd=folder)


def test_a_release_passes_as_it_was_signed(release: Path, keys: Path) -> None:
    said = verify(release, keys / "release.pub")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == f"{release}: signed by {keys}/release.pub; 2 files, none missing, changed or added\n"


def change(folder: Path) -> None:
    (folder / "serve_app.whl").write_bytes(b"Wheel")


def remove(folder: Path) -> None:
    (folder / "chart.tgz").unlink()


def add(folder: Path) -> None:
    (folder / "serve_app-2.whl").write_bytes(b"newer")


def hide(folder: Path) -> None:
    (folder / ".charts").mkdir()
    (folder / ".charts" / "SHA256SUMS.sig").write_bytes(b"hidden")


def change_and_sum(folder: Path) -> None:
    change(folder)
    run("bash", "-c", "sha256sum -- *.tgz *.whl > SHA256SUMS", cwd=folder)


def change_and_sign_with_another_key(folder: Path) -> None:
    change(folder)
    sign(folder, key="other")


def remove_the_signature(folder: Path) -> None:
    (folder / "SHA256SUMS.sig").unlink()


def add_a_name_to_the_sums(folder: Path) -> None:
    add(folder)
    run("bash", "-c", "sha256sum -- serve_app-2.whl >> SHA256SUMS", cwd=folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (change, "files are missing or changed"),
        (remove, "files are missing or changed"),
        (add, "it holds serve_app-2.whl which SHA256SUMS does not name"),
        (hide, "it holds .charts .charts/SHA256SUMS.sig which SHA256SUMS does not name"),
        (change_and_sum, "the key KEY did not sign SHA256SUMS"),
        (change_and_sign_with_another_key, "the key KEY did not sign SHA256SUMS"),
        (remove_the_signature, "the key KEY did not sign SHA256SUMS"),
        (add_a_name_to_the_sums, "the key KEY did not sign SHA256SUMS"),
    ],
)
def test_a_folder_that_differs_is_refused(release: Path, keys: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(release)
    said = verify(release, keys / "release.pub")
    expected = reason.replace("KEY", f"{keys}/release.pub")
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.splitlines()[-1] == f"refused: {expected}; install nothing from {release}"


@pytest.mark.parametrize("signer", ["other.pub", "no-such.pub", "release.key"])
def test_another_key_is_refused(release: Path, keys: Path, signer: str) -> None:
    said = verify(release, keys / signer)
    assert (said.returncode, said.stdout) == (1, "")


def test_a_signature_by_a_key_is_none_by_a_workflow(release: Path) -> None:
    workflow = "https://github.com/owner/serve-app/.github/workflows/release.yml@refs/tags/v0.0.1"
    said = verify(release, workflow)
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.splitlines()[-1] == f"refused: {workflow} did not sign SHA256SUMS; install nothing from {release}"

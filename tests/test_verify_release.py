"""tools/verify-release accepts a folder of a release only as it was signed, by a key or by a workflow."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.own_sigstore import OwnSigstore
from tests.ports import free_port

VERIFY = Path(__file__).parents[1] / "tools" / "verify-release"
WORKFLOW = "https://github.com/owner/serve-app/.github/workflows/release.yml@refs/tags/v0.0.1"
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


def test_another_key_is_refused(release: Path, keys: Path) -> None:
    said = verify(release, keys / "other.pub")
    assert (said.returncode, said.stdout) == (1, "")


@pytest.mark.parametrize("signer", ["no-such.pub", "release.key", "0.0.1/chart.tgz"])
def test_without_a_public_key_the_folder_is_unchecked_not_refused(release: Path, keys: Path, signer: str) -> None:
    said = verify(release, keys / signer)
    assert (said.returncode, said.stdout) == (2, "")
    reason = f"{keys / signer} cannot be read as a public key, so nothing was checked; it must be in PEM form"
    assert said.stderr.splitlines()[-1] == f"error: {reason}"


@pytest.fixture(scope="module")
def instance() -> OwnSigstore:
    return OwnSigstore()


@pytest.fixture
def keyless(release: Path, keys: Path, instance: OwnSigstore) -> Path:
    """The same release, signed by the workflow instead of a key. keys/trust.json is the instance's trust configuration."""
    (release / "SHA256SUMS.sig").unlink()
    (keys / "trust.json").write_text(json.dumps(instance.trust_config()))
    sign_as(release, instance, WORKFLOW)
    return release


def sign_as(folder: Path, instance: OwnSigstore, identity: str, **more: str) -> None:
    bundle = instance.bundle((folder / "SHA256SUMS").read_bytes(), identity, **more)
    (folder / "SHA256SUMS.sigstore.json").write_text(json.dumps(bundle))


def verify_keyless(folder: Path, *trust: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the `sigstore` of this environment, which requirements/dev.lock names, and with more variables."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command: list[str | Path] = [VERIFY, folder, WORKFLOW, *trust]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path, "COLUMNS": "1000", **more})


def test_a_release_passes_as_the_workflow_signed_it(keyless: Path, keys: Path) -> None:
    said = verify_keyless(keyless, keys / "trust.json")
    assert (said.returncode, said.stdout) == (0, f"{keyless}: signed by {WORKFLOW}; 2 files, none missing, changed or added\n")


def another_tag(folder: Path, instance: OwnSigstore) -> None:
    sign_as(folder, instance, WORKFLOW.replace("v0.0.1", "v0.0.2"))


def another_issuer(folder: Path, instance: OwnSigstore) -> None:
    sign_as(folder, instance, WORKFLOW, issuer="https://accounts.example.com")


def another_instance(folder: Path, instance: OwnSigstore) -> None:
    sign_as(folder, OwnSigstore(), WORKFLOW)


def no_bundle(folder: Path, instance: OwnSigstore) -> None:
    (folder / "SHA256SUMS.sigstore.json").unlink()


@pytest.mark.parametrize("damage", [another_tag, another_issuer, another_instance, no_bundle])
def test_a_folder_that_the_workflow_did_not_sign_is_refused(
    keyless: Path, keys: Path, instance: OwnSigstore, damage: Callable[[Path, OwnSigstore], None]
) -> None:
    damage(keyless, instance)
    said = verify_keyless(keyless, keys / "trust.json")
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.splitlines()[-1] == f"refused: {WORKFLOW} did not sign SHA256SUMS; install nothing from {keyless}"


@pytest.mark.parametrize("trust", ["{}", None])
def test_without_what_sigstore_trusts_the_folder_is_unchecked_not_refused(keyless: Path, keys: Path, trust: str | None) -> None:
    (keys / "trust.json").unlink()
    if trust is not None:
        (keys / "trust.json").write_text(trust)
    said = verify_keyless(keyless, keys / "trust.json")
    assert (said.returncode, said.stdout) == (2, "")
    reason = f"sigstore has no keys to trust, so nothing was checked; they come from {keys}/trust.json"
    assert said.stderr.splitlines()[-1] == f"error: {reason}"


def test_without_a_network_the_folder_is_unchecked_not_refused(keyless: Path, keys: Path) -> None:
    """The public instance's keys are fetched from a port at which nothing listens."""
    away = f"http://127.0.0.1:{free_port()}"
    said = verify_keyless(keyless, HOME=str(keys), https_proxy=away, HTTPS_PROXY=away, no_proxy="", NO_PROXY="")
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.splitlines()[-1].startswith("error: sigstore has no keys to trust, so nothing was checked; ")


def test_a_changed_file_is_refused_though_the_workflow_signed_the_sums(keyless: Path, keys: Path) -> None:
    change(keyless)
    said = verify_keyless(keyless, keys / "trust.json")
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.splitlines()[-1] == f"refused: files are missing or changed; install nothing from {keyless}"


@pytest.mark.parametrize(("tool", "signer"), [("sigstore", WORKFLOW), ("openssl", "release.pub")])
def test_without_the_tool_the_folder_is_unchecked_not_refused(release: Path, keys: Path, tool: str, signer: str) -> None:
    (keys / "bin").mkdir()
    for name in ("env", "bash"):
        (keys / "bin" / name).symlink_to(str(shutil.which(name)))
    said = subprocess.run([VERIFY, release, signer], cwd=keys, capture_output=True, text=True, env={"PATH": str(keys / "bin")})
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith(f"error: {tool} is not on the PATH, so nothing was checked; ")

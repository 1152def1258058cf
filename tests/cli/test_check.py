"""`serve-app check` and `serve-app config schema`, as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app, main
from serve_app.config import settings_json_schema

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, command)
    return result.exit_code, result.output


def test_the_schema_command_prints_the_schema() -> None:
    code, output = run("config", "schema")
    assert (code, json.loads(output)) == (0, settings_json_schema())


def test_check_sums_up_what_a_file_asks_for() -> None:
    code, output = run("check", str(EXAMPLES / "gpu.yaml"))
    assert code == 0
    assert "1 to 8 replicas with 4 CPU + 1 GPU" in output
    assert "At full scale Ray reserves 48 CPU and 8 GPU for it." in output


def test_check_imports_neither_vllm_nor_torch_nor_ray() -> None:
    program = (
        "import sys; from serve_app.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "print(sorted({'vllm', 'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, "check", str(EXAMPLES / "cpu.yaml")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modls: []", "modls: unknown key; did you mean models?"),
        ("models: [{name: a, model: 'embedded:smollm2-135m'}]", "models[0].model: no embedded model 'smollm2-135m'; "),
    ],
)
def test_an_error_is_one_line_with_file_and_key_and_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["serve-app", "check", str(file)])
    with pytest.raises(SystemExit) as exited:
        main()
    captured = capsys.readouterr()
    assert exited.value.code == 1
    assert captured.out == ""
    assert captured.err.startswith(f"error: {file}: {said}")
    assert captured.err.count("\n") == 1

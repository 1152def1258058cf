"""`--json` prints each command's output as one JSON value."""

import json
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from serve_app.cli.main import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulated.yaml"


def run(*arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, json.loads(done.stdout)


def test_check_tells_each_mistake_by_key_problem_and_hint(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {chat: {model: /a}}\ningres: {}")
    assert run("check", "--json", "--no-vllm", str(file)) == (
        1,
        {
            "file": str(file),
            "valid": False,
            "problems": [{"path": "ingres", "problem": "unknown key", "hint": "did you mean ingress?"}],
            "notes": [],
        },
    )
    code, told = run("check", "--json", "--no-vllm", str(EXAMPLE))
    assert (code, told["valid"], told["problems"]) == (0, True, [])


def test_the_serve_config_is_the_same_in_both_forms() -> None:
    text = CliRunner().invoke(app, ["config", "serve", "-f", str(EXAMPLE)]).stdout
    assert run("config", "serve", "--json", "-f", str(EXAMPLE)) == (0, yaml.safe_load(text))


def test_embedded_models_are_listed_with_what_is_missing(tmp_path: Path) -> None:
    code, told = run("model", "list", "--json", "--cache-dir", str(tmp_path))
    assert code == 0
    assert {"model", "description", "path", "problem"} == set(told[0])
    assert all(row["problem"] for row in told)


def test_an_empty_ledger_file_has_sums_of_zero(tmp_path: Path) -> None:
    file = tmp_path / "ledger-x.jsonl"
    file.write_text("")
    _, told = run("ledger", "verify", "--json", str(file))
    assert (told["num_lines"], told["gaps_s"], set(told) >= {"outcomes", "reasons", "attempts", "findings", "notes"}) == (
        0,
        None,
        True,
    )

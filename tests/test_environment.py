"""These tests show what a process makes of its surroundings: inherited variables, proxies, and the way in which it was called."""

import ast
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import envs

import serve_app
from serve_app.cli.main import app
from serve_app.environment import REMOVED, as_typed, clean


def test_a_variable_that_would_make_the_process_half_work_is_dropped_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"VLLM_API_KEY": "secret", "VLLM_PORT": "tcp://10.0.0.1:80", "VLLM_LOGGING_LEVEL": "DEBUG", "PATH": "/bin"}
    with caplog.at_level(logging.WARNING):
        clean(environment)
    assert environment == {"VLLM_LOGGING_LEVEL": "DEBUG", "PATH": "/bin"}
    assert "VLLM_API_KEY is in the environment and has no effect" in caplog.text
    assert "set ingress.tenants_file" in caplog.text
    assert "secret" not in caplog.text


def test_every_dropped_variable_is_one_that_vllm_reads() -> None:
    assert REMOVED.keys() - envs.environment_variables.keys() == set()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"HTTP_PROXY": "http://proxy"}, "127.0.0.1,localhost,::1"),
        ({"https_proxy": "http://proxy", "NO_PROXY": "internal,localhost"}, "internal,localhost,127.0.0.1,::1"),
        ({"HTTP_PROXY": "http://proxy", "NO_PROXY": "*"}, "*"),
    ],
)
def test_a_proxy_never_stands_between_processes_of_one_machine(before: dict[str, str], after: str) -> None:
    clean(before)
    assert before["NO_PROXY"] == after


def test_without_a_proxy_nothing_is_added() -> None:
    environment = {"PATH": "/bin"}
    clean(environment)
    assert environment == {"PATH": "/bin"}


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment's folder of programs below the working folder, with serve-app and pip."""
    folder = tmp_path / "an env" / "bin"
    folder.mkdir(parents=True)
    for name in ("serve-app", "pip"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize(
    ("argv0", "path", "expected"),
    [
        ("an env/bin/serve-app", "/usr/bin", ("'an env/bin/serve-app'", "'an env/bin/pip'", "hf")),
        ("an env/bin/serve-app", "{bin}", ("serve-app", "pip", "hf")),
        ("{bin}/serve-app", "{other}", ("'{bin}/serve-app'", "'{bin}/pip'", "hf")),
        ("/anywhere/default_worker.py", "/usr/bin", ("serve-app", "pip", "hf")),
        ("-c", "/usr/bin", ("serve-app", "pip", "hf")),
    ],
)
def test_a_hint_names_a_command_as_the_users_shell_finds_it(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv0: str, path: str, expected: tuple[str, ...]
) -> None:
    other = tmp_path / "other"  # another installation, which the shell would find
    shutil.copytree(bin_folder, other)
    names = {"bin": bin_folder, "other": other}
    monkeypatch.setattr("sys.argv", [argv0.format(**names)])
    monkeypatch.setenv("PATH", path.format(**names))
    assert tuple(map(as_typed, ("serve-app", "pip", "hf"))) == tuple(word.format(**names) for word in expected)


HINTED = re.compile(r"(?<![\w/.'-])(?:serve-app (?P<name>[a-z]+)|pip install|hf download)")
NO_HINTS = {
    # The Helm chart and the API show these texts too, and do not know how serve-app is called.
    "config/foreign.py": ["serve-app up", "serve-app up"],
    "ingress/routes/front_page.py": ["serve-app up"],
    # The name of a process or of its file, which is not there to be typed.
    "cli/cluster.py": ["serve-app up"],
    "cli/doctor.py": ["serve-app up"],
    "cli/tenants.py": ["serve-app tenants"],
    "ui/killing.py": ["serve-app up"],
}


def commands_in_texts(source: str) -> Iterator[str]:
    """Yield the texts of a module with a command of this installation written out: no docstrings, no help of options."""
    tree = ast.parse(source)
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # a docstring
            left_out |= set(ast.walk(node))
        if isinstance(node, ast.keyword) and node.arg == "help":
            left_out |= set(ast.walk(node))
    texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and n not in left_out)
    for text in texts:
        yield from (match[0] for match in HINTED.finditer(text) if not match["name"] or match["name"] in COMMANDS)


COMMANDS = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands} | {
    group.name for group in app.registered_groups
}


def test_every_hint_asks_how_the_user_calls_the_command() -> None:
    root = Path(serve_app.__path__[0])
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    assert {"up", "model", "status"} <= COMMANDS
    assert list(commands_in_texts('x = "run serve-app model, or pip install it"')) == ["serve-app model", "pip install"]
    wrong = {name: found for name, path in files.items() if (found := [*commands_in_texts(path.read_text())])}
    assert wrong == NO_HINTS


def test_a_wrong_command_line_names_the_command_as_it_was_called(bin_folder: Path) -> None:
    """As with `.venv/bin/serve-app` where no environment is activated."""
    program = bin_folder / "serve-app"
    program.write_text(f"#!{sys.executable}\nfrom serve_app.cli.main import main\nmain()\n")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(["an env/bin/serve-app", "fit"], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert "Usage: 'an env/bin/serve-app' fit" in done.stderr

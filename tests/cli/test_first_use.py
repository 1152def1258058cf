"""A new user meets clear errors: one who has just installed serve-app, or has made mistakes."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.config import EXAMPLE, from_here

HEAVY = {"gguf", "httpx", "numpy", "prometheus_client", "ray", "requests", "serve_app.config", "torch", "vllm", "yaml"}


def serve_app(*arguments: str, before: str = "pass") -> tuple[int, str, str]:
    """Run the command in a process of its own, after ``before``."""
    program = f"import sys; {before}; from serve_app.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", [["--help"], ["up", "--help"], ["demo", "--help"], ["check", "--help"], ["model", "--help"]])
def test_help_needs_none_of_what_the_commands_work_with(command: list[str]) -> None:
    seen = "import atexit; atexit.register(lambda: print(*sys.modules))"
    code, output, _ = serve_app(*command, before=seen)
    assert (code, HEAVY & set(output.splitlines()[-1].split())) == (0, set())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["stop"], "No such command 'stop'. Did you mean 'down'?"),
        (["serve", "-f", "my.yaml"], "No such command 'serve'. Did you mean 'up'?"),
        (["version"], "No such command 'version'. Did you mean '--version'?"),
        (["chek"], "No such command 'chek'. Did you mean 'check'?"),
        (["up", "my.yaml"], "write -f before the file: serve-app up -f my.yaml"),
        (["demo", "my.yml"], "write -f before the file: serve-app demo -f my.yml"),
        (["check", "-f", "my.yaml"], "write the file without -f: serve-app check my.yaml"),
        (["doctor", "--file", "my.yaml"], "write the file without --file: serve-app doctor my.yaml"),
    ],
)
def test_a_command_typed_as_in_another_system_is_refused_with_the_one_that_is_meant(typed: list[str], said: str) -> None:
    result = CliRunner().invoke(app, typed, env={"COLUMNS": "120"})
    assert (result.exit_code, said in result.stderr) == (2, True)


@pytest.mark.parametrize("command", ["up", "demo"])
def test_without_vllm_nothing_is_started_and_one_line_says_how_to_get_it(command: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {chat: {model: some/model}}")
    code, output, said = serve_app(command, "-f", str(file), before="sys.modules['vllm'] = None")  # as if it were not installed
    assert (code, output, said.count("\n")) == (1, "", 1)
    assert said.startswith(f"error: vLLM is not installed for {sys.executable}; pip install 'serve-app[cpu]', or ")


def test_without_nixl_no_model_that_moves_kv_is_started_and_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {chat: {model: some/model, kv: {transfer: nixl}}}")
    code, output, said = serve_app("up", "-f", str(file), before="sys.modules['nixl'] = None")
    missing = f"error: models.chat.kv.transfer is nixl, and nixl is not installed for {sys.executable}"
    assert (code, output, said) == (1, "", f"{missing}; pip install 'serve-app[kv]', or set kv.transfer: none\n")


def test_a_replica_over_two_nodes_is_not_waited_for_on_one_machine(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {wide: {model: some/model, simulated: {profile: a10g-llama-8b}, gpus_per_replica: 16, nodes: 2}}")
    code, output, said = serve_app("up", "-f", str(file))
    hint = "start it on a cluster with --address, or set nodes: 1"
    assert (code, output, said) == (1, "", f"error: models.wide.nodes is 2, and this machine is one node; {hint}\n")


@pytest.mark.parametrize("command", [("up",), ("demo",)])
def test_all_mistakes_of_a_file_are_told_with_its_name(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {chat: {model: /a, engine_args: {gpu_memory_utilization: 90}}}\ningres: {port: 8011}")
    code, output, said = serve_app(*command, "-f", str(file))
    assert (code, output, said.splitlines()) == (
        1,
        "",
        [
            f"error: {file}: ingres: unknown key; did you mean ingress?",
            f"error: {file}: models.chat.engine_args.gpu_memory_utilization: is 90, but vLLM takes a number above 0 and of at most 1",
        ],
    )


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_file_of_tenants_that_no_ingress_can_use_is_refused_before_anything_starts(command: str, tmp_path: Path) -> None:
    file, tenants = tmp_path / "config.yaml", tmp_path / "none" / "tenants.yaml"
    model = "models: {chat: {model: embedded:smollm2-135m-instruct}}"
    file.write_text(f"{model}\ningress: {{tenants_file: {tenants}}}")
    code, output, said = serve_app(command, "-f", str(file))
    assert (code, output, said.count("\n")) == (1, "", 1)
    assert said.startswith(f"error: {file}: ingress.tenants_file: {tenants} cannot be read: No such file or directory; create it")
    tenants.parent.mkdir()
    tenants.write_text("tenants: {team: {models: [caht]}}")
    code, output, said = serve_app(command, "-f", str(file))
    assert (code, output) == (1, "")
    assert said.endswith("tenants.team.models[0]: is 'caht', no served model; did you mean chat?\n")


def test_timeouts_out_of_order_are_a_warning_of_up(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {chat: {model: some/model}}\ntimeouts: {drain_s: 20}")
    _, _, said = serve_app("up", "-f", str(file), before="sys.modules['vllm'] = None")  # so that nothing starts
    warning, error = said.splitlines()
    assert warning.startswith("warning: drain-outlasts-wait: timeouts.drain_s is 20 and timeouts.no_replica_s is 30: ")
    assert error.startswith("error: vLLM is not installed")


def test_each_missing_file_of_a_configuration_has_its_line_before_a_start(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    tls = "{cert_file: /none/cert, key_file: /none/key, ca_file: /none/ca}"
    file.write_text(
        "models: {chat: {model: /a}}\n"
        f"protocol: {{cluster_token_file: /none/token, tls: {tls}}}\n"
        "ingress: {api_keys_file: /none/keys}\n"
    )
    _, _, said = serve_app("up", "-f", str(file))
    assert [line.split(": ")[2] for line in said.splitlines()] == [
        "ingress.api_keys_file",
        "protocol.cluster_token_file",
        *(f"protocol.tls.{name}_file" for name in ("cert", "key", "ca")),
    ]


def test_an_error_of_the_yaml_is_told_with_the_files_name(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {chat: {model: /a}")
    code, _, said = serve_app("up", "-f", str(file))
    assert (code, said.startswith(f"error: {file}: line 1, column 2"), said.count("\n")) == (1, True, 1)


def test_the_demo_has_its_configuration_whatever_folder_it_is_started_in() -> None:
    assert EXAMPLE.is_absolute()
    assert EXAMPLE.read_text() == (Path(__file__).parents[2] / "examples" / "cpu.yaml").read_text()


def test_the_example_has_one_name_which_a_reader_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert from_here(EXAMPLE) == "examples/cpu.yaml"
    names = r"[\w./-]*examples/cpu\.yaml"
    named = [*re.findall(names, serve_app("doctor")[1]), *re.findall(names, serve_app("up", "-f", "/dev/null")[2])]
    assert set(named) == {"examples/cpu.yaml"}
    monkeypatch.chdir(tmp_path)  # as where serve-app is installed from its wheel
    assert Path(from_here(EXAMPLE)).is_file()


def test_each_command_that_shows_something_can_print_json() -> None:
    """Those that stream text for people, start or change something, or print a schema have no use for it."""
    streams = {"up", "down", "demo", "ui", "run", "fetch", "tiny", "download", "verify", "wait", "schema", "replay"}
    streams |= {"load", "unload", "pin", "update", "create", "rotate", "revoke"}
    commands: dict[tuple[str, ...], Any] = {(): typer.main.get_command(app)}
    missing = []
    while commands:
        path, command = commands.popitem()
        commands |= {(*path, name): child for name, child in getattr(command, "commands", {}).items()}
        options = {option for parameter in command.params for option in parameter.opts}
        if not hasattr(command, "commands") and "--json" not in options and path[-1] not in streams:
            missing.append(path)
    assert missing == []

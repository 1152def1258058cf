"""`serve-app plan --pd` refuses what it cannot simulate in one line, before anything is simulated."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app, main
from serve_app.engine_args import PROCESS_ENVIRONMENT
from serve_app.planning.comparison import Comparison
from serve_app.planning.engines import ENVIRONMENT


class Simulated(Exception):
    """The simulation has begun."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    requests = [{"due_s": due_s, "input_tokens": 100_000 if due_s else 50, "output_tokens": 10} for due_s in (0.0, 10.0)]
    path.write_text("\n".join(map(json.dumps, requests)))
    return path


@pytest.fixture(autouse=True)
def no_simulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def begin(*args: Any) -> None:
        raise Simulated

    monkeypatch.setattr(Comparison, "__enter__", begin)
    for name in ENVIRONMENT | PROCESS_ENVIRONMENT:
        monkeypatch.setenv(name, "1")  # so that what the command sets is undone
    monkeypatch.chdir(tmp_path)


def error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one line on standard error of a command that ends with 1."""
    monkeypatch.setattr(sys, "argv", ["serve-app", "plan", "--pd", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        main()
    captured = capsys.readouterr()
    assert (exited.value.code, captured.out, captured.err.count("\n")) == (1, "", 1)
    return captured.err


FITS = ("--profile", "h100-llama-8b", "--replicas", "2")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--profile", "h100", "--replicas", "2"], "--profile: 'h100' is not known; known are h100-llama-8b, a10g-llama-8b, "),
        ([*FITS, "--link", "efa-400"], "--link: 'efa-400' is not known; known are nvlink-4, pcie-4, efa-100g, efa-400g"),
        ([*FITS, "--ttft-slo-s", "0"], "--ttft-slo-s: is 0; give seconds above 0, at most 3,600"),
        ([*FITS, "--itl-slo-s", "nan"], "--itl-slo-s: is nan; give seconds above 0, at most 3,600"),
        ([*FITS, "--plot", "none/x.svg"], "--plot: none/x.svg cannot be written: No such file or directory; give another file"),
        ([*FITS, "--seconds", "8"], "trace.jsonl: 1 requests within 0 s; give a trace of 5 s or more"),
        (
            ["--profile", "a10g-llama-8b", "--replicas", "2"],
            "the longest request: has 100,010 tokens, and the KV cache of a replica has room for 42,826; give replicas more --gpus, ",
        ),
        (
            ["--profile", "a100-40gb-llama-13b", "--replicas", "2"],
            "the longest request: has 100,010 tokens, and the KV cache of a replica has room for 15,770; ",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_option(
    options: list[str], said: str, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error(monkeypatch, capsys, trace, *options)
    assert said in line
    assert line.startswith("error: ")


def test_the_same_trace_fits_on_more_gpus(trace: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "--pd", str(trace), "--profile", "a10g-llama-8b", "--replicas", "2", "--gpus", "4"])
    assert isinstance(done.exception, Simulated)


@pytest.mark.parametrize("before", [None, "an earlier plot"])
def test_a_simulation_that_does_not_end_leaves_the_plot_as_it_was(before: str | None, trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    if before is not None:
        plot.write_text(before)
    options = ["--profile", "a10g-llama-8b", "--replicas", "2", "--gpus", "4", "--plot", str(plot)]
    assert isinstance(CliRunner().invoke(app, ["plan", "--pd", str(trace), *options]).exception, Simulated)
    assert (plot.read_text() if plot.exists() else None) == before


def test_without_vllm_one_line_says_how_to_get_it(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serve_app.cli.startable.engine_arg_types", dict)
    line = error(monkeypatch, capsys, trace, *FITS)
    assert line.startswith(f"error: vLLM is not installed for {sys.executable}; pip install 'serve-app[cpu]'")
    assert not Path("plan-pd.svg").exists()


@pytest.mark.parametrize(
    "options", [["--profile", "h100-llama-8b", "--replicas", "2"], ["--pd", "--profile", "h100-llama-8b", "--replicas", "1"]]
)
def test_a_wrong_command_line_ends_with_2(options: list[str], trace: Path) -> None:
    assert CliRunner().invoke(app, ["plan", str(trace), *options]).exit_code == 2

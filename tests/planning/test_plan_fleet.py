"""`serve-app plan --pd` simulates traces on vLLM's schedulers in virtual time: with and without long prompts."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.engine_args import PROCESS_ENVIRONMENT
from serve_app.planning.engines import ENVIRONMENT

pytestmark = pytest.mark.engine

SECONDS = 8.0
CHAT, LONG = (200, 60), (8000, 20)
"""Tokens of prompt and answer."""
KV_BYTES = 2 * 32 * 8 * 128 * 2
"""Of one token: keys and values of 32 layers of 8 heads of 128 numbers of 2 bytes."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.logger  # noqa: F401  # not first by the command, whose environment lets vLLM configure no logging
    from vllm.envs import disable_envs_cache

    disable_envs_cache()  # an engine of another test in this process may have filled it
    for name in ENVIRONMENT | PROCESS_ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # what the command sets is undone


def requests(chats_per_s: float, longs_per_s: float) -> Iterator[dict[str, Any]]:
    for rate, (prompt, answer) in ((chats_per_s, CHAT), (longs_per_s, LONG)):
        for number in range(math.ceil(rate * SECONDS)):
            yield {"due_s": number / rate, "input_tokens": prompt, "output_tokens": answer}


def plan(folder: Path, chats_per_s: float, longs_per_s: float, *options: str) -> str:
    """Return what the command prints for two simulated H100s with an ITL limit of 50 ms."""
    trace, drawn = folder / "trace.jsonl", folder / "plot.svg"
    trace.write_text("".join(f"{json.dumps(each)}\n" for each in requests(chats_per_s, longs_per_s)))
    hardware = ["--profile", "h100-llama-8b", "--replicas", "2", "--link", "efa-400g", "--itl-slo-s", "0.05", "--seeds", "1"]
    done = CliRunner().invoke(app, ["plan", "--pd", str(trace), *hardware, "--plot", str(drawn), *options])
    assert done.exception is None, done.output
    assert ElementTree.parse(drawn).getroot().attrib["width"] == "980"
    return done.stdout


def test_where_long_prompts_stop_chats_pools_are_better_than_together_and_kept_gaps_better_still(tmp_path: Path) -> None:
    found = json.loads(plan(tmp_path, 12.0, 3.0, "--json"))
    sides = ("together", "keep_itl", "routing.apart", "pools 1:1")
    together, kept, apart, pools = (found["sides"][name]["runs"][0] for name in sides)
    assert kept["good_per_s"] > pools["good_per_s"] > 1.05 * together["good_per_s"]
    assert (found["verdict"]["pays"], found["verdict"]["set"]) == (False, "keep_itl")
    assert together["moved_bytes"] == kept["moved_bytes"] == 0
    assert kept["itl_p99_s"] < together["itl_p99_s"]
    assert together["itl_p99_s"] > 0.05 > pools["itl_p99_s"]
    assert together["requests_per_s"] == apart["requests_per_s"] == pools["requests_per_s"] == pytest.approx(15.0, rel=0.15)
    # Each long prompt moves once after its first token, with pools; chats stay.
    moved_tokens = pools["moved_bytes"] / KV_BYTES
    assert moved_tokens == pytest.approx(24 * LONG[0], rel=0.1)


def test_apart_does_not_pay_for_chats_alone_and_the_table_says_why(tmp_path: Path) -> None:
    lines = plan(tmp_path, 12.0, 0.0).splitlines()
    assert lines[0].startswith("Simulated: trace.jsonl, 96 requests in 8 s (")
    assert [line.split()[0] for line in lines[1:6]] == ["side", "together", "keep_itl", "routing.apart", "pools"]
    assert lines[6].startswith("Apart does not pay, at best as routing.apart: 100 % of the goodput (")
    assert lines[7] == f"plot: {tmp_path / 'plot.svg'}"
    assert len(lines) == 8

"""`k8s/gpu-day` prints its steps in a dry run, runs them in order, and leaves nothing behind. Stand-ins take the place of every tool."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from serve_app.sizing.nodes import INSTANCES, PRICES_OF
from tests.docs.test_docs import COMMANDS, parse

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "k8s/gpu-day"
TOOLS = ("aws", "kubectl", "helm", "jq", "serve-app", "serve-app-loadtest", "sleep", "tar", "envsubst")
STEPS = ("before", "spot", "drain", "full", "large", "after")
VARIABLES = {
    "CLUSTER": "llm",
    "REGION": "eu-west-1",
    "URL": "https://llm.example.com",
    "LOADTEST_API_KEY": "sk-secret",
    "TAG_NEXT": "2.0",
    "REVISION": "a" * 40,
}
STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in $FAILS) exit 7;; $INTERRUPTED) kill -INT 0;; esac
case "$*" in
  *spec.limits*) echo 64;;
  *status.resources*) echo 2;;
  *providerID*) echo aws:///eu-west-1a/i-0123456789abcdef0;;
  *get-caller-identity*) echo 111122223333;;
  *) echo found;;
esac
"""


def day(
    folder: Path, *arguments: str, variables: dict[str, str] = VARIABLES, fails: str = "none", interrupted: str = "none"
) -> subprocess.CompletedProcess[str]:
    """Run the script in a copy of the repository that holds what it reads, with stand-ins that note their calls in the folder's `calls`.

    A stand-in whose call matches `fails` exits with 7. One that matches `interrupted` interrupts the whole process group, as Ctrl-C does.
    """
    models = folder / "k8s/cluster/values/models"
    models.mkdir(parents=True, exist_ok=True)
    (models / "70b-fp8-8xl40s.yaml").write_text("a: 1")
    script = folder / "k8s/gpu-day"
    script.write_bytes(SCRIPT.read_bytes())
    script.chmod(0o755)
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name in TOOLS:
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)
    path = {"PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), "FAILS": fails, "INTERRUPTED": interrupted}
    default = [
        "env",
        "--default-signal=INT",
    ]  # a shell cannot trap a signal that was ignored when it began, as in background jobs
    return subprocess.run(
        [*default, script, *arguments], env=path | variables, capture_output=True, text=True, timeout=60, start_new_session=True
    )


def calls(folder: Path) -> list[str]:
    """Return what the stand-ins were called with, without the polls that run beside a load test."""
    polls = (" get pods -o wide", "get nodes -L karpenter.sh/capacity-type", "sleep 5")
    return [line for line in (folder / "calls").read_text().splitlines() if not line.endswith(polls)]


def printed(text: str) -> list[list[str]]:
    """Return the words of each printed command. A quoted word may have several lines."""
    commands = re.findall(r"^\+ (.*?)(?=\n\+ |\n#|\n\n|\n?\Z)", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(command) for command in commands]


def test_a_dry_run_prints_every_step_in_order_and_runs_nothing(tmp_path: Path) -> None:
    done = day(tmp_path, "--dry-run", variables={})
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^== (\w+)", done.stdout, re.MULTILINE) == list(STEPS)
    assert not (tmp_path / "calls").exists()
    assert not (tmp_path / "results").exists()


def test_a_dry_run_prints_command_lines_that_our_commands_take(tmp_path: Path) -> None:
    ours = [words for words in printed(day(tmp_path, "--dry-run", variables={}).stdout) if words[0] in COMMANDS]
    assert {words[0] for words in ours} == set(COMMANDS)
    for words in ours:
        parse([word for word in words if word != "&"])


def test_the_steps_run_what_the_dry_run_prints(tmp_path: Path) -> None:
    done = day(tmp_path)
    assert done.returncode == 0, done.stdout
    real = [words for words in printed(done.stdout) if words[0] in TOOLS]
    planned = [words[0] for words in printed(day(tmp_path, "--dry-run", variables={}).stdout) if words[0] in TOOLS]
    assert [words[0] for words in real] == planned
    assert "sk-secret" not in done.stdout
    assert (tmp_path / "results/gpu-day/steps.txt").read_text() == done.stdout


def test_the_spot_node_alone_is_interrupted_with_the_notice_of_aws(tmp_path: Path) -> None:
    assert day(tmp_path, "spot").returncode == 0
    (made,) = (
        words
        for words in printed((tmp_path / "results/gpu-day/steps.txt").read_text())
        if "create-experiment-template" in str(words)
    )
    template = json.loads(str(made)[str(made).index("{") : str(made).rindex("}") + 1].replace("\\n", " "))
    assert template["targets"]["node"]["resourceArns"] == ["arn:aws:ec2:eu-west-1:111122223333:instance/i-0123456789abcdef0"]
    (action,) = template["actions"].values()
    assert action["actionId"] == "aws:ec2:send-spot-instance-interruptions"
    assert action["parameters"] == {"durationBeforeInterruption": "PT2M"}
    chosen = next(line for line in calls(tmp_path) if "capacity-type=spot" in line)
    assert chosen.startswith("kubectl get nodes -l serve-app/nodes=gpu,")


def limits(folder: Path) -> list[str]:
    return [found[1] for line in calls(folder) if (found := re.search(r'"nvidia.com/gpu": "(\d+)"', line))]


def test_the_quota_is_as_before_after_the_upgrade(tmp_path: Path) -> None:
    assert day(tmp_path, "full").returncode == 0
    assert limits(tmp_path) == ["2", "64"]


def test_the_quota_is_as_before_when_a_command_fails(tmp_path: Path) -> None:
    assert day(tmp_path, "full", fails="helm*upgrade*").returncode == 7
    assert limits(tmp_path) == ["2", "64"]


@pytest.mark.parametrize("command", ["helm*upgrade*", "serve-app rollout*"])
def test_the_quota_is_as_before_after_ctrl_c(tmp_path: Path, command: str) -> None:
    assert day(tmp_path, "full", interrupted=command).returncode != 0
    assert limits(tmp_path) == ["2", "64"]


def test_a_load_test_that_fails_is_a_result_and_ends_nothing(tmp_path: Path) -> None:
    done = day(tmp_path, "drain", fails="serve-app-loadtest*")
    assert done.returncode == 0
    assert "exit status 7" in done.stdout
    assert "kubectl uncordon found" in calls(tmp_path)


@pytest.mark.parametrize("missing", VARIABLES)
def test_a_missing_variable_is_named_before_anything_runs(tmp_path: Path, missing: str) -> None:
    done = day(tmp_path, variables={name: value for name, value in VARIABLES.items() if name != missing})
    assert (done.returncode, f"set {missing}" in done.stderr) == (2, True)
    assert not (tmp_path / "calls").exists()


def test_a_step_wants_no_variable_that_only_another_one_uses(tmp_path: Path) -> None:
    assert day(tmp_path, "before", variables={name: VARIABLES[name] for name in list(VARIABLES)[:4]}).returncode == 0


def test_an_unknown_step_is_refused(tmp_path: Path) -> None:
    done = day(tmp_path, "sport")
    assert (done.returncode, "no step sport" in done.stderr) == (2, True)


def test_the_named_cost_is_that_of_its_nodes_at_the_list_prices() -> None:
    prices = {instance.name: instance.usd_per_hour or 0.0 for instance in INSTANCES}
    dollars = 2 * 8 * prices["g6e.2xlarge"] + 2 * prices["g6e.48xlarge"]
    text = SCRIPT.read_text()
    assert f"about ${dollars:.0f} on demand (us-east-1, list prices of {PRICES_OF})" in text
    assert f"${prices['g6e.48xlarge']:.0f} an hour" in text
    assert f"about ${dollars:.0f} of GPU nodes" in (ROOT / "docs/first-gpu-run.md").read_text()


def test_its_node_pool_and_labels_are_those_of_karpenter_and_the_chart() -> None:
    pool = next(d for d in yaml.safe_load_all((ROOT / "k8s/cluster/karpenter.yaml").read_text()) if d["kind"] == "NodePool")
    keys = [requirement["key"] for requirement in pool["spec"]["template"]["spec"]["requirements"]]
    text = SCRIPT.read_text()
    assert pool["metadata"]["name"] == "gpu"
    assert pool["spec"]["template"]["metadata"]["labels"] == {"serve-app/nodes": "gpu"}
    changed = re.findall(r'endswith\(\\"(/[\w-]+)\\"\)', text)
    assert [sum(key.endswith(end) for key in keys) for end in changed] == [1, 1]
    assert "models/70b-fp8-8xl40s.yaml" in text

"""These tests run the commands of docs/runbook.md and docs/platform.md as pasted, and check that named things exist.

Their shell blocks and inline commands run under bash with fakes of every program that would ask a cluster. The fakes record their
arguments, which are then held against the command lines, the chart and the files of k8s/.
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from serve_app.books.series import TABLE
from tests.chart.render import CHART, RELEASE, render, tool

ROOT = Path(__file__).parents[2]
RUNBOOK = ROOT / "docs/runbook.md"
PAGES = (RUNBOOK, ROOT / "docs/platform.md")
"""The second page uses what the runbook's first block defines."""
OURS = ("serve-app", "serve-app-loadtest")
FAKED = (*OURS, "kubectl", "helm", "aws", "terraform", "curl", "openssl", "envsubst", "base64", "sleep")
ELSEWHERE = {"REGION": "eu-west-1", "CLUSTER": "serve-app", "NODE_ROLE": "serve-app-node"}
"""Variables that the runbook takes from k8s/README.md."""
FAKE = r"""#!/bin/bash
exec 9>> "$CALLS"; flock 9 # both ends of a pipe run at once, and bash writes up to each newline by itself
printf '%s\x01' "${0##*/}" "$@" $'\n' >&9
exec 9>&-
case "$*" in
  *port-forward*) exec /bin/sleep 20 ;;
  *"-o json") echo '[{"revision": 1, "status": "superseded"}, {"revision": 2, "status": "deployed"}]' ;;
  *) echo pod/of-the-cluster ;;
esac
"""
NAME = "named"
ON = {
    "fullnameOverride": NAME,
    "gcsFaultTolerance": {"enabled": True},
    "ingress": {"enabled": True, "className": "traefik", "hosts": ["llm.example.com"]},
    "weights": {"enabled": True, "downloads": [{"path": "a", "source": "hf:a/b", "revision": "0" * 40}]},
}
"""Values by which the chart makes all that the runbook names."""

needs_helm = pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")
Call = list[str]


FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections() -> list[str]:
    """Return a script for each section of the pages: its blocks and inline commands, in order, after the first block of all."""
    text = text_of_pages()
    functions = re.findall(r"^(\w+)\(\)", text, re.MULTILINE)
    first, *others = ("\n".join(commands(section, functions)) for section in re.split(r"^## ", text, flags=re.MULTILINE))
    preamble = FENCE.findall(text)[0]
    scripts = [first, *(preamble + script for script in others)]
    assert all("\nNAME=$RELEASE" in script for script in scripts)
    return [script.replace("\nNAME=$RELEASE", f"\nNAME={NAME}") for script in scripts]


def text_of_pages() -> str:
    return "\n".join(page.read_text() for page in PAGES)


def commands(section: str, functions: Sequence[str]) -> Iterator[str]:
    """Yield the blocks, and the inline code that is a whole command: kubectl's, a function's of the page, or one with a variable."""
    for found in re.finditer(rf"{FENCE.pattern}|`([^`\n]+)`", section, FENCE.flags):
        block, code = found.groups()
        word, _, rest = (code or "").partition(" ")
        if block or (rest and (word == "kubectl" or word in functions or (word in FAKED and "$" in code))):
            yield block or code


@functools.cache
def run() -> tuple[tuple[Call, ...], str]:
    """Run all commands once and return the calls of faked programs, and what bash said."""
    with tempfile.TemporaryDirectory() as folder:
        programs, calls = Path(folder, "bin"), Path(folder, "calls")
        programs.mkdir()
        for name in FAKED:
            (programs / name).write_text(FAKE)
            (programs / name).chmod(0o755)
        for tree in ("helm", "k8s"):
            Path(folder, tree).symlink_to(ROOT / tree)
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), "HOME": folder, **ELSEWHERE}
        shell = functools.partial(
            subprocess.run, env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        said = "".join(shell(["bash", "-uc", script]).stderr for script in sections())
        recorded = calls.read_text()
    return tuple(line.strip("\x01").split("\x01") for line in recorded.split("\n\x01") if line), said


def calls_of(program: str) -> list[Call]:
    return [call[1:] for call in run()[0] if call[0] == program]


def command_lines() -> Iterator[tuple[str, Call]]:
    """Yield calls of our own commands, those within pods included."""
    for call in run()[0]:
        inner = call[call.index("--") + 1 :] if "--" in call else call
        if inner[0] in OURS:
            yield inner[0], inner[1:]


def test_bash_finds_nothing_wrong_with_the_commands() -> None:
    """No syntax error, no unset variable, no unknown command."""
    calls, said = run()
    assert len(calls) > 100
    assert said == ""


def test_our_commands_and_options_exist() -> None:
    from loadtest.cli import app as loadtest
    from serve_app.cli.main import app as serve_app

    apps = {"serve-app": typer.main.get_command(serve_app), "serve-app-loadtest": typer.main.get_command(loadtest)}
    parsed = [parse(apps[program], arguments) for program, arguments in command_lines()]
    assert {"check", "status", "rollout", "explain", "log", "saturate"} <= set(parsed)
    assert {a for _, arguments in command_lines() for a in arguments if a in (RELEASE, NAME)} == {NAME}


def parse(command: Any, arguments: Sequence[str]) -> str:
    """Parse without running anything, and return the innermost command's name."""
    context = command.make_context("runbook", list(arguments))
    while hasattr(command, "resolve_command"):  # a group
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    return str(context.info_name)


@pytest.mark.skipif(tool("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_knows_every_option() -> None:
    one_of_each = {}
    for call in calls_of("kubectl"):
        asked = call[: call.index("--")] if "--" in call else call
        options = [word.partition("=")[0] for word in asked if word.startswith("-")]
        one_of_each[tuple(sorted({asked[2] if asked[0] == "-n" else asked[0], *options}))] = asked
    assert len(one_of_each) > 20
    for call in one_of_each.values():
        done = subprocess.run([tool("kubectl") or "", *call, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@needs_helm
def test_helm_renders_the_chart_with_every_value_that_the_runbook_sets() -> None:
    chart_values = {call[i + 1] for call in calls_of("helm") for i, word in enumerate(call) if word.startswith("--set")}
    assert len(chart_values) > 3
    for assignment in chart_values:
        key, _, value = assignment.partition("=")
        nested: Any = int(value) if value.isdecimal() and not key.startswith("head.") else value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        render({**ON, **nested})


@needs_helm
def test_the_chart_makes_what_the_commands_name() -> None:
    objects = [*render(ON).objects, *render({**ON, "tenants": {"inline": {"red": {}}}}).objects]
    made = {o["metadata"]["name"] for o in objects}
    for o in objects:
        if o["kind"] == "RayService":
            made |= {o["spec"]["serveService"]["metadata"]["name"]}
        if o["kind"] == "StatefulSet":
            pod = f"{o['metadata']['name']}-0"
            made |= {pod} | {f"{claim['metadata']['name']}-{pod}" for claim in o["spec"]["volumeClaimTemplates"]}
    created = {word for call in calls_of("kubectl") if "create" in call for word in call}
    words = {word.rpartition("/")[2] for call in calls_of("kubectl") for word in call}
    named = {word for word in words if re.fullmatch(r"(data-)?(demo|named)(-[a-z0-9-]+)?", word)}
    assert {NAME, "named-redis-0", "data-named-redis-0", "named-api-keys"} <= named
    assert named - made - created == set()


@needs_helm
def test_selectors_and_containers_are_those_of_the_charts_pods() -> None:
    templates = [template for _, template in render(ON).pod_templates()]
    labels = [t["metadata"]["labels"] for t in templates]
    containers = {c["name"] for t in templates for c in t["spec"]["containers"]}
    selectors = {call[call.index("-l") + 1] for call in calls_of("kubectl") if "-l" in call}
    ours = [dict(part.split("=") for part in s.split(",")) for s in selectors if "component=" in s]
    assert len(ours) >= 4
    assert [s for s in ours if not any(s.items() <= found.items() for found in labels)] == []
    inside = [call[: call.index("--")] for call in calls_of("kubectl") if "exec" in call]
    assert {call[call.index("-c") + 1] for call in inside if "-c" in call} == {"ray-head", "ray-worker"} <= containers


def test_the_metrics_exist() -> None:
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    theirs = Path(vllm.origin).with_name("v1") / "metrics/loggers.py"
    ours = {series.shown for series in TABLE}
    text = text_of_pages()
    named = set(re.findall(r"\bserve_app_[a-z_]+[a-z]", text))
    assert "serve_app_replica_kv_usage" in named
    assert named - ours == set()
    known = set(re.findall(r'"(vllm:[a-z_]+)"', theirs.read_text()))
    assert set(re.findall(r"vllm:[a-z_]+[a-z]", text)) - known == set()


def test_the_values_that_the_text_names_exist() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    sections = yaml.safe_load((CHART / "values.yaml").read_text())
    named = {n for n in re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z0-9_]+)+)`", text_of_pages()) if n.split(".")[0] in sections}
    assert len(named) > 10
    assert sorted(n for n in named if not is_value(n.split("."), schema, schema)) == []


def is_value(path: list[str], schema: Any, root: Any) -> bool:
    """Tell whether a values schema has this key."""
    while "$ref" in schema:
        reference = schema["$ref"].removeprefix("#/").split("/")
        schema = functools.reduce(lambda found, part: found[part], reference, root)
    if not path:
        return True
    choices = [
        schema,
        *schema.get("anyOf", []),
        *schema.get("allOf", []),
        *schema.get("oneOf", []),
        *([schema["else"]] if "else" in schema else []),
    ]
    for choice in choices[1:]:
        if is_value(path, choice, root):
            return True
    if path[0] in schema.get("properties", {}):
        return is_value(path[1:], schema["properties"][path[0]], root)
    return schema.get("type") == "object" and schema.get("additionalProperties", "properties" not in schema) is not False


def test_every_link_leads_to_a_heading_or_a_file() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), target


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_patch_for_on_demand_nodes_fits_the_node_pool() -> None:
    ((resource, name, patch),) = [(*call[1:3], call[call.index("-p") + 1]) for call in calls_of("kubectl") if "nodepool" in call]
    documents = yaml.safe_load_all((ROOT / "k8s/cluster/karpenter.yaml").read_text())
    (pool,) = [d for d in documents if d["kind"].lower() == resource and d["metadata"]["name"] == name]
    for step in json.loads(patch):
        found: Any = pool
        for part in step["path"].strip("/").split("/"):
            found = found[int(part) if isinstance(found, list) else part]
        assert found == (step["value"] if step["op"] == "test" else ["spot", "on-demand"])

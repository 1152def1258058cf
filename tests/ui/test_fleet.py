"""The pages run in front of a real fleet of two simulated replicas, all by `serve-app up`; one of them dies under an answer.

What a browser adds is in test_browser_*.py; here it shows that the pages, the ingress and the engines agree.
"""

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from serve_app.checkpoints import make_tiny_llama
from tests.e2e.fleet import Server, answers, serve_app, wait_ready, wait_until
from tests.ui.browser import LIMIT_MS, answer, ask, chromium, needs_chromium, open_chat, wait_until_done

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_chromium]
MODEL, PORT, UI_PORT = "tiny", 8061, 8062
PAGES = f"http://127.0.0.1:{UI_PORT}"
NUM_TOKENS = 300
LONG = 1500
"""Tokens of an answer that still streams when a browser beside other work has clicked: 50 s."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("gradio", reason="Gradio is not installed: pip install 'serve-app[ui]'")
    root = tmp_path_factory.mktemp("ui")
    model = {
        "model": str(make_tiny_llama(root / "model")),
        "num_cpus": 0.1,
        "simulated": {"profile": "a10g-llama-8b", "eos_probability": 0.0},
        "replicas": {"min": 2, "max": 2},
        "engine_args": {"max_model_len": 2048},
    }
    config = {
        "name": f"ui-{os.getpid()}",
        "models": {MODEL: model},
        "ingress": {"port": PORT, "num_cpus": 0.1},
        "timeouts": {"drain_s": 2.0},
        "ui": {"port": UI_PORT},
    }
    with serve_app(config, root / "fleet", options=["--demo"]) as server:
        wait_ready(server, "/readyz")
        wait_until(lambda: answers(f"{PAGES}/healthz"), limit_s=60, what="the pages answer")
        yield server


@pytest.fixture(scope="module")
def page(fleet: Server) -> Iterator[Any]:
    with chromium() as page:
        open_chat(page, f"{PAGES}/?max_tokens={NUM_TOKENS}&temperature=0", MODEL)
        yield page


def replicas(fleet: Server) -> list[Mapping[str, Any]]:
    members = httpx.get(f"{fleet.url}/fleet").json()["members"]
    return [member for member in members if member["role"] == "replica"]


def losses(fleet: Server) -> list[Mapping[str, Any]]:
    return list(httpx.get(f"{fleet.url}/fleet").json()["lost"])


def running(fleet: Server) -> int:
    return sum(int(member["load"]["running"]) for member in replicas(fleet))


def wait_for_text(page: Any) -> None:
    page.wait_for_function("() => /TTFT/.test(document.querySelector('#figures')?.innerText ?? '')")


def test_stop_aborts_on_the_engine(page: Any, fleet: Server) -> None:
    ask(page, "Count to a thousand.")
    wait_for_text(page)
    wait_until(lambda: running(fleet) == 1, limit_s=20, what="the request runs on an engine")
    page.keyboard.press("Escape")
    wait_until_done(page)
    wait_until(lambda: running(fleet) == 0, limit_s=20, what="no request runs on an engine")
    assert page.inner_text("#figures").startswith("≈ ")  # the service had not counted the tokens: the answer was not over


def test_an_answer_goes_on_when_its_replica_dies(page: Any, fleet: Server) -> None:
    page.click("#clear")
    ask(page, "Tell me a story.")
    wait_for_text(page)
    wait_until(lambda: running(fleet) == 1, limit_s=20, what="the request runs on an engine")
    (busy,) = (member for member in replicas(fleet) if member["load"]["running"])
    os.kill(busy["load"]["engine_pid"], signal.SIGKILL)
    wait_until(lambda: bool(losses(fleet)), limit_s=20, what="the loss is reported")
    (lost,) = losses(fleet)
    killed = "its engine was killed, or crashed without a message"
    assert (lost["replica_id"], lost["model"], lost["cause"]) == (busy["replica_id"], MODEL, killed)
    assert busy["replica_id"] not in {m["replica_id"] for m in replicas(fleet) if m["state"] != "lost"}
    wait_until_done(page)
    assert page.inner_text("#figures").startswith(f"{NUM_TOKENS} tokens")
    assert page.query_selector("#problem [role=alert]") is None
    assert len(answer(page)) > NUM_TOKENS
    resumed = re.search(r"serve_app_resumptions_total\{[^}]*\} ([0-9.]+)", httpx.get(f"{fleet.url}/metrics").text)
    assert resumed is not None
    assert float(resumed[1]) == 1


def test_the_fleet_page_shows_the_fleet(page: Any, fleet: Server) -> None:
    page.goto(f"{PAGES}/fleet")
    page.wait_for_selector("text=answers resumed")
    page.wait_for_selector("text=/replicas? ready/")
    page.wait_for_selector(f"h2:has-text('{MODEL}') >> text=/of 2 ready/")
    page.wait_for_selector(".fleet .card.ready")
    assert time.time() - httpx.get(f"{fleet.url}/fleet").json()["time"] < 60


def test_the_button_of_a_demo_kills_the_busy_engine_whose_answer_continues_and_another_replica_comes(
    page: Any, fleet: Server
) -> None:
    def ready() -> dict[int, str]:
        return {int(m["load"]["engine_pid"]): m["replica_id"] for m in replicas(fleet) if m["state"] == "ready"}

    wait_until(lambda: len(ready()) == 2, limit_s=180, what="the replica that was lost is replaced")
    engines = ready()
    shown = page.context.new_page()
    shown.set_default_timeout(2 * LIMIT_MS)
    shown.goto(f"{PAGES}/fleet")
    shown.wait_for_selector(".fleet .card.ready")
    open_chat(page, f"{PAGES}/?max_tokens={LONG}&temperature=0", MODEL)
    page.click("#clear")
    ask(page, "Tell me a long story.")
    wait_for_text(page)
    wait_until(lambda: running(fleet) == 1, limit_s=20, what="the request runs on an engine")
    shown.click("#kill")
    killed = re.search(r"process (\d+)", shown.wait_for_selector("#killed >> text=/Killed the engine of replica/").inner_text())
    assert killed is not None
    lost = engines[int(killed[1])]
    name = lost.rpartition("#")[2]
    shown.wait_for_selector(f"text=/{name} is lost: its engine was killed/")
    shown.wait_for_selector("text=/1 answer resumed at another replica/")
    moved = shown.wait_for_selector(".ways li:has-text('moved: its engine was killed') .path")
    (other,) = set(engines.values()) - {lost}
    assert [at.inner_text() for at in moved.query_selector_all("b")] == [name, other.rpartition("#")[2]]
    wait_until_done(page)
    assert page.inner_text("#figures").startswith(f"{LONG} tokens")
    assert page.query_selector("#problem [role=alert]") is None
    shown.wait_for_function(
        """lost => {
          const [model] = document.querySelectorAll(".fleet .cards");
          const ready = [...model.querySelectorAll(".card.ready .head b")].map((name) => name.innerText);
          return ready.length === 2 && !ready.includes(lost);
        }""",
        arg=name,
    )
    assert lost not in ready().values()
    shown.close()

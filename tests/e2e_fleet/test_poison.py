"""This test sends a request that ends each engine which computes it, among innocent streams. Three simulated replicas.

What ends the engine is a plugin of vLLM's that this test puts on the path of the engine processes: the process sends itself SIGSEGV when
its scheduler has put a request with the fatal token into a step.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet
from tests.e2e_fleet.streams import Answer, Ask, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8059
FATAL = 77
POISON = {"model": MODEL, "prompt": [10, FATAL, 12], "max_tokens": 20, "temperature": 0}
LONG = completion(MODEL, max_tokens=300).body
ASKS = [Ask("/v1/completions", {**LONG, "prompt": [20 + n, 11, 12], "temperature": 0.5 * (n % 2), "seed": n}) for n in range(9)]
PLUGIN = f"""
import os
import signal

from vllm.v1.core.sched.scheduler import Scheduler


def register():
    schedule = Scheduler.schedule

    def fatal(self, *args, **kwargs):
        step = schedule(self, *args, **kwargs)
        if any({FATAL} in (new.prompt_token_ids or ()) for new in step.scheduled_new_reqs):
            os.kill(os.getpid(), signal.SIGSEGV)
        return step

    Scheduler.schedule = fatal
"""


@pytest.fixture(scope="module")
def trio(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        PORT,
        replicas={"min": 3, "max": 3},
        timeouts={"drain_s": 5.0, "stream_silence_s": 60.0, "no_replica_s": 200.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["protocol"] = {"heartbeat_timeout_s": 60.0}  # a death is seen by the link's end, not by silence
    folder = plugin_in(tmp_path_factory.mktemp("plugin"), PLUGIN)
    config["models"][MODEL]["env"] = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    with fleet(config, tmp_path_factory.mktemp("trio")) as running:
        yield running


def plugin_in(folder: Path, source: str) -> Path:
    """Make ``folder`` an installed plugin of vLLM's, whose function ``register`` each engine process calls at its start."""
    (folder / "fatal_token.py").write_text(source)
    about = folder / "fatal_token-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fatal-token\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nfatal_token = fatal_token:register\n")
    return folder


def ask_for_poison(trio: Fleet) -> httpx.Response:
    return httpx.post(f"{trio.url}/v1/completions", json=POISON, timeout=300, verify=False)


def engines_lost(trio: Fleet) -> float:
    return sum(value for (name, _), value in trio.ingresses()[0].items() if name == "serve_app_engines_lost_total")


def test_a_poison_ends_two_engines_and_no_stream_and_is_refused_from_then_on(trio: Fleet) -> None:
    undisturbed = play(trio.url, ASKS)
    told: list[httpx.Response] = []
    answers: list[Answer] = play(trio.url, ASKS, lambda: told.append(ask_for_poison(trio)))
    assert [(r.status_code, r.json()["error"]["type"]) for r in told] == [(422, "request_quarantined")], told[0].text
    assert [a.folded() for a in answers] == [a.folded() for a in undisturbed]
    assert all(a.is_complete() for a in answers)
    assert engines_lost(trio) == 2
    again = ask_for_poison(trio)
    assert (again.status_code, again.json()["error"]["type"]) == (422, "request_quarantined")
    assert engines_lost(trio) == 2
    assert (trio.outcome("quarantined"), trio.outcome("blocked")) == (1, 1)
    (ingress,) = trio.members("ingress")
    assert [model for model, _, _ in ingress["quarantined"]] == [MODEL]

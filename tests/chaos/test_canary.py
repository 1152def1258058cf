"""These tests release canaries under load: bad ones lose their share, good ones keep it. One simulated replica on each side."""

import contextlib
import copy
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from serve_app.core.canary import CanaryState
from tests.chaos.records import audit, is_there, seeds
from tests.e2e.fleet import wait_ready, wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, ROOT, Fleet, fleet, is_running, scrape
from tests.e2e_fleet.streams import Answer, Ask, Load, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8069
LIMIT_S = 600.0  # of a busy machine; a canary that crashes takes five starts until it is found
NUM_STREAMS = 8
CANARY = "next"
OF_CANARY = (("model", CANARY), ("of", MODEL))
SHARE = 0.05
UNDECIDED_ANSWERS, LATER_ANSWERS = 200, 40
"""Answers after which the test believes that a canary gets no request: its share of them would be 10 and 2."""
NEVER = 2000.0

RELEASES: dict[str, tuple[dict[str, Any], str]] = {
    "canary-with-empty-answers": ({"simulated": {"eos_probability": 1.0}}, "bad"),
    "canary-that-is-slow": ({"simulated": {"time_scale": 4.0}}, "bad"),
    "canary-that-hangs": ({"simulated": {"time_scale": 1000.0}}, "bad"),
    "canary-that-fails-its-golden-prompt": ({"golden": [{"prompt": "a", "expect": "^no such text$"}]}, "undecided"),
    "canary-that-crashes": (
        {
            "simulated": None,
            "engine_args": {
                "distributed_executor_backend": "tests.chaos.crashing.CrashingExecutor",
                "additional_config": {"simulated": {"profile": "a10g-llama-8b"}},
            },
        },
        "bad",
    ),
    "canary-of-other-text": ({"simulated": {"seed": 7}}, "good"),
    "canary-as-good-as-its-model": ({"env": {"RELEASE": "2"}}, "good"),
}
WRONG_ANSWERS = ("canary-with-empty-answers", "canary-of-other-text")
"""Only the reader of an answer can see that its text is another: a fault that golden prompts do not find, a canary does not find."""
FIRST = "canary-with-empty-answers"


def with_canary(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with a canary of its model that differs in these settings."""
    config = copy.deepcopy(config)
    release = copy.deepcopy(config["models"][MODEL])
    for section, values in changes.items():
        release[section] = {**release.get(section, {}), **values} if isinstance(values, dict) else values
    config["models"][CANARY] = {**release, "canary": {"of": MODEL, "share": SHARE, "requests": 30}}
    return config


@pytest.fixture(scope="module")
def pair(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        PORT,
        replicas={"min": 1, "max": 1},
        timeouts={"drain_s": 30.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["health"] = {"eject_after_s": NEVER, "max_step_s": NEVER}  # a release whose steps take minutes is left to the canary
    with fleet(with_canary(config, RELEASES[FIRST][0]), tmp_path_factory.mktemp("canary"), PYTHONPATH=str(ROOT)) as running:
        yield running


def ask_of(seed: int) -> Ask:
    return completion(MODEL, prompt=f"{seed} the quick brown fox", max_tokens=20, ignore_eos=False)


@pytest.fixture(scope="module")
def undisturbed(pair: Fleet) -> dict[int, Answer]:
    """Return the model's own answer for each seed: of an ingress's first 19 requests, a canary of 5 % gets none."""
    answers = {seed: play(pair.url, [ask_of(seed)])[0] for seed in seeds()}
    ended = {labels: v for (name, labels), v in scrape(pair.url).items() if name == "serve_app_engine_requests_total"}
    assert sum(count for labels, count in ended.items() if ("model", CANARY) in labels) == 0, ended
    assert all(answer.is_complete() and answer.text() for answer in answers.values())
    return answers


def canary(pair: Fleet) -> tuple[str, float]:
    """Return what the ingress says of its canary: the state, and how many requests it was given. Nothing while there is none."""
    with contextlib.suppress(httpx.HTTPError):
        series = scrape(pair.url)
        states = [s for s in CanaryState if series.get(("serve_app_canary_state", (*OF_CANARY, ("state", s)))) == 1.0]
        return "".join(states), series.get(("serve_app_canary_requests_total", OF_CANARY), 0.0)
    return "", 0.0


def replace(pair: Fleet, changes: dict[str, Any], *, num_replicas: int) -> None:
    """Put another canary in the place of the one that is there; its ingress is the only one and has links to so many replicas."""
    alone = {**pair.config, "models": {MODEL: pair.config["models"][MODEL]}}
    if num_replicas == 1:  # if the next canary does not start, the previous one would continue
        renew(pair, alone, num_replicas=1)
    renew(pair, with_canary(alone, changes), num_replicas=num_replicas)
    wait_until(lambda: canary(pair)[0] != "", limit_s=LIMIT_S, what=f"the next canary\n{pair.server.tail()}", every_s=0.5)


def renew(pair: Fleet, config: dict[str, Any], *, num_replicas: int) -> None:
    """Hand Serve this configuration and wait until no process of the one before is left."""
    before = [psutil.Process(m["pid"]) for m in pair.status()["members"] if psutil.pid_exists(m["pid"])]
    pair.operate("redeploy", config)
    wait_until(lambda: not any(map(is_running, before)), limit_s=LIMIT_S, what=f"new processes only\n{pair.server.tail()}")
    wait_ready(pair.server, "/healthz")
    pair.wait_for_replicas(num_replicas, limit_s=LIMIT_S)


@pytest.mark.parametrize("scenario", RELEASES)
@pytest.mark.parametrize("seed", seeds())
def test_a_canary_gets_its_share_until_it_is_found_worse(
    pair: Fleet, undisturbed: dict[int, Answer], scenario: str, seed: int
) -> None:
    if is_there(scenario, seed):
        pytest.skip("its record is there")
    changes, state = RELEASES[scenario]
    starts = state != "undecided"
    if scenario != FIRST or seed > 1:  # another environment variable is another release, on which no verdict is there
        replace(pair, {**changes, "env": {"RELEASE": f"{scenario}-{seed}"}}, num_replicas=1 + starts)
    with Load(pair.url, ask_of(seed), num_streams=NUM_STREAMS) as load:
        began_at = time.monotonic()
        if starts:
            wait_until(lambda: canary(pair)[0] == state, limit_s=LIMIT_S, what=f"{state}\n{pair.server.tail()}", every_s=0.5)
        else:
            wait_until(lambda: len(load.answers) >= UNDECIDED_ANSWERS, limit_s=LIMIT_S, what="answers of the model alone")
        found_s = time.monotonic() - began_at
        _, at_verdict = canary(pair)
        at_least = len(load.answers) + LATER_ANSWERS
        wait_until(lambda: len(load.answers) >= at_least, limit_s=LIMIT_S, what="answers after the verdict")
    said, exposed = canary(pair)
    measured = {
        "exposed": exposed,
        "exposed_percent": 100.0 * exposed / len(load.answers),
        "lost": float(sum(not answer.is_complete() for answer in load.answers)),
    }
    most = {"failures": exposed if scenario in WRONG_ANSWERS else 0, "lost": 0}
    record = audit(scenario, seed, load.answers, undisturbed[seed], healed_s=found_s, measured=measured, at_most=most)
    assert said == state
    assert exposed <= SHARE * record.n + 1
    if state == "bad":
        assert exposed == at_verdict, "requests came after the verdict"
        assert play(pair.url, [ask_of(seed)])[0].folded() == undisturbed[seed].folded()

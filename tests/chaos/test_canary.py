"""Releases as canaries under load: the bad ones lose their share, the good one keeps it. One simulated replica on each side."""

import copy
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.chaos.records import audit, is_there, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, ROOT, Fleet, fleet, is_running
from tests.e2e_fleet.streams import Answer, Ask, Load, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500), pytest.mark.xdist_group("chaos")]

PORT = 8069
LIMIT_S = 600.0  # of a busy machine; a canary that crashes takes five starts until it is found
NUM_STREAMS = 8
CANARY = "next"
SHARE = 0.05
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
"""Nobody but the reader of an answer can see that it is another text: what golden prompts do not find, a canary does not."""
IN_SHORT = "canary-with-empty-answers"


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
    with fleet(with_canary(config, RELEASES[IN_SHORT][0]), tmp_path_factory.mktemp("canary"), PYTHONPATH=str(ROOT)) as running:
        yield running


def ask_of(seed: int) -> Ask:
    return completion(MODEL, prompt=f"{seed} the quick brown fox", max_tokens=20, ignore_eos=False)


@pytest.fixture(scope="module")
def undisturbed(pair: Fleet) -> dict[int, Answer]:
    """Return the model's own answer for each seed: of an ingress's first 19 requests, a canary of 5 % gets none."""
    answers = {seed: play(pair.url, [ask_of(seed)])[0] for seed in seeds()}
    of_canary = {
        k: v for k, v in pair.ingresses()[0].items() if k[0] == "serve_app_engine_requests_total" and ("model", CANARY) in k[1]
    }
    assert sum(of_canary.values()) == 0, of_canary
    assert all(answer.is_complete() and answer.text() for answer in answers.values())
    return answers


def canary_of(pair: Fleet) -> dict[str, Any]:
    """Return what the newest ingress says of the canary, nothing while there is no ingress."""
    newest = max(pair.members("ingress"), key=lambda member: member["epoch"], default=None)
    return {} if newest is None else dict(newest["load"]["models"].get(CANARY, {}).get("canary", {}))


def processes(pair: Fleet) -> list[psutil.Process]:
    """Return the processes of the ingresses that take requests, and of the canary's replicas."""
    members = pair.members("ingress") + [m for m in pair.members("replica") if m["model"] == CANARY]
    return [psutil.Process(member["pid"]) for member in members if psutil.pid_exists(member["pid"])]


def release(pair: Fleet, changes: dict[str, Any], *, starts: bool) -> None:
    """Put another canary in the place of the one that is there. It is known to an ingress only once that of before has ended."""
    before = processes(pair)
    pair.operate("redeploy", with_canary({**pair.config, "models": {MODEL: pair.config["models"][MODEL]}}, changes))
    wait_until(
        lambda: not any(map(is_running, before)) and len(processes(pair)) == 1 + starts and canary_of(pair) != {},
        limit_s=LIMIT_S,
        what=f"the ingress of the next canary\n{pair.server.tail()}",
    )


@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=[] if name == IN_SHORT else pytest.mark.slow) for name in RELEASES]
)
@pytest.mark.parametrize("seed", seeds())
def test_a_canary_gets_its_share_until_it_is_found_worse(
    pair: Fleet, undisturbed: dict[int, Answer], scenario: str, seed: int
) -> None:
    if is_there(scenario, seed):
        pytest.skip("its record is there")
    changes, state = RELEASES[scenario]
    starts = state != "undecided"
    if scenario != IN_SHORT or seed > 1:  # another environment variable is another release, on which no verdict is there
        release(pair, {**changes, "env": {"RELEASE": f"{scenario}-{seed}"}}, starts=starts)
    with Load(pair.url, ask_of(seed), num_streams=NUM_STREAMS) as load:
        began_at = time.monotonic()
        if starts:
            wait_until(lambda: canary_of(pair).get("state") == state, limit_s=LIMIT_S, what=f"{state}\n{pair.server.tail()}")
        else:
            time.sleep(20.0)
        found_s = time.monotonic() - began_at
        at_verdict = canary_of(pair)["requests"]
        time.sleep(2.0)
    said = canary_of(pair)
    measured = {
        "exposed": float(said["requests"]),
        "exposed_percent": 100.0 * said["requests"] / len(load.answers),
        "lost": float(sum(not answer.is_complete() for answer in load.answers)),
    }
    most = {"failures": said["requests"] if scenario in WRONG_ANSWERS else 0, "lost": 0}
    record = audit(scenario, seed, load.answers, undisturbed[seed], healed_s=found_s, measured=measured, at_most=most)
    assert said["state"] == state, said
    assert said["requests"] <= SHARE * record.n + 1
    if state == "bad":
        assert said["requests"] == at_verdict, "requests came after the verdict"
        assert play(pair.url, [ask_of(seed)])[0].folded() == undisturbed[seed].folded()

"""Releases as canaries under load: the bad ones lose their share, the good one keeps it. One simulated replica on each side."""

import copy
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.records import audit, is_there, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, ROOT, Fleet, fleet
from tests.e2e_fleet.streams import Load, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("chaos")]

PORT = 8069
LIMIT_S = 240.0  # of a busy machine
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


def canary_of(pair: Fleet) -> dict[str, Any]:
    """Return what the newest ingress says of the canary."""
    newest = max(pair.members("ingress"), key=lambda member: member["epoch"])
    return dict(newest["load"]["models"].get(CANARY, {}).get("canary", {}))


@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=[] if name == IN_SHORT else pytest.mark.slow) for name in RELEASES]
)
@pytest.mark.parametrize("seed", seeds())
def test_a_canary_gets_its_share_until_it_is_found_worse(pair: Fleet, scenario: str, seed: int) -> None:
    if is_there(scenario, seed):
        pytest.skip("its record is there")
    changes, state = RELEASES[scenario]
    if scenario != IN_SHORT or seed > 1:  # another environment variable is another release, on which no verdict is there
        changes = {**changes, "env": {"RELEASE": f"{scenario}-{seed}"}}
        before = {member["replica_id"] for member in pair.members("replica")}
        pair.operate("redeploy", with_canary({**pair.config, "models": {MODEL: pair.config["models"][MODEL]}}, changes))
        if state != "undecided":
            wait_until(
                lambda: any(m["model"] == CANARY and m["replica_id"] not in before for m in pair.members("replica")),
                limit_s=LIMIT_S,
                what=f"the canary's replica\n{pair.server.tail()}",
            )
    ask = completion(MODEL, prompt=f"{seed} the quick brown fox", max_tokens=20, ignore_eos=False)
    with Load(pair.url, ask, num_streams=NUM_STREAMS) as load:
        began_at = time.monotonic()
        if state == "undecided":
            time.sleep(20.0)
        else:
            wait_until(lambda: canary_of(pair).get("state") == state, limit_s=LIMIT_S, what=f"{state}\n{pair.server.tail()}")
        found_s = time.monotonic() - began_at
        at_verdict = canary_of(pair).get("requests", 0)
        time.sleep(2.0)
    said = canary_of(pair)
    text, _ = Counter(answer.text() for answer in load.answers).most_common(1)[0]
    undisturbed = next(answer for answer in load.answers if answer.text() == text)
    measured = {"canary_requests": float(said["requests"]), "canary_share": said["requests"] / len(load.answers)}
    most = {"failures": said["requests"] if scenario in WRONG_ANSWERS else 0}
    record = audit(scenario, seed, load.answers, undisturbed, healed_s=found_s, measured=measured, at_most=most)
    assert said["state"] == state, said
    assert said["requests"] <= SHARE * record.n + 1
    if state == "bad":
        assert said["requests"] == at_verdict, "requests came after the verdict"
        assert play(pair.url, [ask])[0].folded() == undisturbed.folded()

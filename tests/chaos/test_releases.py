"""These tests roll out bad releases under streams: no replica of theirs takes a request. Two simulated replicas, no surge."""

import copy
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.chaos.records import audit, folder, is_there, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, taking
from tests.e2e_fleet.streams import Load, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8067
LIMIT_S = 240.0  # of a busy machine
NUM_STREAMS = 4
NEVER = 2000.0
GOLDEN = "the quick brown fox"
BAD: dict[str, dict[str, Any]] = {
    "release-of-wrong-weights": {"simulated": {"seed": 7}},
    "release-that-is-slow": {"simulated": {"time_scale": 400.0}},
    "release-that-crashes": {"engine_args": {"max_model_len": 1_000_000}},
}
SAID = {
    "release-of-wrong-weights": "golden prompt 'the quick brown fox' was answered with",
    "release-that-is-slow": "golden prompt 'the quick brown fox' has no answer after 20 s",
    "release-that-crashes": "max_model_len",
}
IN_SHORT = "release-of-wrong-weights"


@pytest.fixture(scope="module")
def pair(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        PORT,
        replicas={"min": 2, "max": 2, "surge": 0},
        timeouts={"drain_s": 30.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    config["health"] = {
        "eject_after_s": NEVER,
        "max_step_s": NEVER,
    }  # a release whose steps take minutes is left to its golden prompt
    with fleet(config, tmp_path_factory.mktemp("releases")) as running:
        yield running


@pytest.fixture(scope="module")
def golden(pair: Fleet) -> dict[str, Any]:
    answer = play(pair.url, [completion(MODEL, prompt=GOLDEN, max_tokens=8, ignore_eos=False)])[0]
    return {"prompt": GOLDEN, "max_tokens": 8, "within_s": 20.0, "expect": re.escape(answer.text().strip())}


def released(pair: Fleet, golden: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fleet's configuration with a golden prompt and other settings of the model."""
    config = copy.deepcopy(pair.config)
    model = config["models"][MODEL]
    model["golden"] = [dict(golden)]
    for section, values in changes.items():
        model[section] = {**model.get(section, {}), **values}
    return config


def deployment(pair: Fleet) -> dict[str, Any]:
    """Return what `serve-app status` says of the model's deployment."""
    return dict(pair.status()["deployments"][f"replica-{MODEL}"])


def pids(pair: Fleet) -> set[int]:
    return {m["pid"] for m in pair.members("replica")}


def is_back(pair: Fleet) -> bool:
    """Return whether two replicas of the wanted release take requests. The one that has served all the time may be one of them."""
    return deployment(pair)["rollout"] == "" and len(pids(pair)) == len(taking(pair.ingresses()[0])) == 2


@pytest.mark.parametrize("scenario", BAD)
@pytest.mark.parametrize("seed", seeds())
def test_a_bad_release_takes_no_request_and_the_way_back_costs_none(
    pair: Fleet, golden: dict[str, Any], scenario: str, seed: int
) -> None:
    if folder() is None and scenario != IN_SHORT:
        pytest.skip("only make chaos has the time")
    if is_there(scenario, seed):
        pytest.skip("its record is there")
    before = pids(pair)
    ask = completion(MODEL, prompt=f"{seed} {GOLDEN}", max_tokens=100)
    undisturbed = play(pair.url, [ask])[0]
    with Load(pair.url, ask, num_streams=NUM_STREAMS) as load:
        pair.operate("redeploy", released(pair, golden, BAD[scenario]))
        wait_until(
            lambda: SAID[scenario] in deployment(pair)["message"], limit_s=LIMIT_S, what=f"the reason\n{pair.server.tail()}"
        )
        assert pids(pair) < before, "one of the two serves"
        pair.operate("redeploy", released(pair, golden, {}))
        back_at = time.monotonic()
        wait_until(lambda: is_back(pair), limit_s=LIMIT_S, what=f"two good replicas\n{pair.server.tail()}")
        healed_s = time.monotonic() - back_at
    record = audit(scenario, seed, load.answers, undisturbed, healed_s=healed_s)
    assert record.n >= 2 * NUM_STREAMS

"""Answers of simulated engines make way for long prompts, in virtual time: vLLM's schedulers, our ingress cores, and a simulated link."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.apart import CHATS, ENGINE, LONG, PROFILE, SIDES, STREAMS, p99
from benchmarks.loaded_fleet import LoadedFleet
from serve_app.checkpoints import make_tiny_llama
from serve_app.planning.engines import ENVIRONMENT, clock_of, costs_of, engine_cores

pytestmark = pytest.mark.engine

ENGINES = 3
LOADS = [replace(CHATS, rate=30.0), replace(LONG, rate=3.0)]
Play = Callable[..., LoadedFleet]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Return a function that plays loads on three engines for ten seconds after a warm-up of five."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        playing: list[LoadedFleet] = []
        checkpoint = make_tiny_llama(tmp_path_factory.mktemp("apart") / "tiny-llama")
        cores: list[Any] = engine_cores(checkpoint, ENGINES, clock_of(playing), link="efa-400g", **ENGINE)

        def play(side: str, *, begin: Callable[[LoadedFleet], None] = lambda fleet: None, **kwargs: Any) -> LoadedFleet:
            loads = kwargs.pop("loads", LOADS)
            playing[:] = [LoadedFleet(cores, seed=1, costs=costs_of(PROFILE), **SIDES[side], **kwargs)]
            begin(playing[-1])
            playing[-1].run(loads, 10.0, warmup_s=5.0)
            return playing[-1]

        yield play
        for core in cores:
            core.shutdown()


def gaps(fleet: LoadedFleet) -> list[float]:
    """Return the seconds between the tokens of chats."""
    return [gap for asked in fleet.counted("chat") for gap in asked.gaps]


def test_long_prompts_stop_few_answers_where_these_make_way(play: Play) -> None:
    together, apart = play("together"), play("apart")
    assert p99(gaps(apart)) < 0.5 * p99(gaps(together))
    assert apart.tokens.total() > 0.97 * together.tokens.total()
    assert together.hand_overs().total() == 0
    assert apart.hand_overs()["read"] > 0.9 * apart.hand_overs().total() > 0


def test_with_pools_long_prompts_stop_no_answers_of_the_other_pool(play: Play) -> None:
    pools = play("pools 1")
    long = [asked for asked in pools.counted("long") if asked.is_complete and asked.state is not None]
    assert {asked.state.trail.replicas[0] for asked in long if asked.state is not None} == {"0"}
    assert {asked.state.trail.replicas[-1] for asked in long if asked.state is not None} == {"1", "2"}
    whole_step_s = 2048 * costs_of(PROFILE).prompt_token_s
    assert p99(gaps(pools)) < 0.5 * whole_step_s
    assert pools.hand_overs()["read"] > 0.9 * pools.hand_overs().total() > 0


def test_a_drain_with_kv_computes_no_prompt_again_and_leaves_shorter_gaps(play: Play) -> None:
    def begin(fleet: LoadedFleet) -> None:
        for number in range(1, ENGINES):
            fleet.drain(number, 1e6)
            fleet.at(8.0, fleet.drain, number, None)
        fleet.at(9.0, fleet.drain, 0, 2.0)

    streams = [replace(STREAMS, depth=12)]
    gaps_of = []
    for moves_kv in (True, False):
        fleet = play("together", begin=begin, loads=streams, moves_kv=moves_kv)
        moved = [asked.state for asked in fleet.asked if asked.state is not None and asked.state.trail.gaps]
        assert len(moved) == 12
        assert (fleet.kv_read()[0] >= 12 * streams[0].own[0]) is moves_kv
        gaps_of.append(max(gap for state in moved for gap in state.trail.gaps_s))
    assert gaps_of[0] < 0.6 * gaps_of[1]

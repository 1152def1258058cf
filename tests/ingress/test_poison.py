"""One request that ends every engine which computes it meets innocent requests of two ingresses; real links, fake engines."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from serve_app.core.events import BlocksReported
from serve_app.errors import RequestQuarantined
from serve_app.ingress.fleet.intake import digest_of, fingerprint_of
from serve_app.ingress.http.error_answers import FleetError
from tests.doubles.fake_engine import answer
from tests.doubles.fake_front_end import Stream
from tests.doubles.fleet import FakeReplica, Fleet, fleet, in_loop, settings, start_replica, until
from tests.ingress.helpers import error_of

POISON = [6, 6, 6]
TOKENS = 5


async def step(replicas: list[FakeReplica], deaths: list[str]) -> None:
    """Let every engine compute; an engine that has the poison dies."""
    for replica in replicas:
        if replica.lease.member_id in deaths:
            continue
        if any(request.prompt_token_ids == POISON for _, request, _ in replica.engine.running.values()):
            deaths.append(replica.lease.member_id)
            await replica.server.close("engine_dead", "the poison")
        else:
            replica.engine.step()
    await asyncio.sleep(0)


async def play(replicas: list[FakeReplica], holds: Callable[[], bool]) -> list[str]:
    """Step until ``holds``; return the replicas that have died."""
    deaths: list[str] = []
    while not holds():
        await step(replicas, deaths)
    return deaths


async def join(fleets: list[Fleet], *replica_ids: str, beside: Sequence[FakeReplica] = ()) -> list[FakeReplica]:
    replicas = [*beside, *[await start_replica(fleets[0].settings, i) for i in replica_ids]]
    for f in fleets:
        f.client.set_members([r.lease for r in replicas])
        await until(lambda f=f: len(f.client.fleet.replicas) == len(replicas))  # type: ignore[misc]
    return replicas


async def close(replicas: list[FakeReplica]) -> None:
    for replica in replicas:
        await replica.close()


@in_loop
async def test_a_poison_ends_two_replicas_and_no_other_request_of_either_ingress() -> None:
    values = settings()
    async with fleet(values) as one, fleet(values) as two:
        replicas = await join([one, two], "a", "b", "c", "d")
        innocent: dict[int, Stream] = {}
        for number in range(12):
            f = (one, two)[number % 2]
            innocent[number] = await f.front.add(f"r{number}", [number], max_tokens=TOKENS)
        poison = await one.front.add("poison", POISON, max_tokens=TOKENS)
        await until(lambda: sum(len(r.engine.running) for r in replicas) == 13)
        deaths = await play(replicas, lambda: poison.error is not None and all(s.finished for s in innocent.values()))
        assert len(deaths) == 2
        assert isinstance(error_of(poison), RequestQuarantined)
        assert {n: s.token_ids for n, s in innocent.items()} == {n: answer([n], TOKENS) for n in innocent}
        assert one.client.fleet.outcomes == {"complete": 6, "quarantined": 1}
        assert two.client.fleet.outcomes == {"complete": 6}

        with pytest.raises(FleetError, match="refused for another"):
            await one.front.add("again", POISON, max_tokens=TOKENS, seed=7)
        two.client.handle(BlocksReported(one.client.quarantined()))
        with pytest.raises(FleetError) as refused:
            await two.front.add("elsewhere", POISON, max_tokens=TOKENS)
        assert isinstance(refused.value.error, RequestQuarantined)
        assert (refused.value.http_status, two.client.quarantined()) == (422, [])
        assert [r for r in replicas if r.lease.member_id not in deaths and r.engine.running] == []
        await close(replicas)


@in_loop
async def test_the_choices_of_one_poisonous_request_end_two_replicas_and_not_one_each() -> None:
    async with fleet() as f:
        replicas = await join([f], "a")  # it gets them all
        choices = [await f.front.add(f"{n}_p", POISON, parent="p", seed=n) for n in range(4)]
        await until(lambda: len(replicas[0].engine.running) == 4)
        replicas = await join([f], "b", "c", "d", "e", beside=replicas)
        deaths = await play(replicas, lambda: not f.client.fleet.requests)
        assert len(deaths) == 2
        assert any(stream.error is not None for stream in choices)
        await close(replicas)


@in_loop
async def test_eight_streams_of_a_killed_replica_are_tried_one_after_the_other_and_continue_together() -> None:
    async with fleet() as f:
        replicas = await join([f], "a")
        streams = [await f.front.add(f"r{n}", [n], max_tokens=TOKENS) for n in range(8)]
        await until(lambda: len(replicas[0].engine.running) == 8)
        replicas[0].engine.step(2)
        await until(lambda: all(len(s.token_ids) == 2 for s in streams))
        await replicas[0].server.close("engine_dead", "killed")
        replicas += await join([f], "b")
        engine = replicas[1].engine
        for count in range(1, 9):
            await until(lambda count=count: len(engine.added) == count)  # type: ignore[misc]
            assert len([a for a in engine.running.values() if not a[2]]) == 1, "only one has had no token here"
            engine.step()
        while not all(s.finished for s in streams):
            engine.step()
            await asyncio.sleep(0)
        assert [s.token_ids for s in streams] == [answer([n], TOKENS) for n in range(8)]
        await close(replicas)


def request(prompt: list[int], **params: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    beside = {"cache_salt": params.pop("cache_salt", None), "request_id": params.pop("request_id", "r")}
    return EngineCoreRequest(
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(**params),
        pooling_params=None,
        arrival_time=params.get("seed") or 0.0,
        lora_request=None,
        data_parallel_rank=None,
        **beside,
    )


def test_requests_that_give_the_engine_the_same_to_compute_have_one_fingerprint() -> None:
    def fingerprint(asked: Any, model: str = "tiny") -> str:
        return fingerprint_of(asked, model, digest_of(asked.prompt_token_ids))

    mine = fingerprint(request([1, 2], temperature=0.5, stop=["\ud800"]))
    alike = request([1, 2], temperature=0.5, stop=["\ud800"], seed=7, request_id="s", cache_salt="x")
    assert fingerprint(alike) == mine
    others = [request([1, 3], temperature=0.5, stop=["\ud800"]), request([1, 2], temperature=0.6, stop=["\ud800"])]
    assert len({mine, *map(fingerprint, others), fingerprint(alike, "other")}) == 4

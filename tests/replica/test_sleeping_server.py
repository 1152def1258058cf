"""A replica's listener tells ingresses that its engine sleeps, and they wake it; a fake engine stands behind it."""

from tests.doubles.fake_engine import answer
from tests.doubles.fleet import fleet, in_loop, settings, start_replica, until


@in_loop
async def test_a_request_for_a_sleeping_engine_wakes_it_and_is_answered() -> None:
    values = settings()
    replica = await start_replica(values, "a")
    asked: list[bool] = []
    replica.server.on_wake = lambda: asked.append(True)
    replica.server.sleep_drain(0.0)
    async with fleet(values) as f:
        f.client.set_members([replica.lease])
        await until(f.client.is_ready)
        request = await f.front.add("r1", [1], max_tokens=2)
        await until(lambda: asked)
        assert not replica.engine.running
        replica.server.take_again()
        await until(lambda: replica.engine.running)
        replica.engine.step(2)
        await until(lambda: request.finished)
        assert request.token_ids == answer([1], 2)
    await replica.close()


@in_loop
async def test_an_answer_that_outlasts_the_drain_continues_after_the_sleep() -> None:
    values = settings()
    replica = await start_replica(values, "a")
    async with fleet(values) as f:
        f.client.set_members([replica.lease])
        await until(f.client.is_ready)
        request = await f.front.add("r1", [1], max_tokens=4)
        await until(lambda: replica.engine.running)
        replica.engine.step(2)
        await until(lambda: len(request.token_ids) == 2)
        replica.server.sleep_drain(0.0)
        replica.server.let_go()
        assert not replica.server.num_attempts()
        assert replica.engine.aborted == ["r1@0"]
        await until(lambda: list(replica.server.open_links()))
        replica.server.take_again()
        await until(lambda: replica.engine.running)
        replica.engine.step(4)
        await until(lambda: request.finished)
        assert request.token_ids == answer([1], 4)
    await replica.close()


@in_loop
async def test_a_replica_that_drains_for_good_is_not_taken_for_sleeping() -> None:
    replica = await start_replica(settings(), "a")
    replica.server.sleep_drain(5.0)
    await replica.server.drain(0.0)
    replica.server.take_again()
    assert (replica.server.draining, replica.server.sleeping) == (True, False)
    await replica.close()

"""No bytes that a client sends make an ingress fail, or get an answer that belongs to another request; vLLM's front end, a fake engine."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.doubles.fleet import until
from tests.hostile.inputs import INPUTS, PLAIN, post
from tests.hostile.server import Served, served
from tests.hostile.wire import Input, answers


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def ingress(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    context = served(tmp_path_factory.mktemp("models"))
    yield runner.run(context.__aenter__())
    runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("given", INPUTS, ids=lambda given: given.name)
def test_an_input_gets_its_answers_and_no_others_and_the_ingress_serves_on(
    given: Input, ingress: Served, runner: asyncio.Runner
) -> None:
    async def play() -> tuple[tuple[tuple[int, ...], bool], tuple[tuple[int, ...], bool]]:
        got = await answers(ingress.port, given)
        plain = await answers(ingress.port, Input("plain", (post(PLAIN),), (200,), True))
        await until(lambda: ingress.app.num_running == 0 and not ingress.engine.running)
        return got, plain

    assert runner.run(play()) == ((given.statuses, given.stays), ((200,), True))


def test_the_table_has_many_inputs_with_a_name_each() -> None:
    assert len({given.name for given in INPUTS}) == len(INPUTS) > 120

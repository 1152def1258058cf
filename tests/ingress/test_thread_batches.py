"""Calls go to a thread in batches, and each caller gets its result, even after a client disconnects or a thread hangs."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from vllm.renderers.base import _SwappableExecutor

from serve_app.ingress.shortcuts.thread_batches import MAX_CALLS, MAX_CHARS, Call, ThreadBatches, tried
from tests.doubles.fleet import in_loop

LIMIT_S = 60.0
HANGS = 1000


class Thread:
    """Doubles numbers and the length of texts in ``batches``; waits for ``open`` before each. What is no number it refuses.

    At `HANGS` it waits for ``released``.
    """

    def __init__(self, *, num_threads: int = 1) -> None:
        self.batches: list[list[Any]] = []
        self.open = threading.Event()
        self.released = threading.Event()
        self.executor = _SwappableExecutor(max_workers=num_threads)
        self.double = ThreadBatches(self._several, self.executor, lambda call: len(str(call[0][0])))

    def _several(self, calls: Sequence[Call]) -> Iterator[Any]:
        self.batches.append([args[0] for args, _ in calls])
        assert self.open.wait(LIMIT_S)
        for args, kwargs in calls:
            yield tried(self._one, *args, **kwargs)

    def _one(self, value: Any, *, times: int = 2) -> Any:
        if value == HANGS:
            assert self.released.wait(LIMIT_S)
        return times * (len(value) if isinstance(value, str) and value.isalpha() else int(value))

    def end(self) -> None:
        self.open.set()
        self.released.set()
        self.executor.shutdown()


@pytest.fixture
def thread() -> Iterator[Thread]:
    thread = Thread()
    yield thread
    thread.end()


@pytest.fixture
def threads() -> Iterator[Thread]:
    threads = Thread(num_threads=4)
    yield threads
    threads.end()


async def first_is_in(thread: Thread, *, num: int = 1) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(thread.batches) < num:
            await asyncio.sleep(0.001)


@in_loop
async def test_calls_of_one_turn_go_together_and_each_gets_its_own_result(thread: Thread) -> None:
    thread.open.set()
    calls = [thread.double(1), thread.double(2, times=3), thread.double(3)]
    assert await asyncio.gather(*calls) == [2, 6, 6]
    assert thread.batches == [[1, 2, 3]]


@in_loop
async def test_what_comes_while_the_thread_is_busy_is_the_next_batch(thread: Thread) -> None:
    first = thread.double(0)
    await first_is_in(thread)
    rest = [thread.double(number) for number in range(1, MAX_CALLS + 3)]
    thread.open.set()
    assert await asyncio.gather(first, *rest) == [2 * number for number in range(MAX_CALLS + 3)]
    assert [len(batch) for batch in thread.batches] == [1, MAX_CALLS, 2]


@in_loop
async def test_a_long_call_goes_alone(thread: Thread) -> None:
    thread.open.set()
    long = "a" * MAX_CHARS
    assert await asyncio.gather(*map(thread.double, ("a", long, "b"))) == [2, 2 * MAX_CHARS, 2]
    assert thread.batches == [["a"], [long], ["b"]]


@in_loop
async def test_an_error_is_for_the_one_whose_call_raised_it(thread: Thread) -> None:
    thread.open.set()
    one, wrong, two = await asyncio.gather(*map(thread.double, (1, "?", 2)), return_exceptions=True)
    assert (one, two) == (2, 4)
    assert isinstance(wrong, ValueError)
    assert len(thread.batches) == 1


@in_loop
async def test_a_call_that_no_caller_waits_for_any_more_is_not_made(thread: Thread) -> None:
    first = thread.double(0)
    await first_is_in(thread)
    gone, stays = thread.double(1), thread.double(2)
    gone.cancel()
    thread.open.set()
    assert (await first, await stays) == (0, 4)
    assert thread.batches == [[0], [2]]


@in_loop
async def test_calls_continue_in_the_threads_that_replace_a_hung_one(thread: Thread) -> None:
    hung = thread.double(0)
    await first_is_in(thread)
    thread.executor.replace_inner()
    others = [thread.double(1), thread.double(2)]
    await first_is_in(thread, num=2)
    assert thread.batches == [[0], [1, 2]]
    thread.open.set()
    assert await asyncio.gather(hung, *others) == [0, 2, 4]
    assert await thread.double(3) == 6


@in_loop
async def test_what_waited_when_a_hung_thread_was_replaced_continues_without_a_further_call(thread: Thread) -> None:
    thread.open.set()
    hung = thread.double(HANGS)
    await first_is_in(thread)
    others = [thread.double(1), thread.double(2)]
    thread.executor.replace_inner()
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*others) == [2, 4]
    assert not hung.done()
    assert thread.batches == [[HANGS], [1, 2]]


@in_loop
async def test_a_batch_that_a_replaced_thread_has_not_begun_continues_before_what_waits(thread: Thread) -> None:
    thread.open.set()
    another_function = thread.executor.submit(thread.released.wait, LIMIT_S)  # vLLM has others for the same threads
    first = thread.double(1)
    await asyncio.sleep(0)
    second = thread.double(2)
    thread.executor.replace_inner()
    async with asyncio.timeout(LIMIT_S):
        assert [await first, await second] == [2, 4]
    assert not another_function.done()
    assert thread.batches == [[1, 2]]


@in_loop
async def test_a_call_that_hangs_keeps_no_result_of_those_before_it(thread: Thread) -> None:
    thread.open.set()
    before, wrong, hung, behind = map(thread.double, (1, "?", HANGS, 2))
    async with asyncio.timeout(LIMIT_S):
        assert await before == 2
        with pytest.raises(ValueError, match=r"\?"):
            await wrong
    assert (hung.done(), behind.done(), len(thread.batches)) == (False, False, 1)
    thread.released.set()
    assert (await hung, await behind) == (2 * HANGS, 4)


@in_loop
async def test_free_threads_get_as_many_calls_each(threads: Thread) -> None:
    calls = [threads.double(number) for number in range(10)]
    await first_is_in(threads, num=4)
    threads.open.set()
    assert await asyncio.gather(*calls) == [2 * number for number in range(10)]
    assert sorted(threads.batches) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


@in_loop
async def test_calls_after_the_end_of_the_threads_fail(thread: Thread) -> None:
    thread.executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await thread.double(1)

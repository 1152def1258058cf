"""Calls to a thread in batches: a free thread gets all that came while it was busy.

vLLM hands each prompt to a thread by itself. For a short prompt the hand-over costs as much as its tokenization, and in a burst the thread
waits for Python's lock at each one.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

MAX_CALLS = 32
"""Calls of one batch. With all 256 of a burst in one, the first of them would wait for the last one."""
MAX_CHARS = 32 << 10
"""Characters of one batch, a single longer call apart: some 10 ms of tokenization."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Its arguments, by position and by name."""
_Waiting = tuple[Call, "asyncio.Future[Any]"]


class ThreadBatches:
    """Calls of one function that wait for the threads of vLLM's renderer.

    Args:
        several: Makes each of the calls and returns a result or an exception for each, in order; runs in a thread.
        executor: The renderer's, whose threads vLLM replaces when one hangs.
        num_chars: Returns how long the text of a call is.
        max_calls: Of one batch.
    """

    def __init__(
        self,
        several: Callable[[Sequence[Call]], list[Any]],
        executor: Any,
        num_chars: Callable[[Call], int],
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._several = several
        self._executor = executor
        self._num_chars = num_chars
        self._max_calls = max_calls
        self._waiting: deque[_Waiting] = deque()
        self._threads: Any = None
        self._num_busy = 0
        """Batches that are with ``_threads``."""
        self._is_due = False

    def __call__(self, *args: Any, **kwargs: Any) -> "asyncio.Future[Any]":
        """Return what will have the result of this call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(((args, kwargs), future))
        if not self._is_due and self._has_free_thread():
            self._is_due = True
            loop.call_soon(self._hand_over, loop)  # behind the calls that come in the same turn of the loop
        return future

    def _has_free_thread(self) -> bool:
        if self._threads is not self._executor._inner:  # what hangs does so in the threads before
            self._threads, self._num_busy = self._executor._inner, 0
        return self._num_busy < self._executor._max_workers

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due = False
        while self._has_free_thread() and (batch := self._next_batch()):
            calls, futures = [call for call, _ in batch], [future for _, future in batch]
            try:
                handed = loop.run_in_executor(self._executor, self._several, calls)
            except RuntimeError as error:  # vLLM has shut its threads down
                _settle(futures, [error] * len(futures))
                continue
            self._num_busy += 1
            handed.add_done_callback(partial(self._done, loop, self._threads, futures))

    def _next_batch(self) -> list[_Waiting]:
        batch, num_chars = list[_Waiting](), 0
        while self._waiting and len(batch) < self._max_calls:
            call, future = self._waiting[0]
            if not future.done():  # a client may have gone
                num_chars += self._num_chars(call)
                if batch and num_chars > MAX_CHARS:
                    break
                batch.append((call, future))
            self._waiting.popleft()
        return batch

    def _done(
        self,
        loop: asyncio.AbstractEventLoop,
        threads: Any,
        futures: Sequence["asyncio.Future[Any]"],
        handed: "asyncio.Future[Any]",
    ) -> None:
        if threads is self._threads:
            self._num_busy -= 1
        error = asyncio.CancelledError() if handed.cancelled() else handed.exception()
        _settle(futures, handed.result() if error is None else [error] * len(futures))
        self._hand_over(loop)


def tried(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what the call returns, or the exception that it raises, for the one whose call it is."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return error


def _settle(futures: Sequence["asyncio.Future[Any]"], results: Sequence[Any]) -> None:
    for future, result in zip(futures, results, strict=True):
        if future.done():
            continue
        if isinstance(result, asyncio.CancelledError):
            future.cancel()
        elif isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

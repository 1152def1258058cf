"""Thread batches hand calls to threads together: free threads share all calls that arrived while they were busy.

vLLM hands each prompt to a thread separately. For a short prompt the hand-over costs as much as its tokenization, and in a burst the
thread waits for Python's lock at each prompt.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

MAX_CALLS = 32
"""The most calls of one batch. With all 256 calls of a burst in one batch, the first call would wait for the last."""
MAX_CHARS = 32 << 10
"""The most characters of one batch: some 10 ms of tokenization. A longer call is a batch by itself."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, by position and by name."""
_Waiting = tuple[Call, "asyncio.Future[Any]"]


class ThreadBatches:
    """The calls of one function that wait for the threads of vLLM's renderer.

    Args:
        several: Makes the calls of a batch in a thread, and yields a result or an exception for each, in order. Each caller gets its result
            as soon as `several` yields it, so that a later call that hangs does not delay it.
        executor: The renderer's executor, whose threads vLLM replaces when one hangs (``replace_inner``, which is wrapped here).
        num_chars: Returns the length of the text of a call.
        max_calls: The most calls of one batch.
    """

    def __init__(
        self,
        several: Callable[[Sequence[Call]], Iterable[Any]],
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
        self._handed: dict[Future[None], list[_Waiting]] = {}
        """Batches that ``_threads`` have got and not finished, in order."""
        self._is_due = False
        executor.replace_inner = partial(self._replace, executor.replace_inner)

    def __call__(self, *args: Any, **kwargs: Any) -> "asyncio.Future[Any]":
        """Queue this call, and return the future of its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(((args, kwargs), future))
        if not self._is_due and self._num_free_threads() > 0:
            self._is_due = True
            loop.call_soon(self._hand_over, loop)  # after all calls that come in the same turn of the loop
        return future

    def _num_free_threads(self) -> int:
        if self._threads is not self._executor._inner:
            # vLLM has replaced its threads: a call that hangs is in an old thread, and does not count.
            self._threads, self._handed = self._executor._inner, {}
        return int(self._executor._max_workers) - len(self._handed)

    def _replace(self, replace_inner: Callable[[], None]) -> None:
        """Let vLLM replace its threads. The new threads get the waiting calls, and the batches that no old thread has begun."""
        replace_inner()
        for handed, batch in reversed(self._handed.items()):
            if handed.cancel():
                self._waiting.extendleft(reversed(batch))
        if self._waiting:
            self._hand_over(asyncio.get_running_loop())

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due = False
        while (num_free := self._num_free_threads()) > 0 and (batch := self._next_batch(num_free)):
            try:
                handed = self._executor.submit(self._make, loop, batch)
            except RuntimeError as error:  # vLLM has shut its threads down
                _settle_all(batch, error)
                continue
            self._handed[handed] = batch
            asyncio.wrap_future(handed, loop=loop).add_done_callback(partial(self._done, loop, self._threads, handed, batch))

    def _make(self, loop: asyncio.AbstractEventLoop, batch: Sequence[_Waiting]) -> None:
        """Make the calls of a batch. Called in a thread."""
        results = self._several([call for call, _ in batch])
        for (_, future), result in zip(batch, results, strict=True):
            loop.call_soon_threadsafe(_settle, future, result)

    def _next_batch(self, num_free_threads: int) -> list[_Waiting]:
        """Return a batch for one of the free threads, which share the waiting calls equally."""
        batch, num_chars = list[_Waiting](), 0
        max_calls = min(self._max_calls, -(-len(self._waiting) // num_free_threads))
        while self._waiting and len(batch) < max_calls:
            call, future = self._waiting[0]
            if not future.done():  # its client may have disconnected
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
        handed: Future[None],
        batch: Sequence[_Waiting],
        made: "asyncio.Future[None]",
    ) -> None:
        self._handed.pop(handed, None)
        if made.cancelled():
            if threads is self._threads:  # else `_replace` has taken the batch back
                _settle_all(batch, asyncio.CancelledError())
        elif (error := made.exception()) is not None:
            _settle_all(batch, error)
        self._hand_over(loop)


def tried(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result or the exception, so that one call's error does not end the batch."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return error


def _settle_all(batch: Sequence[_Waiting], error: BaseException) -> None:
    """Give the error to all callers of the batch that have no result yet."""
    for _, future in batch:
        _settle(future, error)


def _settle(future: "asyncio.Future[Any]", result: Any) -> None:
    if future.done():
        return
    if isinstance(result, asyncio.CancelledError):
        future.cancel()
    elif isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)

"""The grammar compiler runs the process that checks grammars (`grammar_process.py`), one for all models of an ingress."""

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

logger = logging.getLogger(__name__)

_AT_ONCE = min(4, os.cpu_count() or 1)
_SPARE_S = 5.0
LATE = "late"
"""The step of a check without a result: its time ran out, or the process ended."""


@dataclass(frozen=True)
class CheckLimits:
    """The limits of compiling one grammar."""

    compile_s: int = 5
    """CPU seconds. A schema of 16 kB with 100 properties takes 0.15 s with a vocabulary of 49,152 tokens."""
    memory_bytes: int = 512 << 20
    """Address space of a check in addition to that of the process from which it is forked. Within the limit of CPU time, no constraint
    took more than 130 MB."""
    in_loop_s: float = 0.1
    """CPU seconds that reading may take, which vLLM does in the event loop, and likewise finding the possible first tokens, which the
    engine does in a step. A schema of 16 kB with 100 properties takes 0.005 s to read."""
    run_s: float = 40.0
    """Seconds that a check may take on a busy machine, whatever its CPU time."""
    wait_s: float = 60.0
    """Seconds that a request waits for its result, including earlier grammars and the start of the process."""


class _Process:
    """One running process, and the checks that it has not answered yet."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._killed = False
        self._ready = asyncio.Event()
        self._tokenizers: dict[str, int] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.reader = asyncio.create_task(self._read(), name="grammar-compiler")

    @classmethod
    async def start(cls, limits: CheckLimits) -> Self:
        command = (sys.executable, "-m", "serve_app.ingress.front_end.grammar_process")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # A session of its own, so that `kill` also ends the children.
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True)
        started = cls(process)
        started._send({"limits": asdict(limits)})
        return started

    @property
    def has_ended(self) -> bool:
        return self._killed or self.reader.done()

    def kill(self) -> None:
        """End the process and its children. Checks that it has not answered have no result."""
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def number(self, tokenizer: str) -> int:
        """Return the number of the tokenizer in the process, and send the process a new tokenizer."""
        if tokenizer not in self._tokenizers:
            self._tokenizers[tokenizer] = len(self._tokenizers)
            self._send({"tokenizer": tokenizer, "number": self._tokenizers[tokenizer]})
        return self._tokenizers[tokenizer]

    async def answer_to(self, check: dict[str, Any], limit_s: float, *, start_s: float) -> dict[str, Any]:
        """Return the answer of the process to the check.

        The step is `LATE` if the process is not ready within ``start_s``, or does not answer within ``limit_s`` after that.
        """
        answer = self._answers[check["id"]] = asyncio.get_running_loop().create_future()
        try:
            self._send(check)
            async with asyncio.timeout(start_s):
                await self._ready.wait()
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:  # a check that runs ends by itself before that
            logger.warning("the process that checks grammars does not answer; it is ended")
            self.kill()
            return {"step": LATE}
        finally:
            del self._answers[check["id"]]

    def _send(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read(self) -> None:
        """Pass on results until the process ends, or writes a line that is no result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                if not (result := json.loads(line)):
                    self._ready.set()
                elif (answer := self._answers.get(result["id"])) is not None and not answer.done():
                    answer.set_result(result)
        except (ValueError, TypeError, KeyError):
            logger.exception("the process that checks grammars has written a line that is no result; it is ended")
        was_ended = self._killed
        self.kill()
        self._process.stdin.close()
        status = await self._process.wait()
        if not was_ended:
            logger.warning("the process that checks grammars ended by itself, with status %s", status)
        self._ready.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result({"step": LATE})


class GrammarCompiler:
    """The owner of the process: it starts the process, starts it again when it has ended, and sends it each tokenizer once.

    Args:
        limits: Default: the limits of the service.
    """

    def __init__(self, limits: CheckLimits | None = None) -> None:
        self.limits = limits or CheckLimits()
        self.places = asyncio.Semaphore(_AT_ONCE)
        """A check holds one place from its beginning to its end, even if the request that wanted it ends earlier."""
        self._starting = asyncio.Lock()
        self._process: _Process | None = None
        self._closed = False
        self._num_checks = 0

    async def prepare(self, tokenizer: str) -> None:
        """Start the process and send it the tokenizer, so that the first request with a grammar need not wait for either."""
        if (process := await self._running()) is not None:
            process.number(tokenizer)

    async def check(self, grammar: Mapping[str, Any], tokenizer: str) -> dict[str, Any]:
        """Return the answer of `grammar_process` for the grammar, or the step `LATE`. The caller holds one of the `places`."""
        process: _Process | None = None
        try:
            process = await self._running()
        except OSError:  # no memory, file descriptor or process is left: the client may try again
            logger.exception("the process that checks grammars could not be started; requests with a new grammar get 503")
        if process is None:
            return {"step": LATE}
        self._num_checks += 1
        check = {**grammar, "id": self._num_checks, "number": process.number(tokenizer)}
        return await process.answer_to(check, self.limits.run_s + _SPARE_S, start_s=self.limits.wait_s)

    async def close(self) -> None:
        """End the process and start no other. Waiting checks have no result."""
        self._closed = True
        async with self._starting:
            if self._process is not None:
                self._process.kill()
                await self._process.reader

    async def _running(self) -> _Process | None:
        async with self._starting:
            if self._closed:
                return None
            if self._process is None or self._process.has_ended:
                self._process = await _Process.start(self.limits)
            return self._process

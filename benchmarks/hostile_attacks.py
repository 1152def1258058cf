"""This program plays one kind of hostile clients against a server of 127.0.0.1, and prints what they met as one line of JSON.

    python -m benchmarks.hostile_attacks KIND --port 8090 --count 1000 [--rate 40]

`benchmarks/hostile.py` starts it in a process of its own, with a low priority, so that the measured clients do not wait for it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from tests.doubles.fleet import MODEL
from tests.hostile.described import Request, described
from tests.hostile.inputs import CHUNKED, END, GET, INPUTS, MUCH, POST, post
from tests.hostile.wire import Input, answers

DOCUMENTED_503 = {"no_replica", "queue_full", "ingress_overloaded", "too_many_connections"}
"""The types of the 503s of docs/api.md. A request that asks for much may meet them; everything else from 500 on is a failure."""
VECTORS = "vectors"
"""The name of the model that makes vectors."""
AT_ONCE = 32
ANSWER_S = 150.0
"""The longest time that a client waits: the ingress gives a body 120 s."""
SLOW_HEAD_S = 2.0
"""Time between two bytes of a slow head."""
SLOW_READER_S = 20.0
"""How long a slow reader keeps its connection. It reads a byte a second."""
SLOW_TOKENS = 64
GIGABYTES_AT_ONCE = 8


@dataclass
class Met:
    """How the requests of a kind ended, and which of them failed."""

    ends: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, end: str, problem: str = "") -> None:
        self.ends[end] += 1
        if problem:
            self.failed.append(problem)


async def paced(calls: Sequence[Callable[[], Awaitable[None]]], *, rate: float, at_once: int) -> None:
    """Begin ``rate`` calls a second, ``at_once`` of them together at most."""
    room, began_at = asyncio.Semaphore(at_once), time.monotonic()

    async def one(call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        finally:
            room.release()

    async with asyncio.TaskGroup() as tg:
        for number, call in enumerate(calls):
            await asyncio.sleep(max(0.0, began_at + number / rate - time.monotonic()))
            await room.acquire()
            tg.create_task(one(call))


async def descriptions(port: int, made: Sequence[Request], met: Met, *, rate: float) -> None:
    """Send the requests that schemathesis made from docs/openapi.json."""
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S, limits=limits, verify=False) as http:

        async def one(request: Request) -> None:
            headers = {"content-type": request.content_type} if request.content_type else {}
            try:
                answer = await http.request(request.method, request.path, content=request.body, headers=headers)
            except httpx.HTTPError as exc:
                met.add(type(exc).__name__, f"{request.name}: {exc!r}")
                return
            met.add(str(answer.status_code), problem_of(request, answer))

        await paced([lambda request=request: one(request) for request in made], rate=rate, at_once=AT_ONCE)  # type: ignore[misc]


def problem_of(request: Request, answer: httpx.Response) -> str:
    """Return what is wrong with an answer, "" if nothing is."""
    if answer.status_code < 500:
        return "" if b'"InternalServerError"' not in answer.content else f"{request.name}: {answer.text[-300:]} in an answer"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if answer.status_code == 503 and answer.json()["error"]["type"] in DOCUMENTED_503 | {"overloaded_error"}:
            return ""
    return f"{request.name}: {answer.status_code} {answer.text[:300]} for {request.body[:500]!r}"


async def inputs(port: int, count: int, met: Met, *, rate: float) -> None:
    """Send the table of tests/hostile/inputs.py."""

    async def one(given: Input) -> None:
        try:
            got = await answers(port, given, limit_s=ANSWER_S)
        except (TimeoutError, OSError) as exc:
            met.add(type(exc).__name__, f"{given.name}: {exc!r}")
            return
        met.add("as expected" if got == (given.statuses, given.stays) else "otherwise", _differs(given, got))

    await paced([lambda given=given: one(given) for given in INPUTS[:count]], rate=rate, at_once=AT_ONCE)  # type: ignore[misc]


def _differs(given: Input, got: tuple[tuple[int, ...], bool]) -> str:
    return "" if got == (given.statuses, given.stays) else f"{given.name}: {got}, not {(given.statuses, given.stays)}"


async def slow_heads(port: int, count: int, met: Met, *, rate: float) -> None:
    """Send heads without end, a byte every two seconds; the ingress must give each up."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began_at, ended = time.monotonic(), asyncio.create_task(reader.read())
        try:
            writer.write(GET + b"X: ")
            while not ended.done() and time.monotonic() - began_at < ANSWER_S:
                with contextlib.suppress(ConnectionError):
                    writer.write(b"y")
                    await writer.drain()
                await asyncio.wait([ended], timeout=SLOW_HEAD_S)
            got = (
                ended.result()[9:12].decode()
                if ended.done() and ended.exception() is None
                else "reset"
                if ended.done()
                else "kept"
            )
        finally:
            ended.cancel()
            writer.transport.abort()
        met.add(got, "" if got in ("408", "reset") else f"slow head: {got} after {time.monotonic() - began_at:.0f} s")

    await paced([one] * count, rate=rate, at_once=count)


async def slow_readers(port: int, count: int, met: Met, *, rate: float) -> None:
    """Ask for streams, and read a byte a second of each through the smallest buffer."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": SLOW_TOKENS, "stream": True, "ignore_eos": True}

    async def one() -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        sock.setblocking(False)
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, post(json.dumps(body).encode()))
            until, got = time.monotonic() + SLOW_READER_S, b""
            while time.monotonic() < until:
                got += await asyncio.wait_for(loop.sock_recv(sock, 1), ANSWER_S)
                await asyncio.sleep(1)
        except (TimeoutError, OSError) as exc:
            met.add(type(exc).__name__, f"slow reader: {exc!r}")
            return
        finally:
            sock.close()
        status = got[9:12].decode()
        met.add(status, "" if status in ("200", "503") else f"slow reader: {got!r}")

    await paced([one] * count, rate=rate, at_once=count)


async def gigabytes(port: int, count: int, met: Met, *, rate: float) -> None:
    """Send bodies of 1 GB, announced and in chunks in turn, as fast as the ingress takes them.

    After its 413, an ingress reads and drops the rest for a few seconds; at the speed of the loopback interface this may be all of it.
    """
    part = bytes(1 << 20)

    async def one(number: int) -> None:
        is_chunked = number % 2
        head = POST + (CHUNKED if is_chunked else b"Content-Length: %d\r\n" % MUCH) + END
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        answer, num_bytes = asyncio.create_task(reader.read(1 << 16)), 0
        try:
            writer.write(head)
            while num_bytes < MUCH:
                writer.write(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
                await asyncio.wait_for(writer.drain(), ANSWER_S)
                num_bytes += len(part)
        except (TimeoutError, OSError):
            pass  # cut by the ingress
        finally:
            await asyncio.wait([answer], timeout=5)
            got = answer.result()[9:12].decode() if answer.done() and answer.exception() is None else "reset"
            answer.cancel()
            writer.transport.abort()
        met.add(got, "" if got in ("413", "reset") else f"1 GB: {got} after {num_bytes >> 20} MiB")

    await paced([lambda n=n: one(n) for n in range(count)], rate=rate, at_once=GIGABYTES_AT_ONCE)  # type: ignore[misc]


KINDS = {"inputs": inputs, "slow heads": slow_heads, "slow readers": slow_readers, "bodies of 1 GB": gigabytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["descriptions", *KINDS])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--rate", type=float, default=40.0, help="new requests a second")
    arguments = parser.parse_args()
    os.nice(10)
    met = Met()
    if arguments.kind == "descriptions":
        made = described(arguments.count, model=MODEL, vectors=VECTORS)
        print("ready", flush=True)
        asyncio.run(descriptions(arguments.port, made, met, rate=arguments.rate))
    else:
        print("ready", flush=True)
        asyncio.run(KINDS[arguments.kind](arguments.port, arguments.count, met, rate=arguments.rate))
    print(json.dumps({"ends": met.ends, "failed": met.failed}))


if __name__ == "__main__":
    main()

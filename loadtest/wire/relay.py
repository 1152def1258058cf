"""The relay is a TCP proxy between load and target, in a process of its own, whose connections can be cut.

``python -P -m loadtest.wire.relay HOST PORT`` prints its port at 127.0.0.1 and executes lines of its standard input:
``cut SECONDS`` resets every connection, and every new connection for that time. The process ends when its standard input ends.
"""

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

from loadtest.errors import UsageError

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing sends RST
_READ_BYTES = 65536
_CLOSE_LIMIT_S = 2.0


class Relay:
    """A relay as a child process; use its ``url`` instead of the target's. The relay adds less than 0.1 ms each way.

    Raises:
        UsageError: The target is not plain http: inside TLS the name in the certificate would not fit.
    """

    def __init__(self, target_url: str) -> None:
        parts = urlsplit(target_url)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError("faults", f"cut-link needs a target with http://, got {target_url!r}")
        command = [sys.executable, "-P", "-m", "loadtest.wire.relay", parts.hostname, str(parts.port or 80)]
        # A session of its own: a Ctrl-C at the terminal must not end the relay, because the drain needs it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders = self._process.stdin
        port = self._process.stdout.readline().strip()
        if not port:
            raise UsageError("faults", f"the relay to {target_url} did not start")
        self.url = parts._replace(netloc=f"127.0.0.1:{port}").geturl()

    def cut(self, for_s: float) -> None:
        """Reset all connections, and each new connection for ``for_s`` seconds.

        Raises:
            OSError: The relay has ended.
        """
        self._orders.write(f"cut {for_s}\n")
        self._orders.flush()

    def close(self) -> None:
        self._process.communicate()


class _Server:
    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._open: set[asyncio.StreamWriter] = set()
        self._cut_until = 0.0

    def cut(self, for_s: float) -> None:
        self._cut_until = asyncio.get_running_loop().time() + for_s
        for writer in self._open:
            _reset(writer)

    async def close(self) -> None:
        """Reset all connections. Their tasks then end by themselves; asyncio would print a traceback for each cancelled task."""
        self.cut(_CLOSE_LIMIT_S)
        deadline = asyncio.get_running_loop().time() + _CLOSE_LIMIT_S
        while self._open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until both sides have ended; a failure on one side resets the other side."""
        if asyncio.get_running_loop().time() < self._cut_until:
            return _reset(writer)
        ends = [writer]
        self._open.add(writer)
        end: Callable[[asyncio.StreamWriter], None] = _reset
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._address)
            ends.append(far_writer)
            self._open.add(far_writer)
            async with asyncio.TaskGroup() as tg:
                tg.create_task(_pump(reader, far_writer))
                tg.create_task(_pump(far_reader, writer))
            end = asyncio.StreamWriter.close
        except* OSError:
            pass  # refused, or reset by either side
        finally:
            for each in ends:
                self._open.discard(each)
                end(each)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_READ_BYTES):
        writer.write(data)
        await writer.drain()
    if not writer.is_closing():
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # closed already
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def _main(host: str, port: int) -> None:
    relay = _Server(host, port)
    listener = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    print(listener.sockets[0].getsockname()[1], flush=True)
    while line := await orders.readline():
        relay.cut(float(line.split()[1]))
    listener.close()
    await relay.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2])))

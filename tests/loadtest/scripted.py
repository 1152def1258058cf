"""This module has an HTTP server whose connections each follow a script of the test, and a client of that server."""

import datetime
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from loadtest.records import Row, ScheduledRequest
from loadtest.wire.client import Asked, Client
from loadtest.wire.target import Target

Script = Callable[["Peer"], None]


class Peer:
    """The server's end of one connection."""

    def __init__(self, conn: socket.socket) -> None:
        self.conn = conn
        self._file = conn.makefile("rb")

    def read_request(self) -> tuple[str, dict[str, str], bytes]:
        """Return the request line, the headers in lower case and the body; an empty line if the client has disconnected."""
        line = self._file.readline().decode().strip()
        headers = dict(
            field.decode().strip().lower().split(": ", 1) for field in iter(lambda: self._file.readline().strip(), b"")
        )
        return line, headers, self._file.read(int(headers.get("content-length", "0")))

    def gone(self) -> bool:
        """Wait until the client closes its end."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True

    def answer(self, head: str, *body: bytes) -> None:
        """Read a request, then send what is given."""
        self.read_request()
        self.send(head, *body)

    def send(self, head: str, *body: bytes) -> None:
        self.conn.sendall(head.replace("\n", "\r\n").encode() + b"\r\n" + b"".join(body))


class Server:
    """Runs ``scripts[i]`` on the i-th connection, each in a thread, and closes it afterwards."""

    def __init__(self, *scripts: Script, tls: ssl.SSLContext | None = None) -> None:
        self.errors: list[BaseException] = []
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, args=(scripts,), daemon=True)]
        self._threads[0].start()

    def _accept(self, scripts: tuple[Script, ...]) -> None:
        for script in scripts:
            conn = self._listener.accept()[0]
            self._threads.append(threading.Thread(target=self._serve, args=(script, conn), daemon=True))
            self._threads[-1].start()
        self._listener.close()

    def _serve(self, script: Script, conn: socket.socket) -> None:
        if self._tls is not None:
            try:
                conn = self._tls.wrap_socket(conn, server_side=True)
            except ssl.SSLError:  # the client refused
                conn.close()
                return
        with conn:
            try:
                script(peer := Peer(conn))
                peer._file.close()
            except Exception as exc:
                self.errors.append(exc)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=30)
            assert not thread.is_alive()
        assert self.errors == []


@contextmanager
def client_of(*scripts: Script, **target: str) -> Iterator[Client]:
    """A client of a server with these scripts; at the end all of them must have run to their end."""
    server = Server(*scripts)
    client = Client(Target(server.url, **target), worker=3, epoch=time.perf_counter(), id_prefix="lt-0badcafe-")
    yield client
    client.close()
    server.join()


def asked(*, id: int = 7, path: str = "/v1/completions", stream: bool = True, **kwargs: Any) -> Asked:
    request = ScheduledRequest(id=id, due_s=0.0, cls="default", input_tokens=3, output_tokens=2)
    return Asked(request=request, path=path, stream=stream, **{"timeout_s": 30.0, "body": b'{"x":1}', **kwargs})


def ask(*scripts: Script, **kwargs: Any) -> Row:
    with client_of(*scripts) as client:
        return client.ask(asked(**kwargs), due_s=0.0)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"id": "cmpl-9", "choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
SSE = "HTTP/1.1 200 OK\nContent-Type: text/event-stream\n"
CHUNKED = SSE + "Transfer-Encoding: chunked\n"
WHOLE = json.dumps({"id": "cmpl-1", "choices": [{"text": "hi"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def good(peer: Peer) -> None:
    peer.answer(CHUNKED, chunk(event("a")), chunk(event("b") + DONE), b"0\r\n\r\n")


def certificate_for_loopback(folder: Path) -> Path:
    """Return a PEM file with a key and a certificate that signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    certificate = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    both = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + certificate.public_bytes(pem)
    (folder / "both.pem").write_bytes(both)
    return folder / "both.pem"

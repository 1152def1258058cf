"""This table has what hostile, damaged and mistaken clients send over a socket, and the answers that they must get.

What tests/ingress/test_listener.py (heads that are too long or too slow, trailers, pipelines without end, clients that do not read) and
test_upgrades.py (offers of HTTP/2 and websockets, tunnels) show is not repeated here. `make hostile` sends all of it to a fleet.
"""

import gzip
import json
from collections.abc import Iterator

from tests.doubles.fleet import MODEL
from tests.hostile.wire import Input

PLAIN = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2}).encode()
GET = b"GET /healthz HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(PLAIN)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(PLAIN), PLAIN)
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"
END = b"\r\n"
MUCH = 1 << 30


def post(body: bytes, *fields: bytes) -> bytes:
    """Return a whole request for a completion with this body and these further lines in its head."""
    return POST + b"".join(field + END for field in fields) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _two_lengths() -> Iterator[Input]:
    """Yield requests whose end can be read in two ways. A proxy that reads the other way would let a second request through."""
    for name, head, body in (
        ("length and chunks", LENGTH + CHUNKED, CHUNKS),
        ("chunks and length", CHUNKED + LENGTH, CHUNKS),
        ("a length of 0 and chunks", b"Content-Length: 0\r\n" + CHUNKED, CHUNKS),
        ("two lengths", LENGTH + b"Content-Length: 0\r\n", PLAIN),
        ("the same length twice", LENGTH * 2, PLAIN),
        ("two lengths in one field", b"Content-Length: %d, 0\r\n" % len(PLAIN), PLAIN),
        ("the same length twice in one field", b"Content-Length: %d, %d\r\n" % (len(PLAIN), len(PLAIN)), PLAIN),
        ("a length with a sign", b"Content-Length: +%d\r\n" % len(PLAIN), PLAIN),
        ("a negative length", b"Content-Length: -1\r\n", PLAIN),
        ("a hexadecimal length", b"Content-Length: 0x%x\r\n" % len(PLAIN), PLAIN),
        ("a length with a space inside", b"Content-Length: 4 2\r\n", PLAIN),
        ("a length with an underscore", b"Content-Length: 4_2\r\n", PLAIN),
        ("an empty length", b"Content-Length: \r\n", PLAIN),
        ("a length beyond 64 bits", b"Content-Length: 18446744073709551617\r\n", PLAIN),
        ("a space before the colon of the length", b"Content-Length : %d\r\n" % len(PLAIN), PLAIN),
        ("a space before the colon of the encoding", b"Transfer-Encoding : chunked\r\n", CHUNKS),
        ("an encoding behind chunked", b"Transfer-Encoding: chunked, identity\r\n", CHUNKS),
        ("chunked twice", b"Transfer-Encoding: chunked, chunked\r\n", CHUNKS),
        ("two encodings", CHUNKED + b"Transfer-Encoding: identity\r\n", CHUNKS),
        ("an unknown encoding", b"Transfer-Encoding: xchunked\r\n", CHUNKS),
        ("an encoding in quotes", b'Transfer-Encoding: "chunked"\r\n', CHUNKS),
        ("an encoding behind a vertical tab", b"Transfer-Encoding: \x0bchunked\r\n", CHUNKS),
        ("a folded encoding", b"Transfer-Encoding:\r\n chunked\r\n", CHUNKS),
    ):
        yield Input(name, (POST + head + END + body + HIDDEN,), (400,))


def _chunks() -> Iterator[Input]:
    for name, body in (
        ("no size", b"\r\nab\r\n0\r\n\r\n"),
        ("a size that is no number", b"zz\r\nab\r\n0\r\n\r\n"),
        ("a negative size", b"-2\r\nab\r\n0\r\n\r\n"),
        ("a size with 0x", b"0x2\r\nab\r\n0\r\n\r\n"),
        ("a size beyond 64 bits", b"10000000000000002\r\nab\r\n0\r\n\r\n"),
        ("a size with a space before it", b" 2\r\nab\r\n0\r\n\r\n"),
        ("a chunk that is longer than its size", b"2\r\nabc\r\n0\r\n\r\n"),
        ("a chunk without an end of line", b"2\r\nab0\r\n\r\n"),
        ("a chunk whose line ends without CR", b"2\nab\n0\n\n"),
        ("an extension with a line feed", b"2;a\nb\r\nab\r\n0\r\n\r\n"),
        ("an extension with NUL", b"2;a\0\r\nab\r\n0\r\n\r\n"),
        ("a trailer without a colon", b"2\r\n{}\r\n0\r\nab\r\n\r\n"),
    ):
        yield Input(f"chunks: {name}", (POST + CHUNKED + END + body + HIDDEN,), (400,))
    yield Input("chunks: a length in the trailer", (POST + CHUNKED + END + CHUNKS[:-2] + b"Content-Length: 3\r\n\r\n",), (400,))
    yield Input(
        "chunks: an extension of 1 MB", (POST + CHUNKED + END + b"2;" + b"a" * (1 << 20) + b"\r\n{}\r\n0\r\n\r\n",), (431,)
    )
    yield Input(
        "chunks: a size of a million digits", (POST + CHUNKED + END + b"0" * (1 << 20) + b"2\r\n{}\r\n0\r\n\r\n",), (431,)
    )
    yield Input(
        "chunks: one byte each", (POST + CHUNKED + END, *(b"1\r\n%c\r\n" % byte for byte in PLAIN), b"0\r\n\r\n"), (200,), True
    )


def _heads() -> Iterator[Input]:
    for name, head in (
        ("NUL in a value", GET + b"X: a\0b\r\n\r\n"),
        ("NUL in a name", GET + b"X\0Y: a\r\n\r\n"),
        ("CR in a value", GET + b"X: a\rY: b\r\n\r\n"),
        ("a control character in a value", GET + b"X: a\x01b\r\n\r\n"),
        ("a space in a name", GET + b"X Y: a\r\n\r\n"),
        ("an empty name", GET + b": a\r\n\r\n"),
        ("a line without a colon", GET + b"abc\r\n\r\n"),
        ("a line that continues another", GET + b"X: a\r\n b\r\n\r\n"),
        ("a first line that begins with a space", b" " + GET + END),
        ("a field before the first line", b"X: y\r\n" + GET + END),
        ("version 9.9", b"GET /healthz HTTP/9.9\r\nHost: a\r\n\r\n"),
        ("another protocol", b"GET /healthz ICY/1.1\r\nHost: a\r\n\r\n"),
        ("an unknown method", b"BREW /healthz HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("a method in lower case", b"get /healthz HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("a tab behind the method", b"GET\t/healthz HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("HTTP/2 from the first byte", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\x12\4\0\0\0\0\0"),
        ("TLS", bytes.fromhex("16030100c8010000c403037a") + bytes(200)),
        ("SSH", b"SSH-2.0-OpenSSH_9.7\r\n"),
        ("RDP", bytes.fromhex("030000130ee000000000000100080003000000")),
        ("SOCKS", b"\x05\x01\x00"),
        ("zeros", bytes(4096)),
        ("a target that is no path", b"GET healthz HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("a target with a damaged address", b"GET http://[::1/healthz HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("a target with bytes beyond ASCII", b"GET /v1/models/\xff\xc3\xa4 HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("a line feed in the target", b"GET /health\nz HTTP/1.1\r\nHost: a\r\n\r\n"),
    ):
        yield Input(f"head: {name}", (head + HIDDEN,), (400,))
    yield Input("head: lines that end without CR", (GET.replace(b"\r", b"") + b"\n",), (400,))
    yield Input("head: a thousand fields", (GET + b"".join(b"X%d: y\r\n" % n for n in range(1000)) + END,), (200,), True)
    yield Input("head: a thousand cookies", (GET + b"Cookie: a=b\r\n" * 1000 + END,), (200,), True)
    yield Input("head: a target of 60 kB", (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",), (404,), True)
    yield Input("head: a query of 60 kB", (b"GET /healthz?" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",), (200,), True)
    yield Input("head: empty lines before it", (END * 50 + GET + END,), (200,), True)
    yield Input("head: without end", (GET,), (408,))
    yield Input("head: a byte each", tuple(b"%c" % byte for byte in GET + END), (200,), True)
    yield Input("head: cut off", (GET,), leaves=True)
    yield Input("head: an id of a request with bytes beyond ASCII", (post(PLAIN, b"X-Request-Id: \xe4\xf6\xff"),), (200,), True)
    yield Input("head: an id of a request of 60 kB", (post(PLAIN, b"X-Request-Id: " + b"a" * 60_000),), (400,), True)
    for name, version in (("HTTP/1.0", b" HTTP/1.0"), ("HTTP/2.0", b" HTTP/2.0"), ("no version", b"")):
        yield Input(f"head: {name}", (b"GET /healthz" + version + b"\r\n\r\n" + HIDDEN,), (200,))
    yield Input("head: no host", (b"GET /healthz HTTP/1.1\r\n\r\n",), (200,), True)
    yield Input("head: two hosts", (GET + b"Host: b\r\n\r\n",), (200,), True)
    yield Input("head: a target of *", (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",), (404,), True)
    yield Input("head: contradicting Connection", (GET + b"Connection: close, keep-alive\r\n\r\n",), (200,))


def _targets() -> Iterator[Input]:
    for target, status in (
        (b"http://elsewhere/healthz", 200),
        (b"http://user:password@elsewhere:1/healthz", 200),
        (b"/%68ealthz", 200),
        (b"/v1%2fmodels", 200),
        (b"/healthz%00", 404),
        (b"/healthz%0d%0aX: y", 400),
        (b"/healthz%0d%0aX:y", 404),
        (b"/%zz", 404),
        (b"/%ff%fe", 404),
        (b"//healthz", 404),
        (b"/./healthz", 404),
        (b"/v1/../healthz", 404),
        (b"/v1/models/..%2f..%2fmetrics", 404),
        (b"/v1/models/%00", 404),
        (b"/healthz#fragment", 200),
        (b"/HEALTHZ", 404),
        (b"/docs", 404),
        (b"/openapi.json", 404),
    ):
        request = b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n"
        yield Input(f"target: {target.decode()}", (request,), (status,), status != 400)
    for method in (b"PUT", b"DELETE", b"TRACE", b"OPTIONS", b"PROPFIND"):
        request = method + b" /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n"
        yield Input(f"method: {method.decode()}", (request,), (405,), True)


def _bodies() -> Iterator[Input]:
    deep = b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for name, body in (
        ("empty", b""),
        ("no JSON", b"abc"),
        ("cut JSON", PLAIN[:-1]),
        ("100,000 brackets", deep),
        ("100,000 objects in each other", b'{"a":' * 100_000),
        ("a number of 5,000 digits", b'{"model": "tiny", "prompt": "hi", "seed": ' + b"9" * 5000 + b"}"),
        ("an exponent of a million", b'{"model": "tiny", "prompt": "hi", "temperature": 1e1000000}'),
        ("bytes that are no UTF-8", b'{"model": "tiny", "prompt": "\xff\xfe"}'),
        ("half a character", b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": 2}'),
        ("two values", PLAIN + PLAIN),
        ("a list", b"[" + PLAIN + b"]"),
        ("gzip", gzip.compress(PLAIN)),
        ("a gzip of 100 MB", gzip.compress(bytes(100_000_000), 1)),
        ("a form", b"model=tiny&prompt=hi"),
    ):
        encoding = [b"Content-Encoding: gzip"] if "gzip" in name else []
        yield Input(f"body: {name}", (post(body, *encoding),), (400,), True)
    for name, body in (
        ("a key of 1 MB", b'{"' + b"k" * 1_000_000 + b'": 1, ' + PLAIN[1:]),
        ("a key given 10,000 times", b"{" + b'"temperature": 1, ' * 10_000 + PLAIN[1:]),
        ("a key with NUL", b'{"\\u0000": 1, ' + PLAIN[1:]),
        ("a byte order mark", b"\xef\xbb\xbf" + PLAIN),
        ("UTF-16", PLAIN.decode().encode("utf-16")),
    ):
        yield Input(f"body: {name}", (post(body),), (200,), True)
    for name, kind, status in (
        ("multipart", b"multipart/form-data; boundary=x", 400),
        ("text", b"text/plain", 400),
        ("a damaged type", b"application/json; charset=\xff", 200),
        ("a type of 60 kB", b"application/json; a=" + b"b" * 60_000, 200),
    ):
        head = POST.replace(b"application/json", kind) + LENGTH + END
        yield Input(f"body: {name}", (head + PLAIN,), (status,), True)
    announced = POST + b"Content-Length: %d\r\n" % MUCH
    yield Input("body: 1 GB announced", (announced + END,), (413,))
    yield Input("body: 1 GB announced, with Expect", (announced + b"Expect: 100-continue\r\n\r\n",), (413,))
    yield Input("body: 32 MB in chunks", (POST + CHUNKED + END + (b"100000\r\n" + bytes(1 << 20) + END) * 32,), (413,))
    yield Input("body: one chunk of 1 GB announced", (POST + CHUNKED + END + b"40000000\r\n", bytes(12 << 20)), (413,))
    yield Input("body: without end", (POST + LENGTH + END + PLAIN[:-1],), (408,))
    yield Input("body: cut off", (POST + LENGTH + END + PLAIN[:-1],), leaves=True)
    yield Input("body: cut off in a chunk", (POST + CHUNKED + END + CHUNKS[:9],), leaves=True)
    yield Input("body: of a GET", (GET + LENGTH + END + PLAIN,), (200,), True)
    yield Input("body: Expect, and no wait", (POST + LENGTH + b"Expect: 100-continue\r\n\r\n" + PLAIN,), (200,), True)
    yield Input("body: an unknown Expect", (POST + LENGTH + b"Expect: coffee\r\n\r\n" + PLAIN,), (200,), True)
    yield Input("body: the client leaves before its answer", (post(PLAIN),), leaves=True)


def _rows() -> Iterator[Input]:
    """Yield several requests in a row, sent before the first answer."""
    good = post(PLAIN)
    yield Input("row: three good ones", (good * 3,), (200, 200, 200), True)
    # The 400 stands for both: the bytes come while the first request is being answered, and the connection ends.
    yield Input("row: a bad one between good ones", (good + b"BAD\r\n\r\n" + good,), (400,))
    yield Input("row: a good one behind one that closes", (post(PLAIN, b"Connection: close") + HIDDEN,), (200,))
    yield Input("row: GETs and POSTs mixed", ((GET + END + good + HIDDEN) * 10,), (200, 200, 404) * 10, True)
    yield Input("row: a refused body and a good one", (post(b"abc") + good,), (400, 200), True)
    yield Input("row: split inside of a head", (good + POST[:30], post(PLAIN)[30:]), (200, 200), True)
    yield Input("row: nothing", (b"",), leaves=True)


INPUTS = [given for kind in (_two_lengths, _chunks, _heads, _targets, _bodies, _rows) for given in kind()]

"""These tests run `loadtest.wire.client` over real sockets against servers that follow a script. T17 of the self-tests."""

import gc
import gzip
import hashlib
import re
import resource
import socket
import threading
import time
from typing import Any

import gevent
import gevent.monkey
import pytest

from loadtest.errors import UsageError
from loadtest.wire.client import Client, Heard
from loadtest.wire.http_answer import HttpAnswer
from loadtest.wire.target import Target
from tests.loadtest.scripted import (
    CHUNKED,
    DONE,
    SSE,
    WHOLE,
    Peer,
    Server,
    ask,
    asked,
    chunk,
    client_of,
    event,
    good,
)


def test_what_goes_out_and_what_a_good_row_holds() -> None:
    seen: list[tuple[str, dict[str, str], bytes]] = []

    def script(peer: Peer) -> None:
        seen.append(peer.read_request())
        peer.send(CHUNKED, chunk(event("a")), chunk(event("b") + DONE), b"0\r\n\r\n")

    with client_of(script, api_key="secret") as client:
        row = client.ask(asked(), due_s=-1.0)
    assert seen[0][0] == "POST /v1/completions HTTP/1.1"
    sent = {"x-request-id": "lt-0badcafe-7", "authorization": "bearer secret", "accept-encoding": "identity"}
    assert sent.items() <= seen[0][1].items()
    assert seen[0][2] == b'{"x":1}'
    assert (row.id, row.worker, row.due_s, row.state, row.reason, row.status) == (7, 3, -1.0, "ok", "", 200)
    times = [row.sent_s, row.connected_s, row.headers_s, row.first_s, row.last_s, row.end_s]
    known = [t for t in times if t is not None]
    assert len(known) == 6
    assert known == sorted(known)
    assert sum(tokens for _, tokens in row.chunks) == 2
    assert [row.chunks[0][0], row.chunks[-1][0]] == pytest.approx([(t - known[0]) * 1000 for t in known[3:5]], abs=0.002)
    assert (row.text, row.text_sha256, row.server_id) == ("ab", hashlib.sha256(b"ab").hexdigest(), "cmpl-9")


def test_the_host_is_the_targets_own_name_behind_a_relay_too() -> None:
    seen: list[str] = []

    def script(peer: Peer) -> None:
        seen.append(peer.read_request()[1]["host"])
        peer.send(CHUNKED, chunk(event("a") + DONE), b"0\r\n\r\n")

    with client_of(script) as client:
        client.ask(asked(), due_s=0.0)
    with client_of(script, named="models.example:8000") as client:
        client.ask(asked(), due_s=0.0)
    assert [name.partition(":")[0] for name in seen] == ["127.0.0.1", "models.example"]
    assert seen[1] == Target("http://models.example:8000/v1").authority


def test_an_answer_is_over_when_its_body_has_ended_however_long_after_done() -> None:
    heard: list[Heard] = []
    ended_at: list[float] = []

    def script(peer: Peer) -> None:
        peer.answer(CHUNKED, chunk(event("a") + DONE))
        threading.Event().wait(0.05)
        ended_at.append(time.perf_counter())
        peer.conn.sendall(b"0\r\n\r\n")

    with client_of(script) as client:
        row = client.ask(asked(), due_s=0.0, hear=heard.append)
        assert row.end_s is not None
        assert (row.state, heard[0].parsed.text) == ("ok", "a")
        assert heard[0].over_s >= max(row.end_s, ended_at[0] - client.epoch - 1e-6)


JSON_503 = "HTTP/1.1 503 Service Unavailable\nContent-Type: application/json\nRetry-After: 7\nContent-Length: 30\n"
DATES = "Date: Thu, 20 Nov 2025 10:00:00 GMT\nRetry-After: Thu, 20 Nov 2025 10:00:30 GMT\n"
HTML = "Content-Type: text/html\nContent-Length: 12\n"


@pytest.mark.parametrize(
    ("head", "body", "reason", "retry_after_s"),
    [
        (JSON_503, b'{"error": {"message": "full"}}', "503: full", 7.0),
        (f"HTTP/1.1 429 Too Many\n{DATES}Content-Length: 0\n", b"", "429: ", 30.0),
        ("HTTP/1.1 429 Too Many\nRetry-After: soon\nContent-Length: 0\n", b"", "429: ", None),
        (
            "HTTP/1.1 307 X\nLocation: /v2\nContent-Length: 0\n",
            b"",
            "307: redirects to /v2; name the final address as the target",
            None,
        ),
        (f"HTTP/1.1 200 OK\n{HTML}", b"<html> hi >\n", "200: asked for a stream, got text/html: <html> hi >", None),
        (f"HTTP/1.1 502 Bad Gateway\n{HTML}", b"<h1>bad</h1>", "502: <h1>bad</h1>", None),
    ],
)
def test_other_answers_are_http_errors_and_say_what_came(
    head: str, body: bytes, reason: str, retry_after_s: float | None
) -> None:
    row = ask(lambda peer: peer.answer(head, body))
    assert (row.state, row.reason, row.retry_after_s) == ("http_error", reason, retry_after_s)
    assert row.status == int(reason[:3])
    assert (row.first_s, row.chunks) == (None, [])


def test_a_server_that_refuses_a_field_of_ours_is_answered_with_the_key_that_leaves_it_out() -> None:
    body = b'{"error": {"message": "Unknown parameter: \'stream_options.continuous_usage_stats\'."}}'
    row = ask(lambda peer: peer.answer(f"HTTP/1.1 400 Bad Request\nContent-Length: {len(body)}\n", body))
    assert row.state == "http_error"
    assert row.reason == (
        "400: Unknown parameter: 'stream_options.continuous_usage_stats'.; "
        "the key `usage: final` of the scenario's request class leaves this field out"
    )


def test_gzip_is_refused() -> None:
    body = gzip.compress(event("a") + DONE)
    row = ask(lambda peer: peer.answer(f"{SSE}Content-Encoding: gzip\nContent-Length: {len(body)}\n", body))
    assert (row.state, row.status, "Content-Encoding gzip" in row.reason) == ("http_error", 200, True)


def test_a_stream_and_a_whole_body_are_not_taken_for_each_other() -> None:
    whole = f"HTTP/1.1 200 OK\nContent-Type: application/json\nContent-Length: {len(WHOLE)}\n"
    assert ask(lambda peer: peer.answer(whole, WHOLE)).state == "http_error"
    assert ask(lambda peer: peer.answer(SSE, event("a"), DONE), stream=False).state == "http_error"


def test_something_that_is_not_http_is_named() -> None:
    row = ask(lambda peer: peer.answer("SSH-2.0-OpenSSH_9.6"))
    assert (row.state, row.status, row.reason.startswith("not HTTP: ")) == ("http_error", 0, True)


def test_a_chunked_trailer_and_the_end_of_an_http_1_0_body_end_the_answer() -> None:
    trailer = b"0\r\nServer-Timing: x\r\n\r\n"

    def script(peer: Peer) -> None:
        peer.answer(CHUNKED, chunk(event("a") + DONE)[:9], chunk(event("a") + DONE)[9:], trailer)
        peer.answer(SSE.replace("1.1", "1.0"), event("b"), DONE)

    with client_of(script, lambda peer: peer.answer("HTTP/1.0 200 OK\n", WHOLE)) as client:
        rows = [client.ask(asked(stream=stream), due_s=0.0) for stream in (True, True, False)]
    assert [(row.state, row.text) for row in rows] == [("ok", "a"), ("ok", "b"), ("ok", "hi")]


def test_an_answer_to_a_body_that_nobody_read_is_seen() -> None:
    too_large = "HTTP/1.1 413 Too Large\nContent-Length: 9\n"
    row = ask(lambda peer: peer.send(too_large, b"too large"), body=bytes(32 * 1024 * 1024))
    assert (row.state, row.reason) == ("http_error", "413: too large")


def test_an_error_event_and_a_cut_stream_keep_what_came_before() -> None:
    error = b'data: {"error": {"message": "engine died"}}\n\n'
    row = ask(lambda peer: peer.answer(CHUNKED, chunk(event("a") + error + DONE), b"0\r\n\r\n"))
    assert (row.state, row.reason, row.text) == ("stream_error", "engine died", "a")
    row = ask(lambda peer: peer.answer(CHUNKED, chunk(event("a")), b"0\r\n\r\n"))
    assert (row.state, row.reason, row.text) == ("truncated", "the stream ended without [DONE]", "a")
    row = ask(lambda peer: peer.answer(CHUNKED, chunk(event("a"))))
    assert (row.state, row.reason, row.text) == ("truncated", "the connection ended inside the answer", "a")
    row = ask(lambda peer: peer.answer(CHUNKED, chunk(event("a") + DONE)))  # all was said
    assert (row.state, row.text) == ("ok", "a")


def run_until(reached: threading.Event) -> None:
    """Let greenlets run until a server's thread has come to a point."""
    while not reached.is_set():
        gevent.sleep(0.001)


def stuck(peer: Peer) -> None:
    peer.answer(CHUNKED, chunk(event("a")))
    assert peer.gone()


def test_a_timeout_counts_from_due_and_a_cancellation_from_sending_and_both_close_the_connection() -> None:
    with client_of(stuck, stuck) as client:
        late = client.ask(asked(timeout_s=106.0), due_s=-100.0)
        gone = client.ask(asked(cancel_after_s=1.0), due_s=0.0)
    assert (late.state, late.reason) == ("timeout", "no complete answer within 106 s after due")
    assert (gone.state, gone.reason) == ("cancelled", "the client disconnected after 1 s")
    for row in (late, gone):
        assert (row.status, row.text, len(row.chunks)) == (200, "a", 1)
        assert row.end_s is not None
        assert row.last_s is not None
        assert row.end_s > row.last_s


def test_an_answer_that_was_complete_too_late_is_a_timeout_even_when_no_timer_could_run() -> None:
    asking, busy, answered = threading.Event(), threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.read_request()
        asking.set()
        assert busy.wait(30)
        peer.send(CHUNKED, chunk(event("a") + DONE), b"0\r\n\r\n")
        answered.set()

    with client_of(script) as client:
        job = gevent.spawn(client.ask, asked(timeout_s=2.0), due_s=0.0)
        run_until(asking)
        busy.set()
        assert answered.wait(30)
        deadline = time.perf_counter() + 2.0
        while time.perf_counter() < deadline:
            pass
        assert job.get(timeout=30).state == "timeout"


def test_the_timeout_of_a_caller_goes_through() -> None:
    with client_of(stuck) as client, pytest.raises(gevent.Timeout), gevent.Timeout(0.5):
        client.ask(asked(), due_s=0.0)


def test_a_killed_greenlet_still_returns_its_row() -> None:
    asking = threading.Event()

    def script(peer: Peer) -> None:
        peer.read_request()
        asking.set()
        assert peer.gone()

    with client_of(script) as client:
        job = gevent.spawn(client.ask, asked(), due_s=0.0)
        run_until(asking)
        job.kill()
        assert (job.value.state, job.value.reason) == ("timeout", "unfinished when the drain ended")


def test_requests_that_end_early_leave_nothing_for_the_garbage_collector() -> None:
    asking = threading.Event()

    def last(peer: Peer) -> None:
        peer.read_request()
        asking.set()
        assert peer.gone()

    def answers() -> int:
        return sum(isinstance(item, HttpAnswer) for item in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = answers()
        with client_of(*[stuck] * 6, last) as client:
            limits: list[dict[str, Any]] = [{"timeout_s": 2.0}, {"cancel_after_s": 0.5}] * 3
            jobs = [gevent.spawn(client.ask, asked(**limit), due_s=0.0) for limit in limits]
            gevent.joinall(jobs)
            assert sorted(job.value.state for job in jobs) == ["cancelled"] * 3 + ["timeout"] * 3
            job = gevent.spawn(client.ask, asked(), due_s=0.0)
            run_until(asking)
            job.kill()
            assert job.value.state == "timeout"
        del jobs, job
        assert answers() == before
    finally:
        gc.enable()


def test_a_limit_of_this_process_is_not_the_targets_fault() -> None:
    client = Client(Target("http://127.0.0.1:9"), worker=0, epoch=time.perf_counter(), id_prefix="x-")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # files that are open stay open
    try:
        row = client.ask(asked(), due_s=0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (row.state, row.sent_s, "Too many open files" in row.reason) == ("never_sent", None, True)


def test_what_was_never_sent_or_never_connected_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = Client(Target(url), worker=0, epoch=time.perf_counter(), id_prefix="x-")
    with pytest.raises(UsageError, match=r"has answered before, but no connection to it can be opened now: .*refused"):
        client.warm(2)
    row = client.ask(asked(), due_s=0.0)
    assert (row.state, "refused" in row.reason.lower(), row.connected_s) == ("connect_error", True, None)
    row = client.ask(asked(timeout_s=1.0), due_s=-5.0)
    assert (row.state, row.sent_s, row.end_s) == ("never_sent", None, None)
    assert re.match(r"the generator was [5-9]\.", row.reason)


def test_the_path_goes_behind_the_prefix_and_v1_is_not_said_twice() -> None:
    lines: list[str] = []

    def script(peer: Peer) -> None:
        lines.append(peer.read_request()[0])

    server = Server(script, script)
    for base in ("/route/v1/", ""):
        Client(Target(server.url + base), worker=0, epoch=time.perf_counter(), id_prefix="x-").ask(asked(), due_s=0.0)
    server.join()
    assert lines == ["POST /route/v1/completions HTTP/1.1", "POST /v1/completions HTTP/1.1"]


def test_gevents_patches_are_not_needed_and_not_applied() -> None:
    assert not gevent.monkey.is_module_patched("socket")


def endless(peer: Peer) -> None:
    """Send events one by one without a pause, until the client disconnects."""
    peer.answer(CHUNKED)
    try:
        while True:
            peer.conn.sendall(chunk(event("a")))
    except OSError:
        return


def test_a_stream_that_never_pauses_holds_up_neither_its_own_timeout_nor_others() -> None:
    with client_of(endless, good) as client:
        stream = gevent.spawn(client.ask, asked(timeout_s=8.0), due_s=0.0)
        other = gevent.spawn(client.ask, asked(id=8), due_s=0.0)
        gevent.joinall([other], timeout=30)
        assert other.value.state == "ok"
        assert not stream.ready()
        assert stream.get(timeout=30).state == "timeout"


def test_the_row_of_an_answer_that_cannot_be_judged_is_kept() -> None:
    def deep(peer: Peer) -> None:
        peer.answer(
            "HTTP/1.1 500 Broken\nRetry-After: " + "9" * 400 + "\nContent-Length: 100000\n", b"[" * 50_000 + b"]" * 50_000
        )

    row = ask(deep)
    assert (row.state, row.status, row.retry_after_s) == ("http_error", 500, 1e9)

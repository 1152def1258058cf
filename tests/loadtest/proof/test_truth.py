"""These tests check the law server: scipy and closed forms, queue and stalls by hand, each failure on the wire and in the log."""

import ast
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import loadtest.proof.truth
from loadtest.proof.truth.server import running
from loadtest.proof.truth.settings import Law

FAST: dict[str, Any] = {"ttft": {"law": "constant", "s": 0.01}, "gap": {"law": "constant", "s": 0.001}}
# One client, since each makes a TLS context; no connection is used twice.
HTTP = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def law_of(**fields: Any) -> Law:
    return Law.model_validate({**FAST, **fields})


def log_of(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the requests in order of arrival, and the totals."""
    *entries, totals = [json.loads(line) for line in path.read_text().splitlines()]
    assert totals["kind"] == "totals"
    return sorted(entries, key=lambda entry: entry["number"]), totals


def ask(url: str, path: str = "/v1/completions", request_id: str = "r", **fields: Any) -> httpx.Response:
    prompt = {"messages": [{"role": "user", "content": "one two"}]} if "chat" in path else {"prompt": "one two"}
    return HTTP.post(url + path, json={"max_tokens": 5, **prompt, **fields}, headers={"X-Request-Id": request_id})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream that ended as it should."""
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def metrics_of(url: str) -> dict[str, float]:
    """Return the samples; a label ``finished_reason`` or ``le`` is part of the name."""
    samples = [s for family in text_string_to_metric_families(HTTP.get(url + "/metrics").text) for s in family.samples]
    return {" ".join([s.name, *(v for k, v in s.labels.items() if k in ("finished_reason", "le"))]): s.value for s in samples}


def wait_for(url: str, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Return the first samples that fulfil it."""
    deadline = time.monotonic() + 60
    while not condition(seen := metrics_of(url)):
        assert time.monotonic() < deadline, seen
    return seen


def test_it_shares_no_code_with_the_client() -> None:
    for file in Path(loadtest.proof.truth.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("loadtest") for name in node.names), file
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loadtest"):
                assert node.module == "loadtest.errors" or str(node.module).startswith("loadtest.proof.truth."), file


def test_a_completion_streams_its_tokens_with_usage_and_logs_what_it_did(tmp_path: Path) -> None:
    with running(law_of(tokens_per_chunk=2), log=tmp_path / "log") as url:
        *events, last = events_of(ask(url, stream=True, stream_options=USAGE, prompt=[5, 6, 7]))
        plain = ask(url, prompt=[5, 6, 7]).json()
    assert [event["usage"]["completion_tokens"] for event in events] == [2, 4, 5]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "length"]
    assert (last["choices"], last["usage"]) == ([], {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8})
    text = "".join(event["choices"][0]["text"] for event in events)
    assert (plain["choices"][0]["text"], len(text.split()), plain["usage"]) == (text, 5, last["usage"])
    (entry, other), totals = log_of(tmp_path / "log")
    assert entry["text_sha256"] == other["text_sha256"] == sha256(text.encode()).hexdigest()
    assert [num for _, num in entry["writes"]] == [2, 2, 1]
    assert (entry["scheduled_first_s"], entry["scheduled_last_s"]) == pytest.approx((0.01, 0.012))
    assert entry["scheduled_first_s"] <= entry["sent_first_s"] < entry["sent_last_s"] <= entry["ended_s"]
    assert (totals["ok"], totals["generation_tokens"], totals["origin_s"]) == (2, 10, entry["arrival_s"])


def test_a_chat_begins_with_the_role_and_usage_comes_only_when_asked_for(tmp_path: Path) -> None:
    with running(law_of(), log=tmp_path / "log") as url:
        bare = events_of(ask(url, "/v1/chat/completions", stream=True))
        asked = events_of(ask(url, "/v1/chat/completions", stream=True, stream_options={"include_usage": True}))
        message = ask(url, "/v1/chat/completions").json()["choices"][0]["message"]
    assert bare[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in bare) == message["content"]
    assert ["usage" in event for event in bare] == [False] * 6
    assert ["usage" in event for event in asked] == [False] * 6 + [True]


def test_generate_repeats_the_prompt_and_the_text_so_far(tmp_path: Path) -> None:
    with running(law_of(), log=tmp_path / "log") as url:
        response = ask(url, "/generate", stream=True)
        lines = [json.loads(line)["text"][0] for line in response.text.splitlines()]
        assert ask(url, "/generate").json() == {"text": [lines[-1]]}
    assert (response.headers["content-type"], len(lines)) == ("application/x-ndjson", 5)
    assert lines[0].startswith("one two")
    assert all(after.startswith(before) for before, after in pairwise(lines))


def test_token_k_depends_on_the_prompt_and_k_only(tmp_path: Path) -> None:
    def text(seed: int, request_id: str, **fields: Any) -> str:
        with running(law_of(), log=tmp_path / "log", seed=seed) as url:
            return str(ask(url, request_id=request_id, **fields).json()["choices"][0]["text"])

    long = text(1, "a", max_tokens=40)
    assert long.split()[:7] == text(2, "b", max_tokens=7).split()
    assert long != text(1, "a", max_tokens=40, prompt="one three")


@pytest.mark.parametrize("framing", ["chunked", "chunked-trailer", "close"])
@pytest.mark.parametrize(("split", "coalesce"), [("bytes", 1), (7, 2), (1, 3)])
def test_cut_and_joined_writes_carry_the_same_answer(tmp_path: Path, framing: str, split: str | int, coalesce: int) -> None:
    law = law_of(framing=framing, split=split, coalesce=coalesce, text="multi-byte", tokens_per_chunk=3)
    with running(law, log=tmp_path / "log") as url:
        text = "".join(event["choices"][0]["text"] for event in events_of(ask(url, stream=True, max_tokens=10)))
        assert len(text.encode()) > len(text) == 10
        assert ask(url, max_tokens=10).json()["choices"][0]["text"] == text
    entry = log_of(tmp_path / "log")[0][0]
    assert [num for _, num in entry["writes"]] == {1: [3, 3, 3, 1], 2: [6, 4], 3: [9, 1]}[coalesce]
    assert entry["scheduled_first_s"] == pytest.approx(0.01 + (coalesce - 1) * 0.001)  # when the last one joined is due


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("failure", "seen", "outcome"),
    [
        ({"kind": "drop"}, "without sending a response", "dropped"),
        ({"kind": "truncate"}, "without sending complete message body", "truncated"),
        ({"kind": "error-event"}, "failed by law", "error_event"),
        ({"kind": "status", "status": 429, "retry_after_s": 3}, "429 3", "status"),
        ({"kind": "html"}, "<html>", "html"),
        ({"kind": "slow-headers", "delay_s": 0.05}, "length", "ok"),
    ],
)
def test_every_second_request_fails_as_told(
    tmp_path: Path, failure: dict[str, Any], seen: str, outcome: str, stream: bool
) -> None:
    with running(law_of(failures=[{**failure, "every": 2, "after_tokens": 2}]), log=tmp_path / "log") as url:
        words = ask(url).json()["choices"][0]["text"].split()
        try:
            answer = ask(url, stream=stream)
            said = f"{answer.status_code} {answer.headers.get('retry-after')} {answer.text}"
        except httpx.RemoteProtocolError as exc:
            said = str(exc)
        assert ask(url, stream=stream).status_code == 200
    assert seen in said
    entries, totals = log_of(tmp_path / "log")
    assert [entry["outcome"] for entry in entries] == ["ok", outcome, "ok"]
    assert [entry["injected"] for entry in entries] == ["", failure["kind"], ""]
    sent = {"truncated": 2, "error_event": 2 if stream else 0, "ok": 5}.get(outcome, 0)
    assert (entries[1]["tokens_sent"], totals["generation_tokens"]) == (sent, 10 + sent)
    assert (entries[1]["queue_s"] is None) == (outcome in ("dropped", "status", "html"))  # never got to a slot
    assert entries[1]["text_sha256"] == sha256("".join(f" {word}" for word in words[:sent]).encode()).hexdigest()


def test_metrics_are_the_sums_of_the_log(tmp_path: Path) -> None:
    law = law_of(
        slots=1,
        stalls=[{"at_s": 0, "for_s": 0.05}],
        edge={"law": "constant", "s": 0.01},
        failures=[{"kind": "duplicate", "every": 3}, {"kind": "error-event", "every": 5}],
    )
    with running(law, log=tmp_path / "log") as url:
        for number in range(6):
            ask(url, request_id=f"r{number}", stream=number % 2 == 0)
        seen = metrics_of(url)
    entries, _ = log_of(tmp_path / "log")
    assert [entry["request_id"] for entry in entries] == ["r0", "r1", "r2", "r2", "r3", "r4", "r5", "r5"]
    ok = [entry for entry in entries if entry["outcome"] == "ok"]
    counted = {"length": 7, "error": 1, "abort": 0}
    assert {reason: seen[f"vllm:request_success_total {reason}"] for reason in counted} == counted
    assert seen["vllm:prompt_tokens_total"] == sum(entry["prompt_tokens"] for entry in ok) == 14
    assert seen["vllm:generation_tokens_total"] == sum(entry["tokens_sent"] for entry in entries) == 35
    for part in ("queue", "prefill", "decode"):
        assert seen[f"vllm:request_{part}_time_seconds_sum"] == pytest.approx(sum(entry[f"{part}_s"] for entry in ok))
        assert seen[f"vllm:request_{part}_time_seconds_count"] == 7
    assert seen["vllm:request_queue_time_seconds_sum"] == pytest.approx(0.05)  # of the first, in the stall
    assert seen["vllm:time_to_first_token_seconds_sum"] == pytest.approx(
        sum(entry["queue_s"] + entry["prefill_s"] for entry in ok)
    )
    for entry in ok:
        parts = [entry[f"{part}_s"] for part in ("queue", "prefill", "edge")]
        due = entry["scheduled_first_s"] if entry["stream"] else entry["scheduled_last_s"] - entry["decode_s"]
        assert due == pytest.approx(sum(parts))
    assert (seen["vllm:num_requests_running"], seen["vllm:num_requests_waiting"], seen["vllm:kv_cache_usage_perc"]) == (0, 0, 0)


def test_a_live_queue_is_what_its_logged_arrivals_make_it(tmp_path: Path) -> None:
    request = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 29\r\n\r\n{"prompt":[1],"max_tokens":1}'
    law = law_of(slots=2, service={"law": "constant", "s": 60}, kv_tokens=40)
    with running(law, log=tmp_path / "log") as url, contextlib.ExitStack() as stack:
        for _ in range(5):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))))
            client.sendall(request)
        seen = wait_for(url, lambda seen: seen["vllm:num_requests_running"] + seen["vllm:num_requests_waiting"] == 5)
    assert (seen["vllm:num_requests_running"], seen["vllm:num_requests_waiting"]) == (2, 3)
    assert seen["vllm:kv_cache_usage_perc"] == 2 / 40
    entries, _ = log_of(tmp_path / "log")
    at = [entry["arrival_s"] for entry in entries]
    starts = [at[0], at[1], at[0] + 60, at[1] + 60, at[0] + 120]
    assert [entry["queue_s"] for entry in entries] == pytest.approx(
        [start - arrival for start, arrival in zip(starts, at, strict=True)]
    )


def test_a_full_server_that_refuses_says_so_at_once(tmp_path: Path) -> None:
    request = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 29\r\n\r\n{"prompt":[1],"max_tokens":1}'
    law = law_of(slots=1, service={"law": "constant", "s": 60}, refuses_when_full=True)
    with running(law, log=tmp_path / "log") as url, contextlib.ExitStack() as stack:
        client = stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))))
        client.sendall(request)
        wait_for(url, lambda seen: seen["vllm:num_requests_running"] == 1)
        answer = ask(url)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    entries, _ = log_of(tmp_path / "log")
    assert [(entry["outcome"], entry["status"], entry["queue_s"]) for entry in entries[1:]] == [("status", 429, None)]


def test_a_client_that_goes_away_is_logged_as_such(tmp_path: Path) -> None:
    with running(law_of(gap={"law": "constant", "s": 60}), log=tmp_path / "log") as url:
        body = {"prompt": "a", "max_tokens": 3, "stream": True}
        with HTTP.stream("POST", url + "/v1/completions", json=body) as response:
            assert b'"text"' in next(response.iter_raw())
        wait_for(url, lambda seen: seen["vllm:request_success_total abort"] == 1)
    ((entry,), _) = log_of(tmp_path / "log")
    assert (entry["outcome"], entry["tokens_sent"]) == ("client_gone", 1)


def test_requests_on_one_connection_are_answered_in_order_until_it_is_closed_without_a_word(tmp_path: Path) -> None:
    def request(name: str) -> bytes:
        body = json.dumps({"prompt": name, "max_tokens": 2}).encode()
        return b"POST /v1/completions HTTP/1.1\r\nX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (
            name.encode(),
            len(body),
            body,
        )

    with running(law_of(answers_per_connection=2), log=tmp_path / "log") as url:
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=30) as client:
            client.sendall(request("a") + request("b") + request("c"))
            received = b"".join(iter(lambda: client.recv(65536), b""))
        assert received.count(b"HTTP/1.1 200") == 2
        assert ask(url, request_id="d").status_code == 200
    entries, _ = log_of(tmp_path / "log")
    assert [(entry["request_id"], entry["connection"]) for entry in entries] == [("a", 1), ("b", 1), ("d", 2)]


def test_what_cannot_be_answered_gets_a_status(tmp_path: Path) -> None:
    with running(law_of(), log=tmp_path / "log") as url:
        assert [
            ask(url, **fields).status_code for fields in ({"model": "other"}, {"max_tokens": -1}, {"prompt": [[1], [2]]})
        ] == [404, 400, 400]
        assert HTTP.post(url + "/v1/completions", content=b"{").status_code == 400
        assert HTTP.get(url + "/v1/completions").status_code == HTTP.post(url + "/v1/other").status_code == 404
        assert HTTP.get(url + "/v1/models").json()["data"][0]["id"] == "truth"
        assert HTTP.get(url + "/version").json() == {"version": "truth"}
        assert HTTP.get(url + "/healthz").status_code == 200
    entries, totals = log_of(tmp_path / "log")
    assert [(entry["outcome"], entry["status"]) for entry in entries] == [("status", code) for code in (404, 400, 400, 400)]
    assert totals["status"] == 4


def test_the_command_serves_until_a_signal_and_ends_its_log_with_totals(tmp_path: Path) -> None:
    (tmp_path / "law.yaml").write_text(json.dumps(FAST | {"gap": {"law": "constant", "s": 60}}))
    options = f"--port 0 --law {tmp_path}/law.yaml --log {tmp_path}/log"
    command = [sys.executable, "-m", "loadtest.proof.truth"]
    with subprocess.Popen([*command, *options.split()], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().removeprefix("listening on ").strip()
        assert ask(url, max_tokens=1).status_code == 200
        with HTTP.stream("POST", url + "/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True}) as response:
            received = response.iter_raw()  # a lost iterator would close the connection
            assert b'"text"' in next(received)
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=30) == 0
    entries, totals = log_of(tmp_path / "log")
    assert [entry["outcome"] for entry in entries] == ["ok", "shutdown"]
    assert (totals["ok"], totals["shutdown"]) == (1, 1)
    wrong = subprocess.run([*command, *options.replace("law.yaml", "none").split()], capture_output=True, text=True, check=False)
    none = f"{tmp_path}/none"
    assert (wrong.returncode, wrong.stderr) == (2, f"error: {none}: [Errno 2] No such file or directory: '{none}'\n")

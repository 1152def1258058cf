"""`helm test` runs this script: it lists the models, asks one for a chat and for /generate, both streamed, and checks the streams' ends.

Waits for the first answer, then tries once. Standard library only, so that it runs in any image.
"""

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

READ_TIMEOUT_S = 120.0
POLL_S = 2.0


class TestFailed(Exception):
    """What an answer lacked."""


def request(url: str, key: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    return urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)


def wait_until_served(base: str, model: str, key: str, timeout_s: float) -> None:
    """Return once /v1/models lists ``model``."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(request(f"{base}/v1/models", key), timeout=READ_TIMEOUT_S) as answer:
                names = [entry["id"] for entry in json.load(answer)["data"]]
            if model not in names:
                raise TestFailed(f"/v1/models has {names}, not {model!r}")
            return
        except urllib.error.HTTPError as exc:
            if exc.code < 500 or time.monotonic() > deadline:  # a wrong key does not become right
                raise TestFailed(f"/v1/models: {exc.code} {exc.read(500).decode(errors='replace')}") from exc
        except OSError as exc:
            if time.monotonic() > deadline:
                raise TestFailed(f"no answer within {timeout_s:g} s: {exc}") from exc
        time.sleep(POLL_S)


def lines(base: str, path: str, key: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a streamed answer that are neither empty nor the comments of a stream that waits."""
    with urllib.request.urlopen(request(base + path, key, body), timeout=READ_TIMEOUT_S) as answer:
        yield from (text for line in answer if (text := line.decode().strip()) and not text.startswith(":"))


def check_chat(base: str, model: str, key: str) -> str:
    """Return the text of a streamed chat, which comes as server-sent events."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": model, "messages": question, "stream": True, "temperature": 0, "max_tokens": 24}
    *events, last = [line.removeprefix("data:").strip() for line in lines(base, "/v1/chat/completions", key, body)]
    if last != "[DONE]":
        raise TestFailed(f"the chat's stream ends with {last!r}, not with [DONE]")
    choices = [choice for event in events for choice in json.loads(event).get("choices", [])]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    if not text or not any(choice.get("finish_reason") for choice in choices):
        raise TestFailed(f"the chat's stream has no text or no finish_reason: {events}")
    return text


def check_generate(base: str, model: str, key: str) -> str:
    """Return the text of a streamed /generate, which comes as lines of JSON that repeat the text so far."""
    prompt = "The sky is"
    body = {"model": model, "prompt": prompt, "stream": True, "temperature": 0, "max_tokens": 8}
    *_, last = [json.loads(line) for line in lines(base, "/generate", key, body)]
    text = "".join(last.get("text", []))
    if not text.startswith(prompt) or len(text) == len(prompt):
        raise TestFailed(f"/generate ends with {last}")
    return text


def check_refusal(base: str) -> str:
    """Return the status of a request without a key."""
    try:
        with urllib.request.urlopen(request(f"{base}/v1/models", ""), timeout=READ_TIMEOUT_S) as answer:
            raise TestFailed(f"without a key /v1/models answers {answer.status}, not 401")
    except urllib.error.HTTPError as exc:
        if exc.code != 401:
            raise TestFailed(f"without a key /v1/models answers {exc.code}, not 401") from exc
        return str(exc.code)


def plain_key(keys: str) -> str:
    """Return the first key of a file that may also hold digests of keys."""
    plain = [line for line in keys.split() if not line.startswith("sha256:")]
    if not plain:
        raise TestFailed("the file of keys holds only digests; name a Secret with a plain key in test.apiKeySecret")
    return plain[0]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("model")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--keys-file", type=Path)
    given = parser.parse_args(arguments)
    try:
        key = plain_key(given.keys_file.read_text()) if given.keys_file else ""
        wait_until_served(given.base, given.model, key, given.timeout_s)
        print(f"{given.base}/v1/models lists {given.model}")
        print(f"chat, streamed: {check_chat(given.base, given.model, key)!r}")
        print(f"generate, streamed: {check_generate(given.base, given.model, key)!r}")
        if key:
            print(f"without a key: {check_refusal(given.base)}")
    except (TestFailed, OSError, ValueError) as exc:
        detail = exc.read(500).decode(errors="replace") if isinstance(exc, urllib.error.HTTPError) else ""
        print(f"failed: {exc} {detail}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

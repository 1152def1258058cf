"""This example asks a question and prints the answer as it comes.

python examples/chat.py "List the seven days of the week."
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import requests


def stream(url: str, key: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield the pieces of a streamed chat.

    Raises:
        RuntimeError: The stream ended by an error event.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with requests.post(
        f"{url}/v1/chat/completions", json={**body, "stream": True}, headers=headers, stream=True, timeout=60
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            # Lines without "data: " are blank, or comments such as ": waiting".
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


def main(arguments: list[str]) -> None:
    """Print the answer to one question."""
    parser = argparse.ArgumentParser(description="Ask a question and print the answer as it comes.")
    parser.add_argument("question", nargs="?", default="List the seven days of the week.")
    parser.add_argument("--url", default="http://127.0.0.1:8010")
    parser.add_argument("--key", default="", help="API key, where the service asks for one")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    given = parser.parse_args(arguments)
    messages = [{"role": "user", "content": given.question}]
    for piece in stream(given.url, given.key, {"model": given.model, "messages": messages, "temperature": 0, "max_tokens": 200}):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1:])

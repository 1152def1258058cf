"""This example answers prompts by OpenAI's Files and Batches API: upload, start, wait, read. The service needs `ingress.batch`.

python examples/batch.py

For a file on this machine `serve-app batch run prompts.txt -o answers.jsonl` does the same without `ingress.batch`.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping

import requests

PROMPTS = ("What is the capital of France?", "What is the capital of Italy?")
POLL_S = 1.0


def line(number: int, model: str, prompt: str) -> str:
    """Return one request of the input file."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 20}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})


def ask(method: str, url: str, **given: object) -> Mapping[str, str]:
    """Return the JSON of an answer."""
    answer = requests.request(method, url, timeout=60, **given)  # type: ignore[arg-type]
    if not answer.ok:
        raise SystemExit(f"{answer.status_code}: {answer.text}")
    told: Mapping[str, str] = answer.json()
    return told


def main(arguments: list[str]) -> None:
    """Print each prompt's answer."""
    parser = argparse.ArgumentParser(description="Answer prompts by the Files and Batches API.")
    parser.add_argument("--url", default="http://127.0.0.1:8010")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    given = parser.parse_args(arguments)
    text = "\n".join(line(number, given.model, prompt) for number, prompt in enumerate(PROMPTS))
    file = ask("POST", f"{given.url}/v1/files", files={"file": ("prompts.jsonl", text)}, data={"purpose": "batch"})
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = ask("POST", f"{given.url}/v1/batches", json=asked)
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(POLL_S)
        batch = ask("GET", f"{given.url}/v1/batches/{batch['id']}")
    if batch["status"] != "completed":
        raise SystemExit(f"the batch has {batch['status']}: {batch.get('errors')}")
    output = requests.get(f"{given.url}/v1/files/{batch['output_file_id']}/content", timeout=60)
    output.raise_for_status()
    for row in map(json.loads, output.text.splitlines()):
        print(PROMPTS[int(row["custom_id"])], row["response"]["body"]["choices"][0]["message"]["content"], sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])

"""This example runs a SageMaker container's client against a service with `ingress.sagemaker_routes: true` (docs/migration.md).

python examples/sagemaker_client.py
"""

import argparse
import sys
from typing import Any

import requests


def main(arguments: list[str]) -> None:
    """Ask whether the service is well, then invoke it."""
    parser = argparse.ArgumentParser(description="Invoke a service by SageMaker's routes.")
    parser.add_argument("--url", default="http://127.0.0.1:8010")
    given = parser.parse_args(arguments)
    ping = requests.get(f"{given.url}/ping", timeout=10)
    if not ping.ok:
        raise SystemExit(f"{ping.status_code}: {ping.text}")
    # One model is served, so the body needs no name.
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 30,
    }
    answer = requests.post(f"{given.url}/invocations", json=body, timeout=60)
    if not answer.ok:
        raise SystemExit(f"{answer.status_code}: {answer.text}")
    print(answer.json()["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main(sys.argv[1:])

"""This example asks for an answer that fits a JSON schema: the engine emits no token that would break it.

python examples/structured_output.py
"""

import argparse
import json
import sys

import requests

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "country": {"type": "string", "maxLength": 30}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


def main(arguments: list[str]) -> None:
    """Print one answer as an object."""
    parser = argparse.ArgumentParser(description="Have an answer that fits a JSON schema.")
    parser.add_argument("--url", default="http://127.0.0.1:8010")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    given = parser.parse_args(arguments)
    body = {
        "model": given.model,
        "messages": [{"role": "user", "content": "What is the capital of France? Answer as JSON with city and country."}],
        "temperature": 0,
        "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
    }
    answer = requests.post(f"{given.url}/v1/chat/completions", json=body, timeout=60)
    if not answer.ok:
        raise SystemExit(f"{answer.status_code}: {answer.text}")
    print(json.loads(answer.json()["choices"][0]["message"]["content"]))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Have the model call a function of yours, and print the call.

python examples/tools.py

`tool_choice` names the function, so any model can be asked: the engine emits arguments that fit the function's schema. To let the model
choose (`tool_choice: auto`), the model must be trained for tools, and its `frontend_args` name vLLM's parser of its calls.
"""

import argparse
import json
import sys

import requests

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main(arguments: list[str]) -> None:
    """Print the name of the function that is called, and its arguments."""
    parser = argparse.ArgumentParser(description="Have the model call a function.")
    parser.add_argument("--url", default="http://127.0.0.1:8010")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    given = parser.parse_args(arguments)
    body = {
        "model": given.model,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "temperature": 0,
        "max_tokens": 60,
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": {"type": "function", "function": {"name": WEATHER["name"]}},
    }
    answer = requests.post(f"{given.url}/v1/chat/completions", json=body, timeout=60)
    answer.raise_for_status()
    for call in answer.json()["choices"][0]["message"]["tool_calls"]:
        print(call["function"]["name"], json.loads(call["function"]["arguments"]))


if __name__ == "__main__":
    main(sys.argv[1:])

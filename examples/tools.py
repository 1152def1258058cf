"""This example lets the model call a function of yours, and prints the call.

python examples/tools.py

The model's `frontend_args` have to name vLLM's parser of calls: {enable_auto_tool_choice: true, tool_call_parser: hermes}.
`tool_choice` names the function, so that any model can be asked, and `strict` has the engine emit arguments that fit the function's schema.
With --choose the model chooses itself: one that was trained for tools, or the simulated one of examples/tools.yaml.
"""

import argparse
import json
import sys

import requests

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "strict": True,  # the arguments have to fit the schema; without it the model writes what it likes
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def main(arguments: list[str]) -> None:
    """Print the name of the function that is called, and its arguments."""
    parser = argparse.ArgumentParser(description="Have the model call a function.")
    parser.add_argument("--url", default="http://127.0.0.1:8010")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--choose", action="store_true", help="let the model choose whether to call")
    given = parser.parse_args(arguments)
    body = {
        "model": given.model,
        "messages": [QUESTION],
        "temperature": 0,
        "max_tokens": 60,
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": "auto" if given.choose else {"type": "function", "function": {"name": WEATHER["name"]}},
    }
    answer = requests.post(f"{given.url}/v1/chat/completions", json=body, timeout=60)
    if not answer.ok:
        raise SystemExit(f"{answer.status_code}: {answer.text}")
    message = answer.json()["choices"][0]["message"]
    if not (calls := message.get("tool_calls")):
        print(message["content"])
    for call in calls or ():
        print(call["function"]["name"], json.loads(call["function"]["arguments"]))


if __name__ == "__main__":
    main(sys.argv[1:])

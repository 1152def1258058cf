"""`serve` lets a program of one client answer commands: a line of JSON on its input is a `Command`, a line on its output an `Answer`.

Its argument is the Python code of docs/api.md that makes the client. The program runs in .venv-clients, so that this module imports nothing
but the standard library.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

RAIN, SNOW = (
    "in degrees Celsius, as a whole number, with the wind and its direction, and whether it will rain on the way home in the evening",
    "in degrees Fahrenheit, with one digit behind the point, with the chance of snow, and whether the roads will be free of ice tomorrow",
)
"""The values of the tool's parameter ``form``: long, so that a call takes many tokens, whatever the model is."""
City = Literal["Paris", "Rome"]
Form = Literal[
    "in degrees Celsius, as a whole number, with the wind and its direction, and whether it will rain on the way home in the evening",
    "in degrees Fahrenheit, with one digit behind the point, with the chance of snow, and whether the roads will be free of ice tomorrow",
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "form": {"type": "string", "enum": [RAIN, SNOW]}},
    "required": ["city", "form"],
    "additionalProperties": False,
}
NAME, DESCRIPTION, RESULT = "get_weather", "The weather of a city.", "17 degrees"


@dataclass(frozen=True)
class Command:
    """What a program shall ask: ``case`` is the name of one of its functions."""

    case: str
    model: str
    prompt: str
    max_tokens: int


@dataclass
class Answer:
    """What the client made of the answers to one command."""

    text: str = ""
    """The text of the last answer."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Name and arguments of each call of a tool, as the client parsed them."""
    error: str = ""


Case = Callable[[Mapping[str, Any], Command], Answer]


def serve(**cases: Case) -> None:
    """Answer commands until the standard input ends. Each case gets the names that the code of the argument defined."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    names: dict[str, Any] = {}
    exec(compile(sys.argv[1], "docs/api.md", "exec"), names)
    for line in sys.stdin:
        command = Command(**json.loads(line))
        try:
            answer = cases[command.case](names, command)
        except Exception as exc:
            traceback.print_exc()
            answer = Answer(error=f"{type(exc).__name__}: {exc}")
        print(json.dumps(asdict(answer)), file=answers, flush=True)


def get_weather(city: City, form: Form) -> str:
    """The weather of a city."""
    return RESULT

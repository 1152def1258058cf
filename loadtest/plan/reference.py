"""The reference lists a scenario file's keys, from `loadtest.plan.scenario`: a JSON Schema, and docs/scenario.md."""

import inspect
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from loadtest.plan.laws import ARRIVALS
from loadtest.plan.request_class import Conversation, Length, Pause, RequestClass
from loadtest.plan.scenario import Fault, Observe, Scenario
from loadtest.plan.slo import PRESETS, Limit

_SECTIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The file", "", Scenario),
    ("requests", "A list.", RequestClass),
    ("input_tokens, output_tokens, turns", "Keys of a class of requests.", Length),
    ("conversation", "A key of a class of requests.", Conversation),
    ("think_s", "A key of a conversation.", Pause),
    ("faults", "A list.", Fault),
    ("observe", "", Observe),
)
_HEAD = """# Every key of a scenario

`serve-app-loadtest schema --markdown` makes this page; `serve-app-loadtest schema` prints the same as a JSON Schema, with which an
editor checks a file while you write. [loadtest.md](loadtest.md#a-scenario) begins with an example. Times are seconds from the start of
the run, rates requests per second, lengths tokens.
"""


def json_schema() -> str:
    """Return the JSON Schema of a scenario file, with a line end."""
    schema = Scenario.model_json_schema()
    structured = schema["properties"]["slo"]
    words = {"type": "string", "examples": ["ttft_p95=1s,tpot_p95=100ms", *sorted(PRESETS)]}
    schema["properties"]["slo"] = {"anyOf": [words, structured], "description": "Limits in words, or the name of a preset."}
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Scenario", **schema}, indent=2) + "\n"


def page() -> str:
    """Return docs/scenario.md."""
    parts = [_HEAD]
    for title, words, section in _SECTIONS:
        parts.append("\n".join([f"## {title}", "", sentences(words, section), "", *table(section), ""]))
    parts.append("## arrival\n\n`law` names the arrival law; the other keys are those of the law.\n")
    parts += [
        "\n".join([f"### {law}", "", sentences("", cls), "", *table(cls, without="law"), ""]) for law, cls in ARRIVALS.items()
    ]
    parts.append(_slo())
    return "\n".join(parts)


def sentences(words: str, section: type[BaseModel]) -> str:
    return f"{words} {inspect.getdoc(section) or ''}".strip().replace("``", "`")


def table(section: type[BaseModel], *, without: str = "") -> Iterator[str]:
    """Yield a table with a row per key of a pydantic model. A key whose value is a model itself is named, without that model's keys."""
    properties = section.model_json_schema()["properties"]
    rows = {name: values for name, values in properties.items() if name != without}
    if not rows:
        return
    yield "| key | default | values | what it does |"
    yield "|---|---|---|---|"
    required = section.model_json_schema().get("required", [])
    for name, values in rows.items():
        default = "required" if name in required else _default(values)
        description = " ".join(values.get("description", "").split()).replace("|", "\\|").replace("``", "`")
        yield f"| `{name}` | {default} | {_values(values)} | {description} |"


def _default(values: dict[str, Any]) -> str:
    default = values.get("default")
    if isinstance(default, dict | list):
        return "" if not default or isinstance(default, dict) or isinstance(default[0], dict) else f"`{json.dumps(default)}`"
    if isinstance(default, float):
        return f"`{default:g}`"
    return "" if default is None or default == "" else f"`{json.dumps(default)}`"


_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most", "exclusiveMaximum": "less than"}


def _values(values: dict[str, Any]) -> str:
    """Return the type of a key and its bounds in words."""
    kinds = [kind for kind in values.get("anyOf", [values]) if kind.get("type") != "null"]
    words = []
    for kind in kinds:
        if "enum" in kind:
            words.append(", ".join(f"`{each}`" for each in kind["enum"]))
        elif "$ref" in kind or kind.get("type") in ("object", None):
            words.append("mapping")
        elif kind["type"] == "array":
            words.append("list")
        else:
            bounds = [f"{text} {kind[bound]:g}" for bound, text in _BOUNDS.items() if abs(kind.get(bound, 1e18)) < 1e12]
            words.append(", ".join([{"string": "text", "boolean": "true or false"}.get(kind["type"], kind["type"]), *bounds]))
    return " or ".join(words)


def _slo() -> str:
    presets = "\n".join(f"| `{name}` | {', '.join(map(str, slo.limits))} |" for name, slo in sorted(PRESETS.items()))
    judged = " ".join(sentences("", Limit).split())
    return (
        "## slo\n\nLimits in words, as `ttft_p95=1s,itl_p99=80ms`: metric, quantile, limit with its unit. "
        f"{judged}\n\nOr the name of a preset:\n\n| preset | limits |\n|---|---|\n{presets}\n"
    )

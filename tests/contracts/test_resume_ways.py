"""Each parameter of a request has its way to continue elsewhere, in the code and in docs/reliability.md."""

import dataclasses
from pathlib import Path

import msgspec
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from serve_app.ingress.fleet.intake import WAYS, Way, names
from tests.contracts.changes import difference, fail_with, line

DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_each_field_of_vllms_structs_has_exactly_one_way() -> None:
    fields = {
        "SamplingParams": [f.name for f in msgspec.structs.fields(SamplingParams)],
        "StructuredOutputsParams": [f.name for f in dataclasses.fields(StructuredOutputsParams)],
        "EngineCoreRequest": [f.name for f in msgspec.structs.fields(EngineCoreRequest)],
    }
    look = "; look what the engine keeps for it, then name its way in serve_app/ingress/fleet/intake.py"
    changes = []
    for struct, now in fields.items():
        change = difference(sorted(_known(struct)), sorted(now))
        changes.append(line(struct, f"{change}{look}" if change else ""))
    fail_with(changes)


def test_the_documentation_lists_each_parameter_with_its_way() -> None:
    text = DOCS.read_text()
    rows = [
        f"| `{struct}` | {way.value} | {' '.join(f'`{name}`' for name in names(struct, way))} |"
        for struct, ways in WAYS.items()
        for way in ways
    ]
    assert [row for row in text.splitlines() if row.startswith(tuple(f"| `{struct}` |" for struct in WAYS))] == rows


def test_the_documentation_explains_each_way() -> None:
    lines = DOCS.read_text().splitlines()
    assert [way.value for way in Way if not any(row.startswith(f"| **{way.value}** |") for row in lines)] == []


def _known(struct: str) -> list[str]:
    return [name for way in WAYS[struct] for name in names(struct, way)]

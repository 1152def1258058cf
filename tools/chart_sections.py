"""This module says in which sections of the chart's `config` names of other systems and of vLLM's arguments are looked for.

tools/chart_schema.py lets these names through the schema, and the chart's rule foreign-key refuses them by a sentence with our own key.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from serve_app.config import Settings
from serve_app.config.foreign import FOREIGN
from serve_app.config.places import sections
from serve_app.config.vllm_arguments import misplaced_arguments

_OF_ARGUMENTS = ("", "ingress", "models.NAME")
_OF_NAMES = (
    *_OF_ARGUMENTS,
    *("models.NAME.replicas", "models.NAME.replicas.schedule", "models.NAME.routing", "ingress.replicas"),
    *("autoscaling", "health", "timeouts"),
)
"""Where people write names of other systems. In all sections these would double the schema."""


class Place(NamedTuple):
    """A section of `config`: its path, with NAME for a key of a mapping, the name of its schema, and its own keys."""

    path: str
    section: str
    keys: frozenset[str]

    @property
    def takes_arguments(self) -> bool:
        """Whether vLLM's arguments are looked for, too."""
        return self.path in _OF_ARGUMENTS

    def meant(self) -> dict[str, str]:
        return {**(misplaced_arguments() if self.takes_arguments else {}), **FOREIGN}

    def own(self) -> list[str]:
        """Return the names in the tables that are a key of ours here."""
        return sorted(self.keys & self.meant().keys())


def places() -> list[Place]:
    """Return the sections in which names are looked for."""
    found = {path: Place(path, section.__name__, frozenset(section.model_fields)) for path, section in sections(Settings)}
    return [found[path] for path in _OF_NAMES]


def open_to_foreign_names(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Close the sections to unknown keys only where none of their keys is a name of other systems, which the rule foreign-key refuses.

    Yield the definitions that the sections refer to. With a copy of the names in each section, as `patternProperties` needs, the names
    would be a third of the schema.

    Args:
        config: The schema of `config`, whose sections are changed.
    """
    for place in places():
        section = config["$defs"].get(place.section, config)
        name = "ForeignNamesAndArguments" if place.takes_arguments else "ForeignNames"
        (pattern,) = spellings(place.meant())
        yield name, {"pattern": pattern}
        ours: list[dict[str, Any]] = [{"enum": place.own()}] if place.own() else []
        section["if"] = {"propertyNames": {"anyOf": [*ours, {"not": {"$ref": f"#/$defs/{name}"}}]}}
        section["then"] = {
            "additionalProperties": section.pop("additionalProperties"),
            "properties": dict.fromkeys(section["properties"], True),
        }


def spellings(names: Iterable[str]) -> dict[str, Any]:
    """Return the schema that passes names as people write them: max_model_len, maxModelLen, max-model-len, --max-model-len, modelURL."""
    return {f"^-*({'|'.join(sorted(re.sub('_([a-z]+)', _spelt, name) for name in names))})$": True}


def _spelt(part: re.Match[str]) -> str:
    word = part[1]
    if word in ("cpu", "gpu", "url"):
        return f"(_{word}|-{word}|{word.title()}|{word.upper()})"
    return f"(_{word[0]}|-{word[0]}|{word[0].upper()}){word[1:]}"

"""This module tells the chart's rule wrong-form which texts and amounts values may have, and what to write in place of others.

The patterns are those of `BY_KEY` in tools/chart_schema.py, which writes them into files/rules.yaml. The schema of serve-app's chart lets
these values through: its own message would be a regular expression.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

_SIZE = "write a number and k, M, G, T or Ki, Mi, Gi, Ti without a blank, as in 16Gi"
_NAME = "give the name of the object in the cluster, of small letters, digits and dashes, not what it holds"
_RANGE = "write a range of addresses, such as 203.0.113.0/24: of a single one its address and /32"
_URL = "begin with https:// or http://"
_IMAGE = "write the registry's host and the path in small letters, without https://"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IP6 = "[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*"
NETWORK = rf"^({_BYTE}(\.{_BYTE}){{3}}/(3[0-2]|[12]?[0-9])|{_IP6}/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"
"""A network of IPv4 or IPv6. Of an address of IPv6 only the characters are judged."""
SECRETS = ("existingSecret", "databaseSecret", "apiKeySecret", "huggingFaceTokenSecret", "tlsSecretName")
"""Keys that name a Secret. The rule does not print their values, which may be what the Secret should hold."""
HINTS = {
    **dict.fromkeys(("tmpSize", "homeSize", "shmSize", "size", "asleepSize", "checkpointSize", "memory"), _SIZE),
    "cpu": "write CPUs, as in 2 or 0.5, or thousandths of one, as in 500m",
    **dict.fromkeys((*SECRETS, "existingClaim"), _NAME),
    **dict.fromkeys(("loadBalancerSourceRanges", "apiServerCidrs", "weightsCidrs", "redisCidrs"), _RANGE),
    **dict.fromkeys(("huggingFaceEndpoint", "s3Endpoint", "grafanaUrl"), _URL),
    **dict.fromkeys(("imageRegistry", "repository"), _IMAGE),
    "tag": "a tag has letters, digits, dots, dashes and underscores alone; put a number into quotes",
    "digest": "write sha256: and its 64 digits of 0 to 9 and a to f",
}
"""The way out by the name of a key, wherever it is."""

FREE_MAPS = (
    *("affinity", "annotations", "labels", "nodeSelector", "podAnnotations", "podLabels", "podSecurityContext"),
    *("commonAnnotations", "commonLabels", "dashboardLabels"),
)
"""Mappings whose keys the user chooses: a label may be called size."""
ZERO = (("ScheduledBounds", "max"), ("ScalingSettings", "max"), ("AutoscalingSettings", "max_gpus"))
"""Numbers of the configuration whose 0 the rule max-is-zero refuses, by section and key."""


def let_zero_through(sections: Mapping[str, Any]) -> None:
    for section, key in ZERO:
        number = sections[section]["properties"][key]
        number.get("anyOf", [number])[0]["minimum"] = 0


def loosened(key: str, schema: Schema) -> Schema:
    """Return a schema without the patterns of the rule. What must not be empty still must not."""
    if key in HINTS and "pattern" in schema:
        kept = {name: value for name, value in schema.items() if name != "pattern"}
        other = "number" if key == "tag" else "object" if HINTS[key] == _NAME else ""
        text = {"type": ["string", other]} if other else {}
        return kept | text | ({} if re.search(schema["pattern"], "") else {"minLength": 1})
    if key in HINTS and "items" in schema:
        return schema | {"items": loosened(key, schema["items"])}
    if "properties" in schema:
        return schema | {"properties": {name: loosened(name, part) for name, part in schema["properties"].items()}}
    return schema


def forms_of(by_key: Mapping[str, Schema]) -> dict[str, dict[str, Any]]:
    """Return pattern and way out of each key in `HINTS`, and ``secret`` for each of `SECRETS`.

    The pattern passes an empty text, which the schema judges.
    """
    found = {key: pattern for path, schema in by_key.items() for key, pattern in _patterns(path.rpartition(".")[2], schema)}
    return {
        key: {"pattern": pattern if re.search(pattern, "") else f"^$|{pattern}", "hint": HINTS[key]}
        | ({"secret": True} if key in SECRETS else {})
        for key, pattern in found.items()
    }


def _patterns(key: str, schema: Schema) -> Iterator[tuple[str, str]]:
    if key in HINTS and (pattern := schema.get("pattern") or schema.get("items", {}).get("pattern")):
        yield key, pattern
    for name, part in schema.get("properties", {}).items():
        yield from _patterns(name, part)

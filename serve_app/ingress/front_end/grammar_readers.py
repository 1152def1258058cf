"""Grammar readers read a grammar as vLLM's validation does in the event loop; `grammar_process` runs them in a child with limits.

With the backend `auto`, vLLM reads a grammar with xgrammar first. If xgrammar cannot read it, or it is a schema with a keyword that
xgrammar ignores, vLLM reads it with a second library: guidance, or outlines for a schema with `patternProperties`. These libraries have no
limits either: reading `{"type": "array", "minItems": 1000000000}` with guidance took 12 GB, and the kernel killed the ingress.
"""

import importlib
import json
from typing import Any

import xgrammar as xgr
from llguidance import LLMatcher, StructTag, grammar_from
from outlines_core import json_schema

GUIDANCE = "guidance"
OUTLINES = "outlines"

_regex_parser = importlib.import_module("re._parser")
"""Python's own, with which vLLM reads an expression of outlines. Stubs of `re` lack it."""


def read(kind: str, spec: str, *, second: str | None, ignores: bool) -> None:
    """Read the grammar as vLLM's validation does.

    Args:
        second: The library for grammars that xgrammar cannot read: `GUIDANCE`, `OUTLINES`, or None.
        ignores: Whether the grammar is a schema with a keyword that xgrammar ignores, so that the second library reads it in any case.

    Raises:
        Exception: Any type that xgrammar raises. Errors of the second library are dropped here, because vLLM will report them.
    """
    try:
        _read_with_xgrammar(kind, spec)
    except MemoryError:
        raise
    except Exception:
        if second is not None:
            _read_with(second, kind, spec)
        raise
    if ignores and second is not None:
        _read_with(second, kind, spec)


def tag_arguments(spec: str) -> tuple[Any, ...]:
    """Return xgrammar's arguments for a structural tag of the new form, or of the old one with `structures`."""
    tag = json.loads(spec)
    if "structures" not in tag:
        return (spec,)
    items = [xgr.StructuralTagItem(begin=s["begin"], schema=json.dumps(s["schema"]), end=s["end"]) for s in tag["structures"]]
    return items, tag["triggers"]


def _read_with_xgrammar(kind: str, spec: str) -> None:
    if kind == "json":
        xgr.Grammar.from_json_schema(spec)
    elif kind == "regex":
        xgr.Grammar.from_regex(spec)
    elif kind == "structural_tag":
        xgr.Grammar.from_structural_tag(*tag_arguments(spec))
    elif kind == "lark":
        xgr.Grammar.from_lark(spec)
    else:
        xgr.Grammar.from_ebnf(spec)


def _read_with(library: str, kind: str, spec: str) -> None:
    try:
        if library == OUTLINES:
            _regex_parser.parse(json_schema.build_regex_from_schema(spec))
        else:
            LLMatcher.validate_grammar(_for_guidance(kind, spec))
    except MemoryError:
        raise
    except Exception:  # vLLM can report this error: finding it was cheap
        return


def _for_guidance(kind: str, spec: str) -> str:
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(spec)
    if kind == "regex":
        return grammar_from("regex", spec)
    if kind != "structural_tag":
        return grammar_from("grammar", spec)
    tag = json.loads(spec)
    tags = [
        StructTag(
            trigger=next(t for t in tag["triggers"] if s["begin"].startswith(t)),
            begin=s["begin"],
            grammar=s["schema"],
            end=s["end"],
        )
        for s in tag["structures"]
    ]
    return StructTag.to_grammar(tags)

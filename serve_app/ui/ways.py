"""This module draws the ways of single requests: which replicas each one had, in order, why it went there and why it left. Pure."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from serve_app.books.words import REASONS
from serve_app.ui.changes import Happening, short

MAX_MOVED, MAX_OTHERS = 4, 3
"""How many requests are drawn that had several replicas, and how many others."""
_FAILURES = frozenset({"failed", "rejected", "invalid", "blocked", "quarantined", "over_quota"})


def ways_html(told: Mapping[str, Any]) -> str:
    """Return the newest requests of the ingress that answered, those that moved first. ``told`` is the answer to `/fleet/requests`."""
    ways = [*told["moved"][:MAX_MOVED], *told["others"][:MAX_OTHERS]]
    lines = "".join(f"<li>{_way(way)}</li>" for way in ways)
    inner = f'<ol class="ways">{lines}</ol>' if lines else '<p class="quiet">No request yet.</p>'
    return f'<h3>Ways of requests <span class="quiet">the newest that moved, and the newest others</span></h3>{inner}'


def _way(way: Mapping[str, Any]) -> str:
    """Return three parts: who asked what, the replicas with the reasons, and the numbers."""
    state = str(way["state"])
    kind = "failed" if state in _FAILURES else state
    caller = "" if way["tenant"] is None else " · ".join(dict.fromkeys((str(way["tenant"]), str(way["key"]))))
    about = " · ".join(part for part in (str(way["model"]), caller) if part)
    name = escape(str(way["id"]) or "without an id")
    head = f'<b>{name}</b> <span class="state {escape(kind)}">{escape(state)}</span> <span class="quiet">{escape(about)}</span>'
    return f'<div>{head}</div><div class="path">{_path(way["hops"], way)}</div><div class="quiet">{escape(_numbers(way))}</div>'


def _path(hops: Sequence[Mapping[str, Any]], way: Mapping[str, Any]) -> str:
    """Return the replicas in order. Before the first is why it was chosen, before each other one why the request left the one before."""
    parts: list[str] = []
    for before, hop in zip([None, *hops], hops, strict=False):
        why = REASONS.get(hop["reason"], str(hop["reason"])) if before is None else _left(before)
        kind = ' class="left"' if hop["left"] else ""
        parts.append(f"<span>{escape(why)}</span> <i>→</i> <b{kind}>{escape(short(str(hop['replica'])))}</b>")
    if hops and hops[-1]["left"]:
        parts.append(f"<span>{escape(_left(hops[-1]))}</span>")
    if not hops or hops[-1]["left"]:
        waits = "waits for a replica" if way["state"] == "queued" else "is read" if way["state"] == "arriving" else "at no replica"
        parts.append(f"<span>{waits if not way['reason'] else escape(str(way['reason']))}</span>")
    return " ".join(parts)


def _left(hop: Mapping[str, Any]) -> str:
    return "moved" if hop["left"] in ("", "moved") else f"moved: {hop['left']}"


def _numbers(way: Mapping[str, Any]) -> str:
    """Return the wait for a replica, the tokens, the time until the end or until now, and when the request came."""
    queued = "" if way["queued_s"] is None else f"queued {way['queued_s']:.2f} s · "
    at = Happening(way["time"], "").clock()
    return f"{queued}{int(way['output_tokens'])} tokens · {way['total_s']:.1f} s · {at}"

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
    return f'<h2>Ways of requests <span class="quiet">the newest that moved, and the newest others</span></h2>{inner}'


def _way(way: Mapping[str, Any]) -> str:
    """Return three parts: who asked what, the replicas with the reasons, and the numbers."""
    state = str(way["state"])
    kind = "failed" if state in _FAILURES else state
    caller = "" if way["tenant"] is None else " · ".join(dict.fromkeys((str(way["tenant"]), str(way["key"]))))
    about = " · ".join(part for part in (str(way["model"]), caller) if part)
    name = escape(str(way["id"]) or "without an id")
    pill = f'<span class="state {escape(kind)}">{escape(state)}</span>'
    head = f'<b class="id" title="{name}">{name}</b> {pill} <span class="quiet">{escape(about)}</span>'
    return f'<div>{head}</div><div class="path">{_path(way["hops"], way)}</div><div class="quiet numbers">{escape(_numbers(way))}</div>'


def _path(hops: Sequence[Mapping[str, Any]], way: Mapping[str, Any]) -> str:
    """Return why the first replica was chosen, each replica with why the request left it, and what the request waits for or ended by."""
    steps = [f"<span>{escape(REASONS.get(hop['reason'], str(hop['reason'])))}</span>" for hop in hops[:1]]
    for number, hop in enumerate(hops, start=1):
        left = str(hop["left"])
        kind = ' class="left"' if left else ""
        steps.append(f"<b{kind}>{escape(short(str(hop['replica'])))}</b>")
        if left or number < len(hops):
            moved = "moved" if left in ("", "moved") else f"moved: {left}"
            steps.append(f"<span>{escape(moved if number < len(hops) else left)}</span>")
    if way["reason"]:
        steps.append(f"<span>{escape(str(way['reason']))}</span>")
    elif not hops or hops[-1]["left"]:
        waits = {"arriving": "is read and tokenized", "queued": "waits for a replica"}
        steps.append(f"<span>{waits.get(way['state'], 'had no replica')}</span>")
    return " <i>→</i> ".join(steps)


def _numbers(way: Mapping[str, Any]) -> str:
    """Return the wait for a replica, the tokens, the time until the end or until now, and when the request came."""
    queued = "" if way["queued_s"] is None else f"queued {way['queued_s']:.2f} s · "
    at = Happening(way["time"], "").clock()
    return f"{queued}{int(way['output_tokens'])} tokens · {way['total_s']:.1f} s · {at}"

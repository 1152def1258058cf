"""This module draws the fleet as HTML: tiles, a table of each model's replicas, one of the ingresses, and what happened. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from serve_app.ui.changes import Happening, Report, short

Cell = tuple[str, str]
"""CSS class and HTML of a table's cell."""


def fleet_html(report: Report) -> str:
    """Return the state of the fleet. All text from the service is escaped."""
    members = sorted(report["members"], key=lambda m: (m["role"], m["model"], m["replica_id"]))
    ingresses = [m for m in members if m["role"] == "ingress"]
    by_model: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for name in sorted({name for m in ingresses for name in m["load"].get("models", {})}):
        by_model[name] = []
    for member in members:
        if member["role"] == "replica":
            by_model[member["model"]].append(member)
    parts = [_tiles(ingresses, [m for replicas in by_model.values() for m in replicas])]
    parts += [_model(name, replicas, ingresses) for name, replicas in by_model.items()]
    parts.append(_table("Ingresses", _INGRESS, [_ingress_row(m) for m in ingresses]))
    return f'<div class="fleet">{"".join(parts)}</div>'


def happenings_html(happenings: Sequence[Happening]) -> str:
    """Return what happened, the newest first."""
    lines = [f"<li><time>{h.clock()}</time>{escape(h.text)}</li>" for h in reversed(happenings)]
    inner = f"<ol>{''.join(lines)}</ol>" if lines else '<p class="quiet">Nothing has changed since this page was opened.</p>'
    return f'<div class="fleet"><h3>What happened (UTC)</h3>{inner}</div>'


def problem_html(text: str) -> str:
    return f'<div id="fleet-problem" role="alert">{escape(text)}</div>'


def _tiles(ingresses: Sequence[Mapping[str, Any]], replicas: Sequence[Mapping[str, Any]]) -> str:
    ready = sum(m["state"] == "ready" for m in replicas)
    draining = len(replicas) - ready
    tiles = [
        (str(ready), f"replica{'s' * (ready != 1)} ready" + (f", {draining} draining" if draining else "")),
        (str(sum(m["load"].get("streams", 0) for m in ingresses)), "requests at the ingresses"),
        (str(sum(m["load"]["running"] for m in replicas)), "running on engines"),
        (str(sum(m["load"]["waiting"] for m in replicas) + _total(ingresses, "waiting")), "waiting"),
        (str(_total(ingresses, "resumptions")), "answers resumed"),
    ]
    inner = "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles)
    return f'<div class="tiles">{inner}</div>'


def _total(ingresses: Iterable[Mapping[str, Any]], count: str, model: str | None = None) -> int:
    """Return the sum of a count over the ingresses, for one model or for all."""
    loads = [load for m in ingresses for name, load in m["load"].get("models", {}).items() if model in (None, name)]
    return sum(load[count] for load in loads)


_REPLICA = ("replica", "state", "address", "running", "waiting", "KV cache", "steps", "started in")
_INGRESS = ("ingress", "state", "address", "requests", "waiting", "resumed", "moved")


def _model(name: str, replicas: Sequence[Mapping[str, Any]], ingresses: Sequence[Mapping[str, Any]]) -> str:
    waiting = _total(ingresses, "waiting", name)
    queue = f' <span class="quiet">{waiting} waiting for a replica</span>' if waiting else ""
    canary = next((c for m in ingresses if (c := m["load"].get("models", {}).get(name, {}).get("canary"))), None)
    if canary is not None:
        state = f"canary of {canary['of']}, {canary['state']} after {canary['requests']} requests {canary['reason']}"
        queue += f' <span class="quiet">{escape(state)}</span>'
    return _table(escape(name) + queue, _REPLICA, [_replica_row(m) for m in replicas])


def _replica_row(member: Mapping[str, Any]) -> list[Cell]:
    load = member["load"]
    usage = max(0.0, min(1.0, float(load["kv_usage"])))
    bar = f'<span class="bar"><i style="width:{usage:.0%}"></i></span>{usage:.0%}'
    start = f"{load['start_s']:.0f} s" if "start_s" in load else ""
    numbers = [("number", str(int(load[name]))) for name in ("running", "waiting")]
    return [*_common(member), *numbers, ("", bar), ("number", str(int(load["steps"]))), ("number", start)]


def _ingress_row(member: Mapping[str, Any]) -> list[Cell]:
    counts = (_total([member], count) for count in ("waiting", "resumptions", "moved"))
    return [*_common(member), *(("number", str(count)) for count in (member["load"].get("streams", 0), *counts))]


def _common(member: Mapping[str, Any]) -> list[Cell]:
    state = escape(member["state"])
    address = escape(f"{member['host']}:{member['port']}")
    return [("", escape(short(member["replica_id"]))), ("", f'<span class="state {state}">{state}</span>'), ("address", address)]


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    if not rows:
        return f'<h3>{title}</h3><p class="quiet">none</p>'
    kinds = [cell[0] for cell in rows[0]]
    head = "".join(f'<th class="{kind}">{column}</th>' for kind, column in zip(kinds, columns, strict=True))
    cells = (("".join(f'<td class="{kind}">{text}</td>' for kind, text in row)) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<h3>{title}</h3><div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

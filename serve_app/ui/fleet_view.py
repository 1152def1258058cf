"""This module draws the fleet as HTML: counts, a picture of each model's replicas, a table of the ingresses, and what happened. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from serve_app.ui.changes import Happening, short
from serve_app.ui.replicas import Replica, Report, models_of, others, ready_of, replicas_of, span, target_of

Cell = tuple[str, str]
"""CSS class and HTML of a table's cell."""

MAX_DOTS = 24
"""A replica's picture has a dot for each request, up to this many; the rest is a number."""


def fleet_html(report: Report) -> str:
    """Return the state of the fleet. All text from the service is escaped."""
    ingresses = sorted((m for m in report["members"] if m["role"] == "ingress"), key=lambda m: str(m["replica_id"]))
    replicas = {name: replicas_of(report, name) for name in models_of(report)}
    parts = [_tiles(report, ingresses, replicas)]
    parts += [_model(report, name, of_model, ingresses) for name, of_model in replicas.items()]
    parts.append(_table("Ingresses", _INGRESS, [_ingress_row(m) for m in ingresses]))
    return f'<div class="fleet">{"".join(parts)}</div>'


def happenings_html(happenings: Sequence[Happening]) -> str:
    """Return what happened, the newest first."""
    lines = [f"<li><time>{h.clock()}</time>{escape(h.text)}</li>" for h in reversed(happenings)]
    inner = f"<ol>{''.join(lines)}</ol>" if lines else '<p class="quiet">Nothing has changed since this page was opened.</p>'
    return f'<div class="fleet"><h3>What happened (UTC)</h3>{inner}</div>'


def problem_html(text: str) -> str:
    return f'<div id="fleet-problem" role="alert">{escape(text)}</div>'


def _tiles(report: Report, ingresses: Sequence[Mapping[str, Any]], replicas: Mapping[str, Sequence[Replica]]) -> str:
    """Return how many replicas are ready, and the way of requests: how many are at each station now."""
    count = Counter(replica.state for of_model in replicas.values() for replica in of_model)
    loads = [replica.member["load"] for of_model in replicas.values() for replica in of_model if replica.member is not None]
    targets = [target_of(report, name) for name in replicas]
    known = [target for target in targets if target is not None]
    of = f" of {sum(known)}" if known and len(known) == len(targets) else ""
    tiles = [
        ("", f"{count['ready']}{of}", ", ".join([f"replica{'s' * (count['ready'] != 1 or of != '')} ready", *others(count)])),
        (" way", str(sum(m["load"].get("streams", 0) for m in ingresses)), "requests at the ingresses"),
        (" way", str(_total(ingresses, "waiting")), "wait for a replica"),
        (" way", str(sum(load["waiting"] for load in loads)), "wait in engines"),
        ("", str(sum(load["running"] for load in loads)), "running on engines"),
        ("", str(_total(ingresses, "resumptions")), "answers resumed"),
    ]
    inner = "".join(f'<div class="tile{kind}"><b>{value}</b><span>{label}</span></div>' for kind, value, label in tiles)
    return f'<div class="tiles">{inner}</div>'


def _total(ingresses: Iterable[Mapping[str, Any]], count: str, model: str | None = None) -> int:
    """Return the sum of a count over the ingresses, for one model or for all."""
    loads = [load for m in ingresses for name, load in m["load"].get("models", {}).items() if model in (None, name)]
    return sum(load[count] for load in loads)


_INGRESS = ("ingress", "state", "address", "requests", "waiting", "resumed", "moved")


def _model(report: Report, name: str, replicas: Sequence[Replica], ingresses: Sequence[Mapping[str, Any]]) -> str:
    notes = [ready_of(report, name)] if replicas or target_of(report, name) is not None else []
    if waiting := _total(ingresses, "waiting", name):
        notes.append(f"{waiting} waiting for a replica")
    canary = next((c for m in ingresses if (c := m["load"].get("models", {}).get(name, {}).get("canary"))), None)
    if canary is not None:
        notes.append(f"canary of {canary['of']}, {canary['state']} after {canary['requests']} requests {canary['reason']}")
    title = escape(name) + "".join(f' <span class="quiet">{escape(note)}</span>' for note in notes)
    if not replicas:
        return f'<h3>{title}</h3><p class="quiet">none</p>'
    return f'<h3>{title}</h3><div class="cards">{"".join(_card(replica, report["time"]) for replica in replicas)}</div>'


def _card(replica: Replica, now: float) -> str:
    """Return the picture of one replica: its requests as dots, its KV cache as a bar, its age, and what it does."""
    name, state = escape(short(replica.replica_id)), escape(replica.state)
    head = f'<div class="head"><b>{name}</b><span class="state {state}">{state}</span></div>'
    doing = f"<p>{escape(replica.doing)}</p>"
    if replica.member is None:
        progress = "" if replica.started is None else _bar("start", replica.started)
        return f'<div class="card {state}">{head}{doing}{progress}</div>'
    member, load = replica.member, replica.member["load"]
    facts = [f"{member['host']}:{member['port']}", f"{int(load['steps'])} steps"]
    if member.get("epoch"):  # nanoseconds since the epoch, when the replica began to serve
        facts.insert(0, f"serves for {span(now - member['epoch'] / 1e9)}")
    if "start_s" in load:
        facts.append(f"started in {load['start_s']:.0f} s")
    picture = _dots(int(load["running"]), int(load["waiting"])) + doing + _bar("KV cache", float(load["kv_usage"]))
    return f'<div class="card {state}">{head}{picture}<small>{escape(" · ".join(facts))}</small></div>'


def _dots(running: int, waiting: int) -> str:
    """Return a full dot for each running request and an empty one for each that waits in the engine's queue."""
    full = min(running, MAX_DOTS)
    empty = min(waiting, MAX_DOTS - full)
    more = f"<span>+{running + waiting - full - empty}</span>" if running + waiting > full + empty else ""
    said = f"{running} running, {waiting} waiting"
    return f'<div class="dots" role="img" aria-label="{said}" title="{said}">{"<i></i>" * full}{"<u></u>" * empty}{more}</div>'


def _bar(label: str, share: float) -> str:
    percent = f"{max(0.0, min(1.0, share)):.0%}"
    bar = f'<span class="bar"><i style="width:{percent}"></i></span>'
    return f'<div class="meter"><span>{label}</span>{bar}<span>{percent}</span></div>'


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

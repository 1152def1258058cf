"""This module draws the fleet as HTML: counts, ways of requests, a card for each replica and ingress, and what happened. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from serve_app.ui.changes import Happening, short
from serve_app.ui.replicas import Replica, Report, models_of, ready_of, ready_of_all, replicas_of, span, target_of
from serve_app.ui.ways import ways_html

MAX_DOTS = 24
"""A replica's card has a dot for each request, up to this many; the rest is a number."""
MAX_EMPTY_DOTS = 8
"""The most of these dots that are for requests in the engine's queue."""


def fleet_html(report: Report, ways: Mapping[str, Any] | None = None) -> str:
    """Return the state of the fleet, with the answer to `/fleet/requests` if there is one. All text from the service is escaped."""
    ingresses = sorted((m for m in report["members"] if m["role"] == "ingress"), key=lambda m: str(m["replica_id"]))
    replicas = {name: replicas_of(report, name) for name in models_of(report)}
    parts = [_tiles(report, ingresses, replicas), "" if ways is None else ways_html(ways)]
    parts += [_model(report, name, of_model, ingresses) for name, of_model in replicas.items()]
    parts.append(_cards("Ingresses", [_ingress(m) for m in ingresses]))
    return f'<div class="fleet">{"".join(parts)}</div>'


def happenings_html(happenings: Sequence[Happening]) -> str:
    """Return what happened, the newest first."""
    lines = [f"<li><time>{h.clock()}</time>{escape(h.text)}</li>" for h in reversed(happenings)]
    inner = f"<ol>{''.join(lines)}</ol>" if lines else '<p class="quiet">Nothing has changed since this page was opened.</p>'
    return f'<div class="fleet"><h2>What happened (UTC)</h2>{inner}</div>'


def problem_html(text: str) -> str:
    return f'<div id="fleet-problem" role="alert">{escape(text)}</div>'


def _tiles(report: Report, ingresses: Sequence[Mapping[str, Any]], replicas: Mapping[str, Sequence[Replica]]) -> str:
    """Return how many replicas are ready, and the way of requests: how many are at each station now."""
    loads = [replica.member["load"] for of_model in replicas.values() for replica in of_model if replica.member is not None]
    stations = [
        (sum(m["load"].get("streams", 0) for m in ingresses), "requests at the ingresses"),
        (_total(ingresses, "waiting"), "wait for a replica"),
        (sum(load["waiting"] for load in loads), "wait in engines"),
        (sum(load["running"] for load in loads), "running on engines"),
    ]
    way = "".join(_tile(str(value), label) for value, label in stations)
    resumed = _tile(str(_total(ingresses, "resumptions")), "answers resumed")
    return f'<div class="tiles">{_tile(*ready_of_all(report), kind=" whole")}<div class="way">{way}</div>{resumed}</div>'


def _tile(value: str, label: str, *, kind: str = "") -> str:
    return f'<div class="tile{kind}"><b>{value}</b><span>{label}</span></div>'


def _total(ingresses: Iterable[Mapping[str, Any]], count: str, model: str | None = None) -> int:
    """Return the sum of a count over the ingresses, for one model or for all."""
    loads = [load for m in ingresses for name, load in m["load"].get("models", {}).items() if model in (None, name)]
    return sum(load[count] for load in loads)


def _model(report: Report, name: str, replicas: Sequence[Replica], ingresses: Sequence[Mapping[str, Any]]) -> str:
    notes = [ready_of(report, name)] if replicas or target_of(report, name) is not None else []
    if waiting := _total(ingresses, "waiting", name):
        notes.append(f"{waiting} waiting for a replica")
    canary = next((c for m in ingresses if (c := m["load"].get("models", {}).get(name, {}).get("canary"))), None)
    if canary is not None:
        notes.append(f"canary of {canary['of']}, {canary['state']} after {canary['requests']} requests {canary['reason']}")
    title = escape(name) + "".join(f' <span class="quiet">{escape(note)}</span>' for note in notes)
    return _cards(title, [_replica(replica, report["time"]) for replica in replicas])


def _cards(title: str, cards: Sequence[str]) -> str:
    inner = f'<div class="cards">{"".join(cards)}</div>' if cards else '<p class="quiet">none</p>'
    return f"<h2>{title}</h2>{inner}"


def _replica(replica: Replica, now: float) -> str:
    """Return the card of one replica: its requests as dots, what it does, its KV cache as a bar, its age."""
    doing = f"<p>{escape(replica.doing)}</p>"
    if replica.member is None:
        progress = "" if replica.started is None else _bar("start", replica.started)
        return _card(replica.replica_id, replica.state, doing + progress)
    member, load = replica.member, replica.member["load"]
    facts = [_address(member), f"{int(load['steps'])} steps"]
    if member.get("epoch"):  # nanoseconds since the epoch, when the replica began to serve
        facts.insert(0, f"serves for {span(now - member['epoch'] / 1e9)}")
    if "start_s" in load:
        facts.append(f"started in {load['start_s']:.0f} s")
    picture = _dots(int(load["running"]), int(load["waiting"])) + doing + _bar("KV cache", float(load["kv_usage"]))
    return _card(replica.replica_id, replica.state, picture, facts)


def _ingress(member: Mapping[str, Any]) -> str:
    requests = int(member["load"].get("streams", 0))
    waiting, resumed, moved = (_total([member], count) for count in ("waiting", "resumptions", "moved"))
    said = f"{requests} request{'s' * (requests != 1)}, {waiting} waiting for a replica"
    return _card(
        member["replica_id"], member["state"], f"<p>{said}</p>", [_address(member), f"{resumed} resumed", f"{moved} moved"]
    )


def _address(member: Mapping[str, Any]) -> str:
    return f"{member['host']}:{member['port']}"


def _card(member_id: str, state: str, inner: str, facts: Sequence[str] = ()) -> str:
    kind = escape(state)
    head = f'<div class="head"><b>{escape(short(member_id))}</b><span class="state {kind}">{kind}</span></div>'
    below = f"<small>{escape(' · '.join(facts))}</small>" if facts else ""
    return f'<div class="card {kind}">{head}{inner}{below}</div>'


def _dots(running: int, waiting: int) -> str:
    """Return a full dot for each running request and an empty one for each that waits in the engine's queue."""
    if not running and not waiting:
        return ""
    empty = min(waiting, MAX_EMPTY_DOTS)
    full = min(running, MAX_DOTS - empty)
    more = f"<span>+{running + waiting - full - empty}</span>" if running + waiting > full + empty else ""
    said = f"{running} running, {waiting} waiting"
    return f'<div class="dots" role="img" aria-label="{said}" title="{said}">{"<i></i>" * full}{"<u></u>" * empty}{more}</div>'


def _bar(label: str, share: float) -> str:
    percent = f"{max(0.0, min(1.0, share)):.0%}"
    bar = f'<span class="bar"><i style="width:{percent}"></i></span>'
    return f'<div class="meter"><span>{label}</span>{bar}<span>{percent}</span></div>'

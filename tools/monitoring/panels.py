"""These classes write panels of Grafana dashboards, and lay them out: rows of 24 columns, in the given order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

JOB = 'job=~"$namespace/$release-ingress"'
"""Selects the ingresses of the chosen release."""
MODEL = f'{JOB},model=~"$model"'
VLLM = f'{JOB},model_name=~"$model"'
RATE = "$__rate_interval"

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24
_LINK = {"asDropdown": False, "icon": "external link", "includeVars": False, "keepTime": False, "tags": [], "targetBlank": False}
_LINK |= {"tooltip": ""}
"""The fields that Grafana's schema requires in each link."""
Kind = Literal["timeseries", "stat", "table"]


@dataclass(frozen=True)
class Panel:
    """One panel. ``shown``: legend -> expression.

    ``limits``: the values at which the panel turns yellow and red; if the second is the smaller one, low values are bad. ``quiet``: whether
    the panel may be empty in a healthy service, because nothing of its kind has happened.
    """

    title: str
    shown: dict[str, str]
    unit: str
    text: str
    kind: Kind = "timeseries"
    limits: Sequence[float | str] = ()
    quiet: bool = False
    width: int = 8
    height: int = 8

    def made(self, panel_id: int, x: int, y: int) -> dict[str, Any]:
        """Return the panel as Grafana reads it."""
        instant = self.kind != "timeseries"
        targets = [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend, "instant": instant, "range": not instant}
            for i, (legend, expr) in enumerate(self.shown.items())
        ]
        defaults: dict[str, Any] = {"unit": self.unit, "min": 0, "noValue": "nothing"}
        if self.limits:
            defaults["thresholds"] = {"mode": "absolute", "steps": _steps(self.limits)}
            defaults["color"] = {"mode": "thresholds" if self.kind == "stat" else "palette-classic"}
            defaults["custom"] = {} if self.kind != "timeseries" else {"thresholdsStyle": {"mode": "dashed"}}
        return {
            "id": panel_id,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "datasource": _SOURCE,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": _OPTIONS[self.kind],
            "targets": targets,
        }


_OPTIONS: dict[Kind, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi"},
    },
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background", "graphMode": "area", "textMode": "auto"},
    "table": {"showHeader": True},
}


def _steps(limits: Sequence[float | str]) -> list[dict[str, Any]]:
    """Return Grafana's steps. Each step counts from its value upwards."""
    yellow, red = limits
    if isinstance(yellow, str) or isinstance(red, str) or yellow <= red:
        return [{"color": "green", "value": None}, {"color": "yellow", "value": yellow}, {"color": "red", "value": red}]
    return [{"color": "red", "value": None}, {"color": "yellow", "value": red}, {"color": "green", "value": yellow}]


@dataclass(frozen=True)
class Row:
    """A row of panels below a heading, which is the question that they answer."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Board:
    """A dashboard. Its uid ends with ``name``."""

    name: str
    title: str
    rows: Sequence[Row]

    def made(self, uid: str) -> dict[str, Any]:
        """Return the dashboard as Grafana reads it."""
        release = 'label_values(serve_app_outstanding_tokens{namespace="$namespace"}, app_kubernetes_io_instance)'
        chosen = [
            {"name": "datasource", "type": "datasource", "query": "prometheus"},
            variable("namespace", "label_values(serve_app_outstanding_tokens, namespace)"),
            variable("release", release),
            variable("model", f"label_values(serve_app_outstanding_tokens{{{JOB}}}, model)", several=True),
        ]
        return {
            "title": f"serve-app: {self.title}",
            "uid": f"{uid}-{self.name}",
            "schemaVersion": 39,
            "editable": True,
            "graphTooltip": 1,
            "time": {"from": "now-1h", "to": "now"},
            "refresh": "30s",
            "tags": ["serve-app"],
            "links": [
                {
                    **_LINK,
                    "type": "dashboards",
                    "title": "Dashboards",
                    "tags": ["serve-app"],
                    "includeVars": True,
                    "keepTime": True,
                },
                {**_LINK, "type": "link", "title": "Runbook", "url": "${runbook}", "icon": "doc", "targetBlank": True},
            ],
            "templating": {"list": chosen},
            "panels": list(_laid_out(self.rows)),
        }


def variable(name: str, query: str, *, several: bool = False) -> dict[str, Any]:
    """Return a variable whose values come from a query; with ``several``, all of them are chosen at first."""
    made = {"name": name, "type": "query", "datasource": _SOURCE, "query": {"query": query, "refId": name}, "refresh": 2}
    return made | {"includeAll": several, "multi": several} | ({"current": {"text": "All", "value": "$__all"}} if several else {})


def _laid_out(rows: Iterable[Row]) -> Iterable[dict[str, Any]]:
    y, panel_id = 0, 0
    for row in rows:
        panel_id += 1
        yield {
            "id": panel_id,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
        }
        x, y = 0, y + 1
        height = 0
        for panel in row.panels:
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            panel_id += 1
            yield panel.made(panel_id, x, y)
            x, height = x + panel.width, max(height, panel.height)
        y += height


def rate(series: str, by: str, selector: str = MODEL, window: str = RATE) -> str:
    """Return events per second."""
    return f"sum by ({by}) (rate({series}{{{selector}}}[{window}]))"


def increase(series: str, by: str, selector: str = MODEL, over: str = "sum") -> str:
    """Return whole events within a point of the plot: Prometheus extrapolates to the ends of the window, by which 1 becomes 1.15."""
    return f"round({over} by ({by}) (increase({series}{{{selector}}}[{RATE}])))"


def quantiles(series: str, by: str, selector: str, shown: Sequence[float] = (0.5, 0.95, 0.99)) -> dict[str, str]:
    """Return a line for each quantile of a histogram. Its legend has the labels of ``by``, if there are any."""
    labels = [label.strip() for label in by.split(",") if label.strip()]
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    grouped = ", ".join(["le", *labels])
    return {
        f"{legend} p{q * 100:g}".strip(): f"histogram_quantile({q}, sum by ({grouped}) (rate({series}_bucket{{{selector}}}[{RATE}])))"
        for q in shown
    }

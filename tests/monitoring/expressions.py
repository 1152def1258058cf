"""This module finds the PromQL expressions of rules and dashboards, and the series that they ask for."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import promql_parser
import yaml

from serve_app.autoscaling.series import PREFIX, SERIES
from tools.monitoring.boards import BOARDS, board_file
from tools.monitoring.facts import default_facts, filled
from tools.monitoring.panels import Board, Panel
from tools.monitoring.rules import rules_file

FACTS = default_facts(namespace="local", release="serve-app")
CHOSEN = {"$namespace": "local", "$release": "serve-app", "$model": ".*", "$__rate_interval": "30s"}
"""What Grafana puts in place of variables."""

MADE_BY_PROMETHEUS = {"up", "ALERTS"}
OF_DCGM = {f"DCGM_FI_DEV_{name}" for name in ("XID_ERRORS", "GPU_UTIL", "FB_USED", "GPU_TEMP", "POWER_USAGE")}
OF_DCGM |= {"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_FAILURE"}
"""Default fields of NVIDIA's exporter (docs.nvidia.com/datacenter/dcgm, "DCGM Exporter Metrics"); a fleet without GPUs has none."""
OF_THE_AUTOSCALER = {f"ray_{PREFIX}{name}" for name in SERIES}
"""Through Ray's metrics agent, which `serve-app up` does not start."""
OF_RAYS_NODES = {"ray_node_mem_used", "ray_node_mem_total"}
"""Through the same agent (ray/dashboard/modules/reporter/reporter_agent.py)."""
ELSEWHERE = OF_DCGM | OF_THE_AUTOSCALER | OF_RAYS_NODES
"""Series that no ingress serves."""
SUFFIXES = ("_bucket", "_sum", "_count")


class Expression(NamedTuple):
    """``quiet``: it may be without data in a healthy service."""

    where: str
    promql: str
    quiet: bool = False


class Selector(NamedTuple):
    """A series that an expression asks for."""

    name: str
    text: str
    labels: frozenset[str]


def rules() -> list[dict[str, str]]:
    """Return all rules with default values."""
    groups = yaml.safe_load(filled(rules_file(), FACTS))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def rule_expressions() -> Iterator[Expression]:
    """Yield the expression of every rule; an alert that does not fire has no data."""
    for rule in rules():
        yield Expression(rule.get("record") or rule["alert"], rule["expr"], quiet="alert" in rule)


def panels() -> Iterator[tuple[Board, Panel]]:
    """Yield the panels as they are written down."""
    for board in BOARDS:
        for row in board.rows:
            for panel in row.panels:
                yield board, panel


def panel_expressions() -> Iterator[Expression]:
    """Yield every expression of every panel, with the variables filled in."""
    for board, panel in panels():
        for promql in panel.shown.values():
            yield Expression(f"{board.name}: {panel.title}", chosen(filled(promql, FACTS)), panel.quiet)


def variable_queries() -> Iterator[str]:
    """Yield the selectors in the queries of the dashboards' variables."""
    for board in BOARDS:
        for variable in json.loads(filled(board_file(board), FACTS))["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((.+), \w+\)", variable["query"]["query"])
                assert found is not None
                yield chosen(found[1])


def chosen(promql: str) -> str:
    """Return the expression with Grafana's variables filled in."""
    for name, value in CHOSEN.items():
        promql = promql.replace(name, value)
    return promql


def selectors(promql: str) -> list[Selector]:
    """Return the series that an expression asks for.

    Raises:
        ValueError: It is no PromQL.
    """
    found: list[Selector] = []

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            labels = frozenset(matcher.name for matcher in node.matchers.matchers)
            found.append(Selector(node.name or "", node.prettify(), labels))
        return True

    promql_parser.walk(promql_parser.parse(promql), visit)
    return found


def grouped_labels(promql: str) -> set[str]:
    """Return the labels that an expression groups or joins by."""
    return {
        label.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", promql) for label in group.split(",") if label.strip()
    }

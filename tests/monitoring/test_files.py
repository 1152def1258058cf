"""tools/monitoring makes the rules and dashboards of helm/serve-app, and a person can read them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.v1.metrics import loggers
from vllm.v1.metrics.buckets import histogram_buckets

from serve_app.books.series import TABLE, TTFT_BOUNDS_S
from tests.monitoring.expressions import (
    ELSEWHERE,
    FACTS,
    MADE_BY_PROMETHEUS,
    OF_THE_AUTOSCALER,
    SUFFIXES,
    grouped_labels,
    panel_expressions,
    panels,
    rule_expressions,
    rules,
    selectors,
    variable_queries,
)
from tools.monitoring import docs
from tools.monitoring.boards import BOARDS, board_file
from tools.monitoring.facts import CHART, DASHBOARDS, RULES, filled
from tools.monitoring.rules import rules_file

RUNBOOK = docs.PAGE.with_name("runbook.md")
OF_THE_PROCESS = {"process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes"}
OF_THE_PROCESS |= {"process_open_fds", "process_max_fds"}
OF_A_GPU = {"Hostname", "gpu", "namespace", "pod", "exported_namespace", "exported_pod"}
OF_A_WISH = {"rule"}
OF_A_NODE = {"RayNodeType", "pod"}
TARGET_LABELS = {"job", "instance", "namespace", "app_kubernetes_io_instance", "alertname", "alertstate"}


def all_promql() -> Iterator[str]:
    yield from (expression.promql for expression in (*rule_expressions(), *panel_expressions()))
    yield from variable_queries()


def test_the_files_are_what_the_code_makes() -> None:
    assert RULES.read_text() == rules_file()
    assert {path.name: path.read_text() for path in DASHBOARDS.iterdir()} == {f"{b.name}.json": board_file(b) for b in BOARDS}
    assert docs.PAGE.read_text() == docs.renewed(docs.PAGE.read_text())


def test_every_series_that_is_asked_for_exists() -> None:
    """By the table of ours and the source of vLLM's; a live service is asked in tests/e2e_fleet/test_observed.py."""
    ours = {series.shown for series in TABLE} | {f"{s.shown}{end}" for s in TABLE if s.kind == "histogram" for end in SUFFIXES}
    theirs = Path(loggers.__file__).read_text(encoding="utf-8")
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = {selector.name for promql in all_promql() for selector in selectors(promql)}
    others = asked - ours - recorded - OF_THE_PROCESS - ELSEWHERE - MADE_BY_PROMETHEUS
    assert {name for name in others if f'name="{re.sub("_(bucket|count|sum|total)$", "", name)}"' not in theirs} == set()
    assert len(asked & ours) > 20


def test_every_series_of_the_autoscaler_is_on_its_dashboard() -> None:
    shown = [e.promql for e in panel_expressions() if e.where.startswith("autoscaling: ")]
    assert OF_THE_AUTOSCALER - {selector.name for promql in shown for selector in selectors(promql)} == set()


def test_a_release_is_never_chosen_by_what_a_name_begins_with() -> None:
    """The pods of `demo-2` begin like those of `demo`."""
    begins_with = re.compile(r"\$\{?release\}?-?\.[*+]")
    assert [promql for _, panel in panels() for promql in panel.shown.values() if begins_with.search(promql)] == []


def test_every_label_that_is_asked_for_exists() -> None:
    known = (
        {"le", "model_name", "source"}.union(*(series.labels for series in TABLE))
        | TARGET_LABELS
        | OF_A_GPU
        | OF_A_WISH
        | OF_A_NODE
    )
    for promql in all_promql():
        matched = set().union(*(selector.labels for selector in selectors(promql)))
        assert (grouped_labels(promql) | matched) - known == set(), promql


def test_every_panel_says_what_it_shows_and_in_which_unit() -> None:
    for board, panel in panels():
        assert panel.title, board.name
        assert panel.text.endswith("."), panel.title
        assert panel.unit, panel.title
        assert panel.kind != "stat" or panel.limits, panel.title


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_a_dashboard_has_room_for_its_panels(board: Any) -> None:
    made = json.loads(filled(board_file(board), FACTS))
    places = [p["gridPos"] for p in made["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [p["id"] for p in made["panels"]]
    assert len(ids) == len(set(ids))
    steps = [
        s["value"]
        for p in made["panels"]
        for s in p.get("fieldConfig", {}).get("defaults", {}).get("thresholds", {}).get("steps", ())
    ]
    assert all(value is None or isinstance(value, int | float) for value in steps)
    assert "${datasource}" in json.dumps(made)
    assert set(re.findall(r"\$\{\w+\}", json.dumps(made))) == {"${datasource}"}


def test_every_alert_leads_to_a_dashboard_and_a_section_of_the_runbook() -> None:
    headings = set(re.findall(r"^### (ServeApp\w+)$", RUNBOOK.read_text(), re.MULTILINE))
    assert {rule["alert"] for rule in rules() if "alert" in rule} == headings
    uids = {f"serve-app-{board.name}" for board in BOARDS}
    boards: list[Any] = [rule["annotations"] for rule in rules() if "alert" in rule]
    assert {re.findall(r"/d/([\w-]+)\?", told["dashboard_url"])[0] for told in boards} <= uids


def test_the_limits_of_objectives_are_bounds_of_the_histograms() -> None:
    """A limit between two bounds would match no bucket, and its objective would never be missed."""
    slo = json.loads((CHART / "values.schema.json").read_text())["properties"]["monitoring"]["properties"]["slo"]["properties"]
    default = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["slo"]
    for key, bounds in (("ttft", TTFT_BOUNDS_S), ("itl", histogram_buckets("inter_token_latency"))):
        assert {*slo[key]["properties"]["seconds"]["enum"], default[key]["seconds"]} <= set(bounds)

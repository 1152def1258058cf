"""Prometheus's own tool judges the rules: each alert fires with the series of its case, and not with those beside it."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.cases import CASES, Case, Series
from tests.monitoring.expressions import FACTS, OF_DCGM, chosen, grouped_labels, rule_expressions, rules, selectors
from tools.monitoring.alerts import ALERTS
from tools.monitoring.decisions import DECISIONS
from tools.monitoring.facts import filled
from tools.monitoring.gpus import GPUS
from tools.monitoring.overview import OVERVIEW
from tools.monitoring.panels import Row
from tools.monitoring.rules import rules_file
from tools.monitoring.shared import LOST
from tools.observe import tool

promtool = pytest.mark.skipif(
    tool("promtool") is None,
    reason="promtool is neither on the PATH nor in build/prometheus; run tools/fetch-prometheus build/prometheus",
)


def test_every_alert_has_a_case_and_every_case_an_alert() -> None:
    assert list(CASES) == [alert.name for alert in ALERTS]


def test_every_expression_is_promql_and_keeps_the_job() -> None:
    for expression in rule_expressions():
        # A GPU's job is that of the exporter on its node; the expression joins it with pods of the release.
        asked = [selector for selector in selectors(expression.promql) if selector.name not in OF_DCGM]
        assert asked
        assert all("job" in selector.labels for selector in asked), expression
        assert "job" in grouped_labels(expression.promql)


def test_every_alert_says_how_grave_it_is_and_where_to_go_on() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert {alert["labels"]["severity"] for alert in alerts} == {"critical", "warning"}  # type: ignore[index]
    for alert in alerts:
        told: Any = alert["annotations"]
        assert told["summary"].endswith(".")
        assert told["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert told["dashboard_url"].startswith("/d/serve-app-")


def fires(name: str, case: Case) -> list[dict[str, Any]]:
    """Return what Prometheus must tell of the alert."""
    (rule,) = [rule for rule in rules() if rule.get("alert") == name]
    annotations: Any = rule["annotations"]
    link = annotations["dashboard_url"].replace("{{ $labels.model }}", case.labels.get("model", ""))
    labels = {"job": "local/serve-app-ingress", **rule["labels"], **case.labels}  # type: ignore[dict-item]
    return [{"exp_labels": labels, "exp_annotations": {**annotations, "summary": case.summary, "dashboard_url": link}}]


def asked(name: str, given: Series, case: Case, expected: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": f"{name} {'fires' if expected else 'is calm'}",
        "interval": "10m" if case.slow else "1m",
        "input_series": [{"series": series, "values": values} for series, values in given.items()],
        "alert_rule_test": [{"eval_time": f"{case.at}m", "alertname": name, "exp_alerts": expected}],
    }


def shows(
    folder: Path, row: Row, title: str, given: Series, expected: Mapping[str, float], *, legend: str = "", at: str = "0m"
) -> None:
    """Assert that an expression of a panel has these values, by labels, where Prometheus has the given series.

    Args:
        legend: How the legend of the expression begins; "" for the only expression of a panel.
        at: When it is asked, with a value of each series every 5 s.
    """
    (panel,) = [panel for panel in row.panels if panel.title == title]
    (promql,) = [promql for name, promql in panel.shown.items() if name.startswith(legend)]
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    test = {
        "interval": "5s",
        "input_series": [{"series": series, "values": value} for series, value in given.items()],
        "promql_expr_test": [{"expr": chosen(promql), "eval_time": at, "exp_samples": samples}],
    }
    (folder / "tests.yaml").write_text(yaml.safe_dump({"evaluation_interval": "5s", "tests": [test]}, width=10_000))
    done = subprocess.run([str(tool("promtool")), "test", "rules", str(folder / "tests.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
@pytest.mark.parametrize("prefix", ["", "exported_"], ids=["honoured", "exported"])
def test_the_row_of_gpus_shows_those_of_the_releases_own_pods(tmp_path: Path, prefix: str) -> None:
    """`serve-app-2` is another release, whose pods' names begin like this one's."""

    def of(pod: str, gpu: int) -> str:
        exporter = 'namespace="gpus",pod="dcgm-x",' if prefix else ""
        return f'DCGM_FI_DEV_GPU_TEMP{{{exporter}{prefix}namespace="local",{prefix}pod="{pod}",Hostname="n1",gpu="{gpu}"}}'

    def up(release: str, pod: str) -> str:
        return f'up{{job="local/{release}-ray",namespace="local",pod="{pod}"}}'

    own, other = "serve-app-abcde-model-chat-worker-x", "serve-app-2-abcde-model-chat-worker-x"
    given = {of(own, 0): "40", of(other, 1): "50", up("serve-app", own): "1", up("serve-app-2", other): "1"}
    shows(tmp_path, GPUS, "Temperature", given, {'{Hostname="n1", gpu="0"}': 40})


@promtool
def test_the_overview_counts_alerts_of_gpus_too(tmp_path: Path) -> None:
    """They have the job of the release's other pods. Of another release, and of what does not fire yet, nothing."""
    alerts = [("local/serve-app-ingress", "ServeAppDown", "firing"), ("local/serve-app-ray", "ServeAppGpuFails", "firing")]
    alerts += [("local/serve-app-2-ray", "ServeAppGpuFails", "firing"), ("local/serve-app-ray", "ServeAppGpuIsHot", "pending")]
    given = {f'ALERTS{{job="{job}",alertname="{name}",alertstate="{state}"}}': "1" for job, name, state in alerts}
    shows(tmp_path, OVERVIEW.rows[0], "Alerts that fire", given, {"{}": 2})


@promtool
def test_lost_engines_are_whole_numbers(tmp_path: Path) -> None:
    """Prometheus's increase() of the counter from 3 to 4 is 1.2 here: it extrapolates 25 s to the window of 30 s."""
    given = {'serve_app_engines_lost_total{job="local/serve-app-ingress",model="m",reason="engine_died"}': "3 3 3 3 4 4 4"}
    expected = {'{model="m", reason="engine_died"}': 1}
    shows(tmp_path, OVERVIEW.rows[3], LOST.title, given, expected, legend="engine of", at="32s")


@promtool
def test_the_rule_of_the_last_decision_is_shown_at_the_number_asked_for(tmp_path: Path) -> None:
    """Also the ingresses', and of another release nothing."""
    told = {
        ("serve-app", "chat"): {"because,queue": "0", "because,demand": "1", "desired": "3"},
        ("serve-app", "(ingresses)"): {"because,streams": "1", "desired": "2"},
        ("serve-app-2", "chat"): {"because,queue": "1", "desired": "9"},
    }
    given = {}
    for (release, model), values in told.items():
        for what, value in values.items():
            name, _, rule = what.partition(",")
            labels = f'job="local/{release}-ray",model="{model}",WorkerId="a"' + (f',rule="{rule}"' if rule else "")
            given[f"ray_serve_app_autoscaling_{name}{{{labels}}}"] = value
    expected = {'{model="chat", rule="demand"}': 3, '{model="(ingresses)", rule="streams"}': 2}
    shows(tmp_path, DECISIONS, "Which rule decided", given, expected)


@promtool
@pytest.mark.parametrize("slow", [False, True], ids=["minutes", "days"])
def test_each_alert_fires_when_it_should_and_not_when_it_should_not(tmp_path: Path, slow: bool) -> None:
    cases = {name: case for name, case in CASES.items() if case.slow is slow}
    tests = [asked(name, case.fires, case, fires(name, case)) for name, case in cases.items()]
    tests += [
        asked(name, calm, case, []) for name, case in cases.items() for calm in (case.calm, case.calm_too) if calm is not None
    ]
    (tmp_path / "rules.yaml").write_text(filled(rules_file(), FACTS))
    every = "10m" if slow else "1m"
    rules = yaml.safe_load((tmp_path / "rules.yaml").read_text())
    # In the file's order, records first. In promtool's own, which is another each time, an alert may find the record of ten minutes ago,
    # and that is too old for it.
    order = [group["name"] for group in rules["groups"]]
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": every, "group_eval_order": order, "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(file, width=10_000))
    done = subprocess.run([str(tool("promtool")), "test", "rules", str(tmp_path / "tests.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

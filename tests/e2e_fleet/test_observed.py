"""These tests compare /metrics of a running fleet with the table; a real Prometheus finds data for each rule and panel."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve_app.books.series import TABLE
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.operations import MODEL, Fleet, scrape
from tests.e2e_fleet.streams import completion, play
from tests.monitoring.expressions import (
    ELSEWHERE,
    MADE_BY_PROMETHEUS,
    SUFFIXES,
    panel_expressions,
    rule_expressions,
    rules,
    selectors,
    variable_queries,
)
from tools.observe import prometheus, tool, write_prometheus

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PORT = 8049
DATA_LIMIT_S = 90.0
ONLY_WHEN_USED = {"serve_app_key_requests_total", "serve_app_canary_state", "serve_app_batches", "serve_app_batch_lines_total"}
ONLY_WHEN_USED |= {f"serve_app_key_{what}_seconds{end}" for what in ("ttft", "tpot", "e2e") for end in SUFFIXES}
ONLY_WHEN_USED |= {f"serve_app_tenant_{what}_total" for what in ("tokens", "gpu_seconds", "refusals")}
ONLY_WHEN_USED |= {"serve_app_hand_overs_total", "serve_app_tenant_longest_wait_seconds", "serve_app_tenant_wait_limit_seconds"}
ONLY_WHEN_USED |= {f"serve_app_resume_gap_seconds{end}" for end in SUFFIXES}
"""Series without samples in a fleet that has no API keys, canary or batches, and lost nothing."""


def types(fleet: Fleet) -> dict[str, str]:
    """Return the kind of every series, as one ingress reports it."""
    text = httpx.get(f"{fleet.url}/metrics", timeout=10).text
    return {name: kind for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE) if not name.endswith("_created")}


def test_the_table_has_every_series_with_its_kind_and_labels(elastic: Fleet) -> None:
    assert all(a.is_complete() for a in play(elastic.url, [completion(MODEL, max_tokens=5)]))
    served = types(elastic)
    assert {name: kind for name, kind in served.items() if name.startswith("serve_app_")} == {s.shown: s.kind for s in TABLE}
    labels = {s.shown: set(s.labels) for s in TABLE}
    for name, of_sample in scrape(elastic.url):
        family = name if name in labels else re.sub("_(bucket|sum|count|created)$", "", name)
        if name.startswith("serve_app_") and not name.endswith("_created"):
            assert {label for label, _ in of_sample} - {"le"} == labels[family], name


def test_every_series_of_rules_and_dashboards_is_served(elastic: Fleet) -> None:
    served = types(elastic)
    known = {f"{name}{end}" for name, kind in served.items() if kind == "histogram" for end in SUFFIXES} | served.keys()
    known |= {rule["record"] for rule in rules() if "record" in rule} | MADE_BY_PROMETHEUS
    known |= ELSEWHERE
    promql = [*(e.promql for e in (*rule_expressions(), *panel_expressions())), *variable_queries()]
    assert {selector.name for expression in promql for selector in selectors(expression)} - known == set()


class Asked:
    """A Prometheus that scrapes the fleet."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=20).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def has(self, promql: str) -> bool:
        return bool(self.get("query", query=promql)["result"])


@pytest.fixture(scope="module")
def asked(elastic: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    if tool("prometheus") is None:
        pytest.skip("prometheus is neither on the PATH nor in build/prometheus; run tools/fetch-prometheus build/prometheus")
    config = write_prometheus(tmp_path_factory.mktemp("prometheus"), elastic.url.removeprefix("http://"), every_s=1)
    with prometheus(config, PORT):
        yield Asked(f"http://127.0.0.1:{PORT}")


def test_every_panel_and_rule_has_data_under_load(elastic: Fleet, asked: Asked) -> None:
    wanted = {e.promql: e.where for e in (*panel_expressions(), *rule_expressions()) if not e.quiet}
    may_be_empty = [e.promql for e in (*panel_expressions(), *rule_expressions()) if e.quiet]
    for expression in may_be_empty:
        for selector in selectors(expression):
            if selector.name not in ONLY_WHEN_USED | MADE_BY_PROMETHEUS | ELSEWHERE:
                wanted[selector.text] = selector.text

    def all_have_data() -> bool:
        # Prometheus asks one of the two ingresses: so many connections that it has requests, too.
        assert all(a.is_complete() for a in play(elastic.url, [completion(MODEL, max_tokens=20)] * 8))
        for promql in [promql for promql in wanted if asked.has(promql)]:
            del wanted[promql]
        return not wanted

    try:
        wait_until(all_have_data, limit_s=DATA_LIMIT_S, what="data for every expression", every_s=2.0)
    except AssertionError as exc:
        raise AssertionError(f"no data after {DATA_LIMIT_S} s: {sorted(wanted.values())}") from exc
    for expression in may_be_empty:
        asked.has(expression)  # it is understood; a healthy fleet has nothing to show there


def test_prometheus_has_every_rule_and_none_of_them_fails(asked: Asked) -> None:
    found = [rule for group in asked.get("rules")["groups"] for rule in group["rules"]]
    assert sorted(rule["name"] for rule in found) == sorted(rule.get("record") or rule["alert"] for rule in rules())
    assert {rule["name"]: rule["lastError"] for rule in found if rule.get("lastError")} == {}

"""This module puts the file of rules together."""

from typing import Any

import yaml

from tools.monitoring.alerts import ALERTS
from tools.monitoring.slo import records

MADE = "# Made by `make monitoring-files` (tools/monitoring). The chart fills in ${...}.\n"


def groups() -> list[dict[str, Any]]:
    """Return the groups of rules. Prometheus runs the rules of a group in their order."""
    return [
        {"name": "serve-app-${release}-slo", "interval": "30s", "rules": list(records())},
        {"name": "serve-app-${release}-alerts", "rules": [alert.rule() for alert in ALERTS]},
    ]


def rules_file() -> str:
    """Return the text of files/monitoring/rules.yaml."""
    return MADE + yaml.safe_dump({"groups": groups()}, sort_keys=False, width=10_000)

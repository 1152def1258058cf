"""`Alert` is an alert, and writes itself for Prometheus."""

from typing import Any, Literal, NamedTuple

IN_JOB = 'job="${job}"'
"""Selects the series of one release's ingresses."""

RUNBOOK = "${runbook}"


class Alert(NamedTuple):
    """An alert. ``wait``: how long the expression must hold. ``board``: its dashboard. ``model``: whether the alert has that label."""

    name: str
    severity: Literal["critical", "warning"]
    wait: str
    expr: str
    summary: str
    board: str = "overview"
    model: bool = True

    def rule(self) -> dict[str, Any]:
        """Return the rule as Prometheus reads it."""
        seen = f"{self.board}?var-namespace=${{namespace}}&var-release=${{release}}"
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "runbook_url": f"{RUNBOOK}#{self.name.lower()}",
                "dashboard_url": f"${{grafana}}/d/${{uid}}-{seen}" + ("&var-model={{ $labels.model }}" if self.model else ""),
            },
        }

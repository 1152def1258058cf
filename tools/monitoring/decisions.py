"""These panels show what the autoscaler measures and decides, by the series of `serve_app/autoscaling/series.py`.

The autoscaler runs in Serve's controller and sends its series to Ray's metrics agent, which the PodMonitor `RELEASE-ray` scrapes.
``serve-app up`` starts no such agent, so these panels are empty there.
"""

from serve_app.autoscaling.fleet import INGRESSES
from serve_app.autoscaling.series import PREFIX
from tools.monitoring.panels import Panel, Row

# [(] in place of a backslash: JSON, PromQL and the regular expression would each need another one.
_SCALED = f'job=~"$namespace/$release-ray",model=~"$model|{INGRESSES.replace("(", "[(]").replace(")", "[)]")}"'
"""Selects the chosen models, and the ingresses, which are not a model and so cannot be chosen."""


def _reported(series: str, by: str = "model") -> str:
    # max, because an ended controller's series stay in the agent for a while, beside those of the next controller.
    return f"max by ({by}) (ray_{PREFIX}{series}{{{_SCALED}}})"


DECISIONS = Row(
    "Why that many? (on Kubernetes only: serve-app up runs no metrics agent)",
    (
        Panel(
            "Demand, replicas asked for, replicas that serve",
            {
                "{{model}} demand": _reported("demand"),
                "{{model}} asked for": _reported("desired"),
                "{{model}} serve": _reported("ready"),
            },
            "short",
            "Demand is the work that arrives, in replicas that would be busy all the time. More replicas are asked for, because a "
            "replica that is always busy is slow. If fewer serve than are asked for, for longer than a cold start, replicas do not start: "
            "see serve-app status. While the demand is unknown, its last value is shown.",
            quiet=True,
            width=16,
        ),
        Panel(
            "Which rule decided",
            {
                "{{model}}: {{rule}}": f"({_reported('because', 'model, rule')} == 1) * on (model) group_left () {_reported('desired')}"
            },
            "short",
            "A line for the rule of the last decision, at the number of replicas asked for. docs/autoscaling.md describes the rules; "
            "serve-app autoscale explain has the quantities.",
            quiet=True,
        ),
        Panel(
            "Replicas that each rule asks for",
            {"{{model}} {{rule}}": f"{_reported('wish', 'model, rule')} > 0"},
            "short",
            "The largest number counts, within replicas.min, replicas.max and autoscaling.max_gpus. A rule without a line asks for no "
            "replica.",
            quiet=True,
        ),
        Panel(
            "Utilization, aimed at and seen",
            {"{{model}} aimed at": _reported("utilization_target"), "{{model}} seen": _reported("utilization")},
            "percentunit",
            "Share of the time that a replica works. If seen is above aimed at for longer than a cold start, replicas do not start, or "
            "replicas.max is reached. Seen is 0 while no replica serves.",
            quiet=True,
        ),
        Panel(
            "Cold start that the autoscaler expects",
            {"{{model}}": _reported("cold_start_seconds")},
            "s",
            "From the order of a replica until it serves: the 90th percentile of the starts, and more while a present start takes longer.",
            quiet=True,
        ),
    ),
)

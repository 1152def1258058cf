"""These panels show what the autoscaler measures and decides, by the series of `serve_app/autoscaling/series.py`.

The autoscaler runs in Serve's controller and tells its series to Ray's metrics agent, which the PodMonitor `RELEASE-ray` scrapes.
``serve-app up`` starts no such agent: there these panels are empty.
"""

from serve_app.autoscaling.fleet import INGRESSES
from serve_app.autoscaling.series import PREFIX
from tools.monitoring.panels import Panel, Row

# [(] and not a backslash: JSON, PromQL and the regular expression would each take one of several.
_SCALED = f'job=~"$namespace/$release-ray",model=~"$model|{INGRESSES.replace("(", "[(]").replace(")", "[)]")}"'
"""Selects the chosen models and the ingresses, which are no model and so never among the chosen ones."""


def _told(series: str, by: str = "model") -> str:
    # max: an ended controller's series stay in the agent for a while, beside those of the next one.
    return f"max by ({by}) (ray_{PREFIX}{series}{{{_SCALED}}})"


DECISIONS = Row(
    "Why that many? (on Kubernetes only: serve-app up runs no metrics agent)",
    (
        Panel(
            "Demand, replicas asked for, replicas that serve",
            {"{{model}} demand": _told("demand"), "{{model}} asked for": _told("desired"), "{{model}} serve": _told("ready")},
            "short",
            "Demand is the work that arrives, in replicas that would be busy all the time. More replicas than that are asked for, as a "
            "replica that is always busy is slow. If fewer serve than are asked for, for longer than a cold start, replicas do not start: "
            "see serve-app status. A demand that is not known at present stays at its last value.",
            quiet=True,
            width=16,
        ),
        Panel(
            "Which rule decided",
            {"{{model}}: {{rule}}": f"({_told('because', 'model, rule')} == 1) * on (model) group_left () {_told('desired')}"},
            "short",
            "A line for the rule of the last decision, at the number of replicas asked for. docs/autoscaling.md says what each rule asks "
            "for; serve-app autoscale explain has the quantities.",
            quiet=True,
        ),
        Panel(
            "Replicas that each rule asks for",
            {"{{model}} {{rule}}": f"{_told('wish', 'model, rule')} > 0"},
            "short",
            "The largest wish counts, within replicas.min, replicas.max and autoscaling.max_gpus. A rule without a line asks for none.",
            quiet=True,
        ),
        Panel(
            "Utilization, aimed at and seen",
            {"{{model}} aimed at": _told("utilization_target"), "{{model}} seen": _told("utilization")},
            "percentunit",
            "Share of the time that a replica works on what arrives. Seen above aimed at, for longer than a cold start: replicas do not "
            "start, or replicas.max is reached. Seen is 0 while no replica serves.",
            quiet=True,
        ),
        Panel(
            "Cold start that the autoscaler expects",
            {"{{model}}": _told("cold_start_seconds")},
            "s",
            "From the order of a replica until it serves: the 90th percentile of the starts, and more while one on its way takes longer.",
            quiet=True,
        ),
    ),
)

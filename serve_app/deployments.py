"""The deployments of a configuration in Serve's eyes: their names, and by which rule each is scaled. Pure."""

import hashlib
from typing import NamedTuple

from serve_app.config import ModelSettings, Settings

INGRESS = "ingress"


class ScalingRule(NamedTuple):
    """A deployment has as many replicas, min to max, as bring the statistic per replica to the target."""

    stat: str
    """Name in the ingresses' ``record_autoscaling_stats``."""
    target: int
    min: int
    max: int


def replica_deployment(model: ModelSettings) -> str:
    """Return the Serve deployment's name.

    A model's name may hold characters that Serve's may not. Where one is replaced, a hash keeps `a/b` and `a:b` apart; it is a
    function of this name alone, or another model in the file would rename, and so restart, this one.
    """
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in model.name)
    if plain != model.name:
        plain += "-" + hashlib.sha256(model.name.encode()).hexdigest()[:6]
    return f"replica-{plain}"


def scaling_rules(settings: Settings) -> dict[str, ScalingRule]:
    """Return deployment name -> rule for those that may scale."""
    rules = {}
    for model in settings.models:
        s = model.replicas
        if s.min != s.max:
            stat = f"outstanding_tokens/{model.name}"
            rules[replica_deployment(model)] = ScalingRule(stat, s.target_outstanding_tokens, s.min, s.max)
    i = settings.ingress.replicas
    if i.min != i.max:
        rules[INGRESS] = ScalingRule("streams", i.target_streams, i.min, i.max)
    return rules

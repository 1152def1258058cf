"""These tests check that serve-app accepts the configuration for all sides of the live comparison of routing policies."""

from pathlib import Path

from benchmarks.routing_live import CHOSEN, SPLIT, config_of
from serve_app.config import parse_settings


def test_each_side_has_four_replicas() -> None:
    settings = parse_settings(config_of(Path("/models/tiny"), list(CHOSEN), 8100, 2.0))
    replicas = {name: (model.replicas.min, model.routing.by) for name, model in settings.models.items()}
    assert replicas == {"load": (4, "load"), "prefix": (4, "prefix")} | dict.fromkeys(SPLIT, (1, "prefix"))
    assert [CHOSEN["round robin"]("client", number) for number in range(5)] == [*SPLIT, SPLIT[0]]

"""These fixtures configure the fleets of this folder like those of tests/e2e_fleet."""

from tests.e2e_fleet.conftest import checkpoint, configure

__all__ = ["checkpoint", "configure"]

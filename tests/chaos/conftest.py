"""The fleets of this folder are configured as those of tests/e2e_fleet."""

from tests.e2e_fleet.conftest import checkpoint, configure

__all__ = ["checkpoint", "configure"]

"""This script makes docs/configuration.md and docs/tenants.schema.json from the models that check the files.

Run as `python -m tools.reference`; tests/docs/test_docs.py fails if a file is outdated.
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from loadtest.plan.reference import table
from serve_app.config.adapters import AdapterSettings
from serve_app.config.health import HealthSettings
from serve_app.config.ingress import BatchSettings, IngressScalingSettings, IngressSettings, LedgerSettings
from serve_app.config.kv import KvSettings
from serve_app.config.links import MembershipSettings, ProtocolSettings, TlsSettings
from serve_app.config.logs import LogSettings
from serve_app.config.model import CanarySettings, GoldenPrompt, MediaSettings, ModelSettings
from serve_app.config.oidc import OidcSettings
from serve_app.config.pools import PoolBounds, PoolsSettings
from serve_app.config.routing import RoutingSettings
from serve_app.config.scaling import ScalingSettings
from serve_app.config.schedule import ScheduledBounds
from serve_app.config.settings import AutoscalingSettings, Settings, TimeoutSettings
from serve_app.config.simulated import SimulatedSettings
from serve_app.config.sleep import SleepSettings
from serve_app.config.tenants_file import (
    KeySettings,
    TenantDeadlines,
    TenantLimits,
    TenantSettings,
    TenantsFile,
    tenants_json_schema,
)
from serve_app.config.tracing import TracingSettings
from serve_app.config.ui import UiSettings

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
TENANTS_SCHEMA = PAGE.with_name("tenants.schema.json")
SECTIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The file", "", Settings),
    ("models", "Under each model's name.", ModelSettings),
    ("models: replicas", "", ScalingSettings),
    ("replicas: schedule", "A list.", ScheduledBounds),
    ("models: routing", "", RoutingSettings),
    ("models: simulated", "", SimulatedSettings),
    ("models: adapters", "Under each adapter's name.", AdapterSettings),
    ("models: golden", "A list.", GoldenPrompt),
    ("models: media", "", MediaSettings),
    ("models: kv", "", KvSettings),
    ("models: pools", "", PoolsSettings),
    ("pools: prefill, pools: decode", "", PoolBounds),
    ("models: sleep", "", SleepSettings),
    ("models: canary", "", CanarySettings),
    ("ingress", "", IngressSettings),
    ("ingress: replicas", "", IngressScalingSettings),
    ("ingress: ledger", "", LedgerSettings),
    ("ingress: batch", "", BatchSettings),
    ("ingress: oidc", "", OidcSettings),
    ("The tenants file", "See docs/tenants.md.", TenantsFile),
    ("tenants", "Under each tenant's name.", TenantSettings),
    ("tenants: keys", "A list.", KeySettings),
    ("tenants: limits", "", TenantLimits),
    ("tenants: deadlines", "", TenantDeadlines),
    ("timeouts", "", TimeoutSettings),
    ("health", "", HealthSettings),
    ("autoscaling", "", AutoscalingSettings),
    ("protocol", "", ProtocolSettings),
    ("protocol: tls", "", TlsSettings),
    ("membership", "", MembershipSettings),
    ("tracing", "", TracingSettings),
    ("logs", "", LogSettings),
    ("ui", "", UiSettings),
)
LEFT_OUT = frozenset({"JsonValue"})
"""Definitions of the JSON Schema that are described where they are used."""
_HEAD = """# Every key of the configuration

Made by `python -m tools.reference` from the models that check the file. `serve-app config schema` prints the same as a JSON Schema,
by which an editor checks a file as it is written; `serve-app check FILE` names each mistake.
[Examples](../examples/README.md) are there to begin with.
Units are in the names: `_s` seconds, `_gib` GiB. `engine_args` and `frontend_args` hold vLLM's own arguments.
"""


def page() -> str:
    """Return docs/configuration.md."""
    return "\n".join([_HEAD, *(line for section in SECTIONS for line in _section(*section))])


def tenants_schema() -> str:
    """Return docs/tenants.schema.json."""
    return json.dumps(tenants_json_schema(), indent=2) + "\n"


def _section(title: str, words: str, model: type[BaseModel]) -> Iterator[str]:
    yield from (f"## {title}", "", f"{words} {inspect.getdoc(model) or ''}".strip().replace("``", "`"), "", *table(model), "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    TENANTS_SCHEMA.write_text(tenants_schema(), encoding="utf-8")

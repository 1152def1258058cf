"""The config room is the configuration: one YAML file, read once at the entry point, then passed down as frozen values.

Units are in the names. `settings.py` has the whole file, and the other modules have the sections. `checks.py` words refusals,
`vllm_arguments.py` checks vLLM's arguments, and `timeouts.py` checks the order of all timeouts.
`keys_file.py` reads the file of tenants (`tenants_file.py`) or of API keys (`api_keys_file.py`), which the ingress reads again when it
changes. These three modules are imported by their own names.
"""

from serve_app.config.adapters import AdapterSettings
from serve_app.config.base import Int, Real, Section
from serve_app.config.files import EXAMPLE, from_here, read_text
from serve_app.config.health import HealthSettings
from serve_app.config.ingress import BatchSettings, IngressSettings, LedgerSettings
from serve_app.config.kv import KvSettings
from serve_app.config.links import MembershipSettings, ProtocolSettings, TlsSettings
from serve_app.config.model import GoldenPrompt, ModelSettings
from serve_app.config.oidc import OidcSettings
from serve_app.config.settings import (
    Settings,
    cluster_token,
    default_cache_dir,
    inherited_environment,
    load_settings,
    mapping_in,
    parse_settings,
    problems,
    settings_json_schema,
)
from serve_app.config.simulated import SimulatedSettings
from serve_app.config.tracing import TracingSettings
from serve_app.config.ui import UiSettings

__all__ = [
    "EXAMPLE",
    "AdapterSettings",
    "BatchSettings",
    "GoldenPrompt",
    "HealthSettings",
    "IngressSettings",
    "Int",
    "KvSettings",
    "LedgerSettings",
    "MembershipSettings",
    "ModelSettings",
    "OidcSettings",
    "ProtocolSettings",
    "Real",
    "Section",
    "Settings",
    "SimulatedSettings",
    "TlsSettings",
    "TracingSettings",
    "UiSettings",
    "cluster_token",
    "default_cache_dir",
    "from_here",
    "inherited_environment",
    "load_settings",
    "mapping_in",
    "parse_settings",
    "problems",
    "read_text",
    "settings_json_schema",
]

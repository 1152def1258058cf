"""The log shows the configuration whole, except for values that may be secrets."""

import json
import logging

import pytest

from serve_app.application import build
from serve_app.config import parse_settings
from serve_app.host.logs import log_configuration, masked

MODEL = {"model": "org/big", "engine_args": {"max_num_batched_tokens": 2048, "tokenizer": "org/words"}}


def test_the_configuration_is_logged_with_its_defaults_and_without_its_secrets(caplog: pytest.LogCaptureFixture) -> None:
    values = {
        "models": {"big": {**MODEL, "env": {"HF_TOKEN": "hf_secret", "OMP_NUM_THREADS": "4"}}},
        "ingress": {"api_keys_file": "/run/keys"},
    }
    settings = parse_settings(values)
    with caplog.at_level(logging.INFO, logger="serve_app"):
        log_configuration(settings)
    (line,) = caplog.messages
    logged = json.loads(line.removeprefix("configuration: "))
    assert "hf_secret" not in line
    model = logged["models"]["big"]
    assert model["env"] == {"HF_TOKEN": "***", "OMP_NUM_THREADS": "***"}
    assert model["engine_args"] == {"max_num_batched_tokens": 2048, "tokenizer": "org/words", "scheduling_policy": "priority"}
    assert logged["ingress"]["api_keys_file"] == "/run/keys"
    assert (logged["timeouts"]["drain_s"], logged["tracing"]) == (600.0, None)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"api_key": "s3cret"}, {"api_key": "***"}),
        ({"a": [{"client-secret": "s3cret"}]}, {"a": [{"client-secret": "***"}]}),
        ({"model": "https://user:s3cret@host/m"}, {"model": "https://***@host/m"}),
        ({"cluster_token_file": "/run/token"}, {"cluster_token_file": "/run/token"}),
        ({"max_tokens": 5, "token": None}, {"max_tokens": 5, "token": None}),
    ],
)
def test_what_may_be_a_secret_is_masked(value: object, shown: object) -> None:
    assert masked(value) == shown


@pytest.mark.parametrize(("logs", "encoding"), [({"format": "json"}, "JSON"), ({"format": "text"}, None)])
def test_the_format_is_serves_own_for_ingresses_and_replicas(logs: dict[str, str], encoding: str | None) -> None:
    root = build({"models": {"big": {"model": "org/big"}}, "logs": logs})
    bound = [root, *(a for a in root._bound_deployment.init_args if hasattr(a, "_bound_deployment"))]
    configs = [deployment._bound_deployment._deployment_config.logging_config for deployment in bound]
    assert [config and config["encoding"] for config in configs] == [encoding, encoding]


def test_no_replica_is_replaced_for_a_change_of_traces() -> None:
    def replica(tracing: object) -> object:
        root = build({"models": {"big": {"model": "org/big"}}, "tracing": tracing})
        return root._bound_deployment.init_args[1]._bound_deployment.init_args

    assert replica({"endpoint": "http://c/v1/traces"}) == replica({"endpoint": "http://other/v1/traces", "share": 1.0})

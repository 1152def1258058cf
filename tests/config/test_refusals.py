"""A wrong configuration is refused in fixed words, and nothing but a ConfigError escapes."""

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import config
from serve_app.config import parse_settings
from serve_app.config.model import NAME_PATTERN
from serve_app.errors import ConfigError
from tests.config.helpers import LLAMA, ONE_PER_NODE, refusal

OIDC = {"issuer": "https://login.example.org", "audience": "serve-app", "tenant_claim": "groups"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"ingres": {}}, "ingres: unknown key; did you mean ingress?"),
        ({"ingress": {"prot": 8011}}, "ingress.prot: unknown key; did you mean port?"),
        ({"ingress": {"ledger": {"dir": "/l", "max_byte": 5}}}, "ingress.ledger.max_byte: unknown key; did you mean max_bytes?"),
        ({"timeouts": {"drain": 5}}, "timeouts.drain: unknown key; did you mean drain_s?"),
        (
            {"ingress": {"replicas": {"target_stream": 5}}},
            "ingress.replicas.target_stream: unknown key; did you mean target_streams?",
        ),
        ({"model": {}}, "model: unknown key; write models: {NAME: {model: WEIGHTS}}"),
        ({"membership": {"q": 1}}, "membership.q: unknown key; known here: expiry_s, renew_s"),
        ({8010: {}}, "8010: the key 8010 is not a string; put it in quotes"),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_nearest_key(sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        parse_settings({"models": {"llama": LLAMA}, **sections})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"ingress": {"port": 16**5000}},
            "ingress.port: is a number of thousands of digits, but should be less than or equal to 65535",
        ),
        *[
            (
                sections,
                f"{path}: is a number of thousands of digits, but should be a mapping; write {{min: 1, max: 1}}",
            )
            for path, sections in {
                "ingress.replicas": {"ingress": {"replicas": 16**5000}},
                "models.a.replicas": {"models": {"a": LLAMA | {"replicas": 16**5000}}},
            }.items()
        ],
        ({"name": 16**5000}, "name: is a number of thousands of digits, but should be a valid string; write it in quotes"),
        ({"name": 10**70}, f"name: is 1{'0' * 56}..., but should be a valid string; write it in quotes"),
        ({"name": 7}, 'name: is 7, but should be a valid string; write "7" in quotes'),
        ({"timeouts": {"drain_s": [16**5000]}}, "timeouts.drain_s: is a list too large to show, but should be a valid number"),
        (
            {
                "models": {
                    "a": LLAMA | {"simulated": {"profile": "a10g-llama-8b"}, "engine_args": {"max_num_batched_tokens": 10**400}}
                }
            },
            "health.eject_after_s: is 8, and a simulated step of a takes up to inf s: it would be taken for hung; "
            "set it well above inf, or lower simulated.time_scale",
        ),
    ],
)
def test_an_integer_that_no_file_can_hold_is_refused_too(sections: Any, said: str) -> None:
    """JSON, as in the arguments of a Serve application, bounds none."""
    assert refusal(**sections) == said


def test_every_ingress_of_an_update_has_a_link_to_each_replica() -> None:
    ingress = {"replicas": {"min": 1, "max": 33}}
    assert refusal(ingress=ingress) == (
        "protocol.max_ingresses: is 64, and ingress.replicas.max is 33: an update has up to 66 ingresses at once, and a replica would "
        "refuse the links of the last ones; set it to 66 or more, or lower ingress.replicas.max"
    )
    settings = parse_settings({"models": {"llama": LLAMA}, "ingress": ingress, "protocol": {"max_ingresses": 66}})
    assert settings.ingress.replicas.max == 33
    assert refusal(ingress={"replicas": {"max": 513}}).endswith("links of the last ones; set ingress.replicas.max to 512 or less")
    most = {"ingress": {"replicas": {"max": 512}}, "protocol": {"max_ingresses": 1024}}
    assert parse_settings({"models": {"llama": LLAMA}, **most}).ingress.replicas.max == 512


@pytest.mark.parametrize(
    ("section", "key", "value", "way_out"),
    [
        ("timeouts", "drain_s", "10m", "the unit is seconds, as the name says: write 600"),
        ("timeouts", "drain_s", "1.5 h", "the unit is seconds, as the name says: write 5400"),
        ("membership", "renew_s", "250ms", "the unit is seconds, as the name says: write 0.25"),
        ("timeouts", "drain_s", "600", "the unit is seconds, as the name says: write 600"),
        ("timeouts", "drain_s", "a while", "the unit is seconds, as the name says"),
        ("timeouts", "drain_s", "10 MB", "the unit is seconds, as the name says"),
        ("protocol", "max_frame_bytes", "64 MiB", "the unit is bytes, as the name says: write 67108864"),
        ("protocol", "max_frame_bytes", "64M", "the unit is bytes, as the name says: write 64000000"),
        ("ingress", "port", "8011", "give a plain number without unit: write 8011"),
    ],
)
def test_a_number_with_a_unit_is_refused_with_the_number_to_write(section: str, key: str, value: str, way_out: str) -> None:
    said = refusal(**{section: {key: value}})
    assert said.startswith(f"{section}.{key}: is {value!r}, but should be a valid ")
    assert said.endswith(f"; {way_out}")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"models": {}}, "models: is {}, but should have at least 1 item"),
        ({"models": {"a": {}}}, "models.a.model: is missing; add `model:`"),
        ({"models": {"a/b.c": {}}}, 'models["a/b.c"].model: is missing; add `model:`'),
        ({"models": {"a": None}}, "models.a: has no value; give it one, or remove the key to get the default"),
        ({"models": {4: LLAMA}}, "models.4: the name 4 is not a string; put it in quotes"),
        (
            {"models": {"-a": LLAMA}},
            f"models.-a: the name '-a' does not match {NAME_PATTERN}; for example my-model",
        ),
        (
            {"models": [{"name": "llama", "model": "/m"}]},
            "models: is a list, but should be a mapping by name; write `llama:` in place of `- name: llama`",
        ),
        ({"ingress": None}, "ingress: has no value; give it one, or remove the key to get the default"),
        ({"ingress": "port:8010"}, "ingress: is 'port:8010', but should be a mapping; write a space after the colon: port: 8010"),
        (
            {"ingress": "here"},
            "ingress: is 'here', but should be a mapping; write its keys on lines of their own below, indented",
        ),
        ({"ingress": {"drain_s": 5}}, "ingress.drain_s: unknown key; put it under timeouts"),
        ({"models": {"a": LLAMA | {"ttft_slo_s": 1}}}, "models.a.ttft_slo_s: unknown key; put it under models.NAME.replicas"),
        (
            {"models": {"a/b": LLAMA | {"max": 1}}},
            'models["a/b"].max: unknown key; put it under models.NAME.replicas',
        ),
        (
            {"models": {"a": LLAMA | {"seed": 1}}},
            "models.a.seed: unknown key; it is an argument of vLLM's engine: put it under models.NAME.engine_args",
        ),
        ({"ingress": {"max": 1}}, "ingress.max: unknown key; put it under ingress.replicas"),
        ({"ingress": {"models": {}}}, "ingress.models: unknown key; put it at the top level"),
        (
            {"models": {"a": LLAMA | {"required": "no way"}}},
            "models.a.required: is 'no way', but should be a valid boolean; write true or false",
        ),
        ({"ingress": {"port": 80}}, "ingress.port: is 80, but should be greater than or equal to 1024"),
        ({"ingress": {"port": 8010.5}}, "ingress.port: is 8010.5, but should be a valid integer"),
        ({"ingress": {"port": True}}, "ingress.port: is True, but should be a valid integer"),
        ({"timeouts": {"drain_s": float("inf")}}, "timeouts.drain_s: is inf, but should be a finite number"),
        (
            {"ingress": {"key_latencies": 20}},
            "ingress.key_latencies: is 20, and no request has a key; set ingress.tenants_file or ingress.api_keys_file, or 0",
        ),
        (
            {"ingress": {"oidc": OIDC}},
            "ingress.oidc: is there without tenants_file: a token has to name a tenant; "
            "set ingress.tenants_file, in which a tenant need not have keys",
        ),
        (
            {"ingress": {"tenants_file": "/t", "oidc": OIDC | {"issuer": "http://login.example.org"}}},
            "ingress.oidc.issuer: is 'http://login.example.org', and keys come by HTTPS alone; write https:// and a host, without a user",
        ),
        (
            {"ingress": {"tenants_file": "/t", "oidc": OIDC | {"jwks_url": "file:///keys"}}},
            "ingress.oidc.jwks_url: is 'file:///keys', and keys come by HTTPS alone; write https:// and a host, without a user",
        ),
        (
            {"ingress": {"tenants_file": "/t", "oidc": OIDC | {"issuer": "https://login.example.org?a=b"}}},
            "ingress.oidc.issuer: is 'https://login.example.org?a=b', and an issuer has no query; copy the claim iss of a token",
        ),
        (
            {"ingress": {"tenants_file": "/t", "oidc": OIDC | {"audience": ""}}},
            "ingress.oidc.audience: is '', but should have at least 1 character",
        ),
        ({"ingress": {"ledger": {}}}, "ingress.ledger.dir: is missing; add `dir:`"),
        (
            {"ingress": {"batch": {"dir": "b"}}},
            "ingress.batch.dir: is 'b', a relative path; write it from /: replicas have other working directories",
        ),
        (
            {"ingress": {"batch": {"dir": "/a\0b"}}},
            "ingress.batch.dir: is '/a\\x00b', and no path has a NUL in it; remove the NUL",
        ),
        (
            {"ingress": {"batch": {"dir": "/b", "max_stored_bytes": 5}}},
            "ingress.batch.max_stored_bytes: is 5 and max_file_bytes is 209715200: the largest file would never fit; "
            "set it to 209715200 or more, or lower max_file_bytes",
        ),
        (
            {"ingress": {"ledger": {"dir": "/l", "file_bytes": 1 << 30}}},
            "ingress.ledger.file_bytes: is 1073741824 and max_bytes is 1073741824: a new file would remove all earlier lines; "
            "set it to 536870912 or less, or raise max_bytes",
        ),
        (
            {"tracing": {"endpoint": "collector:4318"}},
            "tracing.endpoint: is 'collector:4318', which is not a URL of http or https; for example http://collector:4318/v1/traces",
        ),
        (
            {"tracing": {"endpoint": "http://collector:4318"}},
            "tracing.endpoint: is 'http://collector:4318', which has no path; write http://collector:4318/v1/traces",
        ),
        (
            {"tracing": {"endpoint": "https://user:secret@collector/v1/traces"}},
            "tracing.endpoint: holds a user name or a password; set OTEL_EXPORTER_OTLP_HEADERS in the ingress's environment instead",
        ),
        (
            {"tracing": {"endpoint": "http://c/v1/traces", "share": 5}},
            "tracing.share: is 5, but should be less than or equal to 1",
        ),
        (
            {"tracing": {"endpoint": "http://c/v1/traces", "trusted_networks": ["10.0.0.0/8", "10.0.0.1/8"]}},
            "tracing.trusted_networks[1]: is '10.0.0.1/8', which is not a network: 10.0.0.1/8 has host bits set; "
            "for example 10.0.0.0/8, or one address: 10.1.2.3",
        ),
        ({"name": 5}, 'name: is 5, but should be a valid string; write "5" in quotes'),
        (
            {"ingress": {"port": 8080}},
            "ingress.port: is 8080, the port of KubeRay's metrics exporter; choose another, for example 8010",
        ),
        (
            {"ingress": {"port": 8076}},
            "ingress.port: is 8076, the port of Ray's managers and agents; choose another, for example 8010",
        ),
        (
            {"protocol": {"port": 10999}},
            "protocol.port: is 10999, the port of Ray's worker processes; choose another, for example 8020",
        ),
        (
            {"models": {"llama": LLAMA | {"name": "lama"}}},
            "models.llama.name: is 'lama', but the key 'llama' is the model's name already; "
            "remove it, and rename the key if that is the wrong name",
        ),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_wanted(sections: Any, said: str) -> None:
    assert refusal(**sections) == said


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"ingress": {"replicas": {"min": 3, "max": 2}}},
            "ingress.replicas.max: min is 3 and max is 2; set max to 3 or more",
        ),
        (
            {"protocol": {"heartbeat_interval_s": 2.0, "heartbeat_timeout_s": 4.0}},
            "protocol.heartbeat_timeout_s: is 4.0 and heartbeat_interval_s is 2.0: one late heartbeat would cut the "
            "link; set it above 4.0",
        ),
        (
            {"protocol": {"send_buffer_bytes": 1 << 20}},
            "protocol.send_buffer_bytes: is 1048576 and max_frame_bytes is 67108864; set it to 67108864 or more",
        ),
        (
            {"protocol": {"host": "0.0.0.0"}},
            "protocol.host: is '0.0.0.0' and cluster_token_file is not set: anyone who reaches the port could send "
            "work; set cluster_token_file, or host: 127.0.0.1",
        ),
        (
            {"membership": {"renew_s": 3, "expiry_s": 6}},
            "membership.expiry_s: is 6.0 and renew_s is 3.0: one late renewal would end the lease; set it above 6.0",
        ),
        (
            {"health": {"probe_after_s": 8.0}},
            "health.eject_after_s: is 8.0 and probe_after_s is 8.0: an idle engine would be killed without a probe; set it well above 8.0",
        ),
        (
            {"health": {"max_step_s": 5.0}},
            "health.max_step_s: is 5.0 and eject_after_s is 8.0; set it to 8.0 or more",
        ),
        (
            {"models": {"llama": {"model": "/m", "simulated": {"profile": "a10g-llama-8b", "time_scale": 30}}}},
            "health.eject_after_s: is 8, and a simulated step of llama takes up to 27.3 s: it would be taken for hung; "
            "set it well above 27.3, or lower simulated.time_scale",
        ),
        (
            {"protocol": {"port": 8265}},
            "protocol.port: is 8265, the port of Ray's dashboard; choose another, for example 8020",
        ),
        (
            {"protocol": {"port": 80}},
            "protocol.port: is 80, which only root may open; choose another, for example 8020",
        ),
        (
            {"protocol": {"port": 8010}},
            "protocol.port: is 8010, and so is ingress.port; choose another, for example 8020",
        ),
        (
            {"protocol": {"port": 8020}},
            "models.llama.replicas_per_node: is None and protocol.port is 8020: two replicas on a node could not both have "
            "it; set replicas_per_node: 1, or protocol.port: 0",
        ),
        (
            {"protocol": {"port": 8020}, "models": {"a": ONE_PER_NODE, "b": ONE_PER_NODE}},
            "models.a.resources: is empty, protocol.port is 8020 and there are 2 models: two could share a node; "
            "give each model a Ray resource, or set protocol.port: 0",
        ),
        (
            {"ingress": {"resources": {"GPU": 1}}},
            "ingress.resources.GPU: is 1.0, but is not a custom resource; set gpus_per_replica",
        ),
        (
            {"ingress": {"api_keys_file": "keys"}},
            "ingress.api_keys_file: is 'keys', a relative path; write it from /: replicas have other working directories",
        ),
    ],
)
def test_a_contradiction_prints_both_values_and_the_way_out(sections: Any, said: str) -> None:
    assert refusal(**sections) == said


def test_all_mistakes_of_a_file_are_found_at_once() -> None:
    values = {
        "modls": [],
        "ingres": {},
        "ingress": {"prot": 1, "port": 80, "num_cpus": "many"},
        "models": {
            "a": {"nam": "a", "model": "x", "engine_args": {"max_modl_len": 5, "seed": "one"}, "gpus_per_replica": 2},
            "b": LLAMA | {"device": "cuda", "kv_cache_gib": 4.0, "engine_args": {"tensor_parallel_size": 2}},
        },
        "protocol": {"host": "0.0.0.0", "send_buffer_bytes": 1 << 20},
    }
    assert [problem.path for problem in config.problems(values)] == [
        "modls",
        "ingres",
        "models.a.nam",
        "models.a.engine_args.max_modl_len",
        "models.a.engine_args.seed",
        "models.b.engine_args.tensor_parallel_size",
        "models.b.gpus_per_replica",
        "models.b.kv_cache_gib",
        "ingress.prot",
        "ingress.port",
        "ingress.num_cpus",
        "protocol.send_buffer_bytes",
        "protocol.host",
    ]
    named = LLAMA | {"name": "x"}
    assert config.problems({"models": {"a": named}, "protocol": {"port": 8010}})[0].path == "models.a.name"
    wide = {"replicas": {"min": 3, "max": 2}}
    assert [p.path for p in config.problems({"models": {"a": LLAMA | wide, "b": named}, "ingress": wide})] == [
        "models.b.name",
        "models.a.replicas.max",
        "ingress.replicas.max",
    ]
    assert config.problems({"models": {"llama": LLAMA}}) == []


@given(
    values=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["name", "models", "ingress", "port", "simulated", "env", "x"]), inner)
        ),
        max_leaves=8,
    )
)
def test_whatever_the_file_holds_only_a_config_error_comes_out(values: Any) -> None:
    with suppress(ConfigError):
        parse_settings({"models": values, "ingress": values})
    with suppress(ConfigError):
        model = values if isinstance(values, dict) else LLAMA | {"env": values}
        parse_settings({"models": {"llama": model}, "ingress": values})

"""The names of models and weights: what people write in their place is refused with the way out."""

from typing import Any

import pytest

from serve_app.config import parse_settings, problems
from serve_app.config.checks import load_yaml
from serve_app.errors import ConfigError
from tests.config.helpers import LLAMA


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("${MODEL_PATH}", "no variable is filled in here; write the value itself"),
        ("$MODEL", "no variable is filled in here; write the value itself"),
        ("https://huggingface.co/org/name", "weights are not fetched from a web page; give the id ORG/NAME; or fetch it"),
        (
            "s3://bucket/llama",
            "serve-app reads no object store; fetch it, and give the folder's absolute path; on Kubernetes the Helm",
        ),
        ("S3:/bucket/llama", "the Helm chart's weights.downloads fetches it"),
        (
            "simulated:h100-llama-8b",
            "an accelerator is simulated, not its weights; set models.NAME.simulated: {profile: h100-llama-8b}, and here embedded:",
        ),
        ("hf:org/name", "in the form of the chart's weights.downloads; write the id alone, without hf:; or fetch it"),
        (" org/name ", "with blanks around it; remove them"),
        ("a/b/c", "neither a Hugging Face id (ORG/NAME) nor an absolute path; a path begins with /"),
        ("C:\\models\\llama", "a path of Windows; replicas run on Linux: give an absolute path there"),
        ("./llama", "a relative path; write it from /"),
    ],
)
def test_what_cannot_name_weights_is_refused(model: str, said: str) -> None:
    (problem,) = problems({"models": {"m": {"model": model}}})
    assert problem.path == "models.m.model"
    assert said in str(problem)


@pytest.mark.parametrize("model", ["org/name", "name-1.5", "org/name:Q4_K_M", "/models/a b", "embedded:tiny"])
def test_ids_and_paths_can(model: str) -> None:
    assert parse_settings({"models": {"m": {"model": model}}}).models["m"].model == model


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("010000", "010000"),
        ("10:00", "10:00"),
        ("190:20:30.15", "190:20:30.15"),
        ("8010", 8010),
        ("-1", -1),
        ("0", 0),
        ("1_000", 1000),
        ("0x10", 16),
        ("1.5", 1.5),
        ("1e-7", 1e-7),
        ("1.0e+3", 1000.0),
        (".5", 0.5),
        ("2025-02-28", "2025-02-28"),
        ("true", True),
    ],
)
def test_numbers_are_those_of_yaml_1_2(written: str, value: Any) -> None:
    read = load_yaml(f"key: {written}")["key"]
    assert (read, type(read)) == (value, type(value))


def test_a_port_with_a_zero_in_front_and_a_time_of_day_are_refused_by_name() -> None:
    values = load_yaml("ingress: {port: 010000}\ntimeouts: {drain_s: 10:00}")
    said = sorted(map(str, problems({"models": {"m": LLAMA}, **values})))
    assert said[0].startswith("ingress.port: is '010000'")
    assert "write 10000" in said[0]
    assert said[1].startswith("timeouts.drain_s: is '10:00'")
    assert "the unit is seconds" in said[1]


def test_an_alias_names_one_model_only() -> None:
    models = {"red": LLAMA | {"aliases": ["gpt-4o", "blue"]}, "blue": LLAMA | {"aliases": ["gpt-4o"]}}
    assert sorted(map(str, problems({"models": models}))) == [
        "models.blue.aliases[0]: the name 'gpt-4o' is also that of an alias or adapter of red; choose another name",
        "models.red.aliases[1]: the name 'blue' is a model's, too; choose another name",
    ]


def test_the_way_out_of_served_model_name_can_be_followed() -> None:
    with pytest.raises(ConfigError, match="its key under `models`; more names go into `aliases`"):
        parse_settings({"models": {"m": LLAMA | {"engine_args": {"served_model_name": "gpt-4o"}}}})


@pytest.mark.parametrize(
    "origin", ["app.example.com", "https://app.example.com/", "https://app.example.com/page", "https://*.example.com"]
)
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    (problem,) = problems({"models": {"m": LLAMA}, "ingress": {"cors_origins": [origin]}})
    assert "write scheme and host alone" in str(problem)

"""The configuration reads its examples, defaults, file and token file, and each of its keys is documented."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from serve_app import config
from serve_app.config import Settings, checks, cluster_token, load_settings, parse_settings, settings_json_schema, tenants_file
from serve_app.errors import ConfigError
from tests.config.helpers import LLAMA, ONE_PER_NODE

UNFIT = "not valid YAML: a value does not fit its tag; remove tags such as !!bool"
TOO_LARGE = "not valid YAML: an integer of more than 64 bits; put it in quotes if it is text"
EXAMPLES = sorted(Path(__file__, "../../../examples").resolve().glob("*.yaml"))


def test_one_model_is_a_complete_file() -> None:
    settings = parse_settings({"models": {"llama": LLAMA}})
    assert (settings.name, settings.ingress.port, settings.models["llama"].replicas.max) == ("serve-app", 8010, 1)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_each_example_is_valid_and_survives_a_round_trip_as_json(path: Path) -> None:
    settings = load_settings(path)
    assert parse_settings(json.loads(settings.model_dump_json())) == settings


def test_a_replicas_port_may_be_fixed_where_a_node_has_one_replica() -> None:
    models = {name: ONE_PER_NODE | {"resources": {name: 1}} for name in ("a", "b")}
    assert parse_settings({"models": models, "protocol": {"port": 8020}}).protocol.port == 8020
    gpu = LLAMA | {"device": "cuda", "gpus_per_replica": 1}
    assert parse_settings({"models": {"llama": gpu}, "protocol": {"port": 8020}}).protocol.port == 8020


def test_settings_are_values() -> None:
    settings = parse_settings({"models": {"llama": LLAMA}})
    with pytest.raises(ValueError, match="frozen"):
        settings.ingress.port = 9000  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "{file} is empty; start with `models:`; examples/cpu.yaml is complete"),
        ("- a", "{file} holds a list, not a mapping; start with `models:`; examples/cpu.yaml is complete"),
        ("models: [", "line 1, column 10: not valid YAML: expected the node content, but found '<stream end>'"),
        (
            "models:\n\t- a",
            "line 2, column 1: not valid YAML: found character '\\t' that cannot start any token; indent with spaces",
        ),
        ("ingress:\n  port: 1\n  port: 2", "ingress.port: is given twice, in lines 2 and 3; keep one of them"),
        ("models: {a: {}, a: {}}", "models.a: is given twice, in lines 1 and 1; keep one of them"),
        (
            "models:\n  m:\n    model: /m\n   device: cpu",
            "line 4, column 4: not valid YAML: expected <block end>, but found '<block mapping start>'; "
            "give keys of one mapping the same indent",
        ),
        ("models: *m", "line 1, column 9: not valid YAML: found undefined alias 'm'"),
        ("models: !!python/name:os.system", None),
        ("a: 1\n---\nb: 2", None),
        ("\x00", "not valid YAML: unacceptable character #x0000: special characters are not allowed"),
        ("models: " + "[" * 3000, "the YAML is nested too deep; remove unneeded brackets or levels"),
        (f"ingress: {{port: 0x{'F' * 5000}}}", f"line 1, column 17: {TOO_LARGE}"),
        (f"ingress: {{port: {'9' * 5000}}}", f"line 1, column 17: {TOO_LARGE}"),
        (f"models: {{a: {{revision: {'1' * 40}}}}}", f"line 1, column 24: {TOO_LARGE}"),
        *((f"name: !!{tag}", UNFIT) for tag in ("bool maybe", "int ''", "timestamp soon")),
        ("name: 0b_", "not valid YAML: invalid literal for int() with base 2: ''"),
    ],
)
def test_what_is_not_one_yaml_mapping_is_refused(tmp_path: Path, text: str, said: str | None) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_settings(file)
    if said is not None:
        assert str(refused.value) == said.format(file=file)


@pytest.mark.parametrize("written", ["1e-1", "1E-1", "1.e-1", "+1e-1", "1.0e-1"])
def test_a_number_with_an_exponent_is_one_as_to_kubernetes(tmp_path: Path, written: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"models: {{1e-1x: {{model: org/2e5-m}}}}\ntimeouts: {{no_replica_s: {written}}}")
    settings = load_settings(file)
    assert (settings.timeouts.no_replica_s, settings.models["1e-1x"].model) == (0.1, "org/2e5-m")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/absent cannot be read: No such file or directory$"):
        load_settings(tmp_path / "absent")
    (tmp_path / "latin1").write_bytes(b"name: caf\xe9")
    with pytest.raises(ConfigError, match=r"/latin1 cannot be read: not UTF-8 at byte 9$"):
        load_settings(tmp_path / "latin1")


def settings_with_token(file: Path | None) -> Settings:
    protocol = {} if file is None else {"cluster_token_file": str(file)}
    return parse_settings({"models": {"llama": LLAMA}, "protocol": protocol})


def test_the_cluster_token_is_the_file_without_its_newline(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"0123456789abcdef\n")
    assert cluster_token(settings_with_token(file)) == b"0123456789abcdef"
    assert cluster_token(settings_with_token(None)) == b""


def test_a_short_or_absent_token_is_refused_without_being_printed(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"^protocol\.cluster_token_file: .*/token cannot be read: No such file"):
        cluster_token(settings_with_token(file))
    file.write_bytes(b"0123456789abcde\n")
    with pytest.raises(ConfigError, match="holds 15 bytes, at least 16 are needed") as refused:
        cluster_token(settings_with_token(file))
    assert "abcde" not in str(refused.value)


def test_loopback_is_what_only_this_machine_reaches() -> None:
    hosts = ["127.0.0.1", "127.8.8.8", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "example.org", ""]
    assert [host for host in hosts if checks.is_loopback(host)] == ["127.0.0.1", "127.8.8.8", "::1", "localhost"]


def test_the_cache_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_CACHE", "/models")
    assert config.default_cache_dir() == Path("/models")
    monkeypatch.delenv("SERVE_APP_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert config.default_cache_dir() == Path("/home/someone/.cache/serve-app")


def sections(kind: type[BaseModel] = config.Section) -> Iterator[type[BaseModel]]:
    for section in kind.__subclasses__():
        yield section
        yield from sections(section)


def test_every_section_and_every_key_is_documented() -> None:
    # Another test may have loaded settings of other modules.
    public = [s for s in sections() if s.__module__.startswith(config.__name__)]
    assert tenants_file.TenantsFile in public
    assert len(public) == 35
    assert [section for section in public if not section.__doc__] == []
    assert [(section, key) for section in public for key, field in section.model_fields.items() if not field.description] == []


def test_the_json_schema_is_closed_and_described() -> None:
    schema = settings_json_schema()
    for section in (schema, *schema["$defs"].values()):
        if section.get("type") == "object":
            assert section["additionalProperties"] is False
            assert all("description" in key for key in section["properties"].values())

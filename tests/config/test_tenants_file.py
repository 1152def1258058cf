"""A tenants file is checked as a whole; each error names its place and the way out, and none quotes a key."""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from serve_app.config import Settings, parse_settings
from serve_app.config.checks import load_yaml
from serve_app.config.keys_file import keys_file_problems, read_keyring
from serve_app.config.tenants_file import parse_tenants, tenants_json_schema
from serve_app.core.tenants import Tenant
from serve_app.errors import ConfigError, InvalidApiKey
from tests.ingress.tenants import digest

SECRET = "sk-A-plain-key-that-no-error-may-quote"
D1, D2 = digest("one"), digest("two")
WHOLE = f"""
tenants:
  search-team:
    keys:
      - {{id: st1, sha256: {D1}, expires: 2027-01-31, scopes: [infer, batch]}}
      - {{id: st2, sha256: {D2.upper()}, revoked: 2026-12-01, scopes: [infer]}}
    models: [chat, embed]
    limits: {{max_tokens: 8192, max_context: 32768}}
    deadlines: {{first_token_s: 10, total_s: 300}}
    weight: 3
    priority: batch
  free: {{}}
"""
NESTED = "tenants: {a: &x0 [1]}\n" + "".join(f"x{i}: &x{i} [*x{i - 1}]\n" for i in range(1, 995))
# With `5e7`, which YAML reads as a float.
EXPONENT = f"""
tenants:
  search-team:
    keys: [{{id: st1, sha256: {D1}, expires: 2027-01-31, scopes: [infer, batch]}}]  # two at once for rotation
    models: [chat, embed]            # default: all
    weight: 4                        # share when full
    priority: interactive            # interactive | batch | background
    limits: {{requests_per_minute: 600, tokens_per_minute: 400000, tokens_per_day: 5e7,
      max_concurrent: 200, max_tokens: 8192, max_context: 32768}}
    deadlines: {{first_token_s: 10, total_s: 300}}
"""
END_OF_JANUARY = datetime(2027, 2, 1, tzinfo=UTC).timestamp()


def test_a_whole_file_is_read() -> None:
    keyring = parse_tenants(WHOLE).keyring(shared=False)
    tenant, key = keyring.caller(b"one", END_OF_JANUARY - 1)
    assert tenant == Tenant(
        "search-team",
        models=frozenset({"chat", "embed"}),
        max_tokens=8192,
        max_context=32768,
        first_token_s=10,
        total_s=300,
        weight=3,
        priority="batch",
    )
    assert keyring.tenant("free") == Tenant("free", weight=1, priority="interactive")
    assert (key.id, key.expires, sorted(key.scopes)) == ("st1", "2027-01-31", ["batch", "infer"])
    with pytest.raises(InvalidApiKey, match="the API key st1 has expired on 2027-01-31"):
        keyring.caller(b"one", END_OF_JANUARY)
    assert list(keyring.invalid(0.0)) == ["the API key st2 was revoked on 2026-12-01 (tenant search-team)"]


@pytest.mark.parametrize("written", ["5e7", "5.0e7", "50000000.0", "5e+07"])
def test_a_count_may_be_written_as_a_whole_float(tmp_path: Path, written: str) -> None:
    (file := tmp_path / "tenants.yaml").write_text(EXPONENT.replace("5e7", written))
    settings = settings_with(tenants_file=str(file), served=("chat", "embed"))
    assert list(keys_file_problems(settings)) == []
    tenant = read_keyring(settings).tenant("search-team")
    assert tenant is not None
    assert tenant.quotas["tokens_per_day"] == 50_000_000
    assert all(type(quota) is int for quota in tenant.quotas.values())
    jsonschema.validate(load_yaml(file.read_text()), tenants_json_schema())


@pytest.mark.parametrize(
    ("said", "default", "shares"), [(None, True, True), (None, False, False), (False, True, False), (True, False, True)]
)
def test_a_tenant_shares_its_prefix_cache_if_it_says_so_or_else_as_all_do(said: bool | None, default: bool, shares: bool) -> None:
    text = yaml.safe_dump({"tenants": {"t": {"keys": [{"id": "k", "sha256": D1}], "share_prefix_cache": said}}})
    assert parse_tenants(text).keyring(shared=default).caller(b"one", 0.0).tenant.shares_prefix_cache is shares


def settings_with(served: Sequence[str] = ("chat",), **ingress: object) -> Settings:
    models = {name: {"model": "embedded:smollm2"} for name in served}
    return parse_settings({"models": models | {"chat": models["chat"] | {"aliases": ["gpt"]}}, "ingress": ingress})


@pytest.fixture
def problems_of(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function from the text of a tenants file to all its problems, without what stands before each: key and file."""

    def problems(text: str) -> list[str]:
        file = tmp_path / "tenants.yaml"
        file.write_text(text)
        before = f"ingress.tenants_file: {file}"
        found = [str(problem) for problem in keys_file_problems(settings_with(tenants_file=str(file)))]
        assert all(problem.startswith(before) for problem in found)
        return [problem.removeprefix(before).removeprefix(":").strip() for problem in found]

    return problems


def entry(**key: object) -> str:
    return yaml.safe_dump({"tenants": {"t": {"keys": [{"id": "k1", "sha256": D1} | key]}}})


_FIELDS = ("keys", "models", "limits", "deadlines", "weight", "priority", "share_prefix_cache", SECRET)


def tenant(**fields: object) -> str:
    return yaml.safe_dump({"tenants": {"t": fields}})


@pytest.mark.parametrize(
    "text",
    [
        yaml.safe_dump({"tenants": SECRET}),
        yaml.safe_dump({"tenants": {"t": SECRET}}),
        yaml.safe_dump({"tenants": {SECRET + "_": {}}}),
        yaml.safe_dump({SECRET: {}}),
        *(tenant(**{field: SECRET}) for field in _FIELDS),
        tenant(keys=[SECRET]),
        tenant(limits={"max_tokens": SECRET}),
        *(entry(**{field: SECRET}) for field in ("sha256", "expires", "revoked", "scopes", SECRET)),
        entry(scopes=[SECRET]),
        entry(id=SECRET + "_"),
        yaml.safe_dump({"tenants": {SECRET: {"keys": [{"id": f"{SECRET}-1", "sha256": D1}]}}}),
    ],
)
def test_no_error_quotes_a_key_wherever_it_was_written(problems_of: Callable[[str], list[str]], text: str) -> None:
    problems = problems_of(text)
    assert problems
    assert not [problem for problem in problems if SECRET[:12] in problem]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; start with `tenants:`"),
        ("[]", "is no mapping"),
        ("models: {a: {}}", "is the configuration of a fleet, not a tenants file; name the file of its key ingress.tenants_file"),
        (entry(sha256=digest("")), "is the SHA-256 of nothing, so that no key would be needed"),
        (entry(expires="9999-12-31"), "is 9999-12-31, after which there is no day"),
        ("tenants: {}", "tenants: has no tenant; `serve-app tenants create` makes"),
        ("tenants:", "tenants: has no tenant"),
        ("tenants: {t: null}", "tenants.t: has no value; write {} for a tenant without keys, limits and a choice of models"),
        ("tenants: {123: {}}", "tenants[123]: the name 123 is no text; write it in quotes"),
        ("tenants: {yes: {}}", "tenants[1]: the name True is no text; write it in quotes"),
        (
            "tenants:\n  a: {}\n  b:\n    priority: batch\n    weight:4\n  c: {}\n",
            "line 5, column 5: not valid YAML: could not find expected ':'; write a colon and a space after the key",
        ),
        ("tenants: {t: {keys: [}", "not valid YAML"),
        (
            entry(sha256=SECRET),
            "tenants.t.keys[0].sha256: has 38 characters, and is not the 64 hex digits of a SHA-256; never write",
        ),
        (entry(sha256=12345), "tenants.t.keys[0].sha256: has 5 characters"),
        (entry(id=SECRET.upper()), "tenants.t.keys[0].id: has 38 characters that are no id"),
        (entry(id="others"), "tenants.t.keys[0].id: has 6 characters that are no id"),
        (entry(id="oidc"), "tenants.t.keys[0].id: has 4 characters that are no id"),
        (tenant(keys=SECRET), "tenants.t.keys: is no list"),
        (
            tenant(deadlines={"first_token_s": 30, "total_s": 30}),
            "tenants.t.deadlines.first_token_s: is 30, and total_s is 30: no time would be left for the answer; set it below total_s",
        ),
        (tenant(deadlines={"total_s": 0}), "tenants.t.deadlines.total_s: is 0"),
        (tenant(deadlines={"total": 3}), "tenants.t.deadlines.total: unknown key"),
        (tenant(keys=[SECRET]), "tenants.t.keys: has an entry, number 1, that is no mapping; write {id: NAME, sha256: DIGEST}"),
        (tenant(keys=[{"id": "k1"}]), "tenants.t.keys[0].sha256: is missing"),
        (
            entry(expires="soon"),
            "tenants.t.keys[0].expires: is 'soon', which is no date; write year, month and day, as 2027-01-31",
        ),
        (entry(expires="2027-01-31T12:00:00Z"), "expires: has a time after the day; write the day alone: 2027-01-31"),
        (entry(sha256=f"sha256:{D1}"), "sha256: begins with `sha256:`; write the 64 hex digits alone"),
        (entry(expires="2027-02-30"), "tenants.t.keys[0].expires: is '2027-02-30', but should be a valid date"),
        (entry(expires=20270131), "tenants.t.keys[0].expires: is 20270131, which is no date"),
        (entry(scopes=["infer", "read"]), "tenants.t.keys[0].scopes[1]: is 'read', but should be 'infer' or 'batch'"),
        (entry(scopes=[]), "tenants.t.keys[0].scopes: is []"),
        (entry(expired="2027-01-31"), "tenants.t.keys[0].expired: unknown key; did you mean expires?"),
        (tenant(limits={"max_tokens": "8k"}), "tenants.t.limits.max_tokens: is '8k', but should be a valid integer"),
        (tenant(limits={"max_tokens": 8.5}), "tenants.t.limits.max_tokens: is 8.5, but should be a valid integer"),
        (tenant(limits={"max_tokens": 1e300}), "tenants.t.limits.max_tokens: is 1e+300, but should be a valid integer"),
        (
            tenant(limits={"max_tokens": 2.0**53}),
            "tenants.t.limits.max_tokens: is 9007199254740992.0, but should be a valid integer",
        ),
        (tenant(limits={"max_tokens": math.inf}), "tenants.t.limits.max_tokens: is inf, but should be a valid integer"),
        (tenant(limits={"max_tokens": 0.0}), "tenants.t.limits.max_tokens: is 0, but should be greater than or equal to 1"),
        (tenant(limits={"max_tokens": 0}), "tenants.t.limits.max_tokens: is 0, but should be greater than or equal to 1"),
        (
            tenant(limits={"requests_per_hour": 5}),
            "tenants.t.limits.requests_per_hour: unknown key; convert it: quotas are requests_per_minute, tokens_per_minute and",
        ),
        (tenant(limits={"request_per_minute": 5}), "unknown key; did you mean requests_per_minute?"),
        (tenant(limits={"first_token_s": 5}), "tenants.t.limits.first_token_s: unknown key; it belongs under `deadlines`"),
        (tenant(limits={"total_s": 5}), "tenants.t.limits.total_s: unknown key; it belongs under `deadlines`"),
        (tenant(limits={"weight": 5}), "tenants.t.limits.weight: unknown key; it belongs to the tenant itself"),
        (tenant(requests_per_minute=5), "tenants.t.requests_per_minute: unknown key; it belongs under `limits`"),
        (tenant(expires="2027-01-31"), "tenants.t.expires: unknown key; it belongs in an entry of `keys`"),
        (entry(max_tokens=5), "tenants.t.keys[0].max_tokens: unknown key; it belongs under `limits`"),
        (tenant(rpm=60), "tenants.t.rpm: unknown key; write limits.requests_per_minute"),
        (tenant(limits={"tpm_limit": 60}), "tenants.t.limits.tpm_limit: unknown key; write limits.tokens_per_minute"),
        (tenant(models=["chat", ""]), "tenants.t.models[1]: is '', but should have at least 1 character"),
        (tenant(wait=4), "tenants.t.wait: unknown key; did you mean weight?"),
        (tenant(weight=0), "tenants.t.weight: is 0, but should be greater than or equal to 0.01"),
        (tenant(weight=-1), "tenants.t.weight: is -1, but should be greater than or equal to 0.01"),
        (tenant(weight=1000.5), "tenants.t.weight: is 1000.5, but should be less than or equal to 1000"),
        (tenant(weight=math.nan), "tenants.t.weight: is nan, but should be a finite number"),
        (tenant(weight=math.inf), "tenants.t.weight: is inf, but should be a finite number"),
        (tenant(weight="high"), "tenants.t.weight: is 'high', but should be a valid number"),
        (tenant(weight=True), "tenants.t.weight: is True, but should be a valid number"),
        (tenant(priority="high"), "tenants.t.priority: is 'high', but should be 'interactive', 'batch' or 'background'"),
        (tenant(priority=0), "tenants.t.priority: is 0, but should be 'interactive', 'batch' or 'background'"),
        ("tenants: {Team A: {}}", "tenants[\"Team A\"]: the name 'Team A' is no name of a tenant; use up to 63"),
        ("tenants: &a {t: *a}", "line 1, column 10: holds more than 500,000 values, those that aliases repeat included"),
        pytest.param(NESTED, "is nested too deeply by aliases; write each tenant out", id="nested"),
        ("tenants: {t: {}, t: {}}", "tenants.t: is given twice, in lines 1 and 1"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_the_way_out(problems_of: Callable[[str], list[str]], text: str, said: str) -> None:
    (problem,) = problems_of(text)
    assert said in problem
    assert SECRET.lower() not in problem.lower()
    with pytest.raises(ConfigError) as refused:
        parse_tenants(text)
    assert str(refused.value) == problem
    assert refused.value.__cause__ is None or SECRET not in str(refused.value.__cause__)


def test_the_first_problem_says_how_many_others_there_are(tmp_path: Path) -> None:
    (file := tmp_path / "tenants.yaml").write_text("tenants: {t: {tpm: 5, limits: {requests_per_minute: 10k}, weight: 0}}")
    with pytest.raises(ConfigError) as refused:
        read_keyring(settings_with(tenants_file=str(file)))
    assert str(refused.value) == (
        f"ingress.tenants_file: {file}: tenants.t.tpm: unknown key; write limits.tokens_per_minute; "
        "and 2 more, which `serve-app check` shows"
    )
    file.write_text("tenants: {t: {models: [cat, chat, dog]}}")
    problem = read_keyring(settings_with(tenants_file=str(file))).problem
    assert "models[0]: is 'cat'" in problem
    assert problem.endswith("; and 1 more, which `serve-app check` shows")


def test_ids_and_digests_are_unique_among_all_tenants(problems_of: Callable[[str], list[str]]) -> None:
    same_id = f"tenants: {{a: {{keys: [{{id: k, sha256: {D1}}}]}}, b: {{keys: [{{id: k, sha256: {D2}}}]}}}}"
    assert problems_of(same_id) == [
        "tenants.b.keys[0].id: is 'k', which a key of the tenant 'a' has already; give each key an id of its own"
    ]
    same_digest = f"tenants: {{a: {{keys: [{{id: k, sha256: {D1}}}]}}, b: {{keys: [{{id: l, sha256: {D1.upper()}}}]}}}}"
    (problem,) = problems_of(same_digest)
    assert problem.startswith("tenants.b.keys[0].sha256: is the digest of the key 'k' too: one key would be two clients; ")
    assert D1 not in problem


def test_models_are_those_that_the_configuration_serves(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {t: {models: [chat, cat, gpt]}}")
    assert [str(problem) for problem in keys_file_problems(settings_with(tenants_file=str(file)))] == [
        f"ingress.tenants_file: {file}: tenants.t.models[1]: is 'cat', no served model; did you mean chat?",
        f"ingress.tenants_file: {file}: tenants.t.models[2]: is 'gpt', no served model; "
        "name its model, chat, which includes its aliases, adapters and canary",
    ]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    with pytest.raises(
        ConfigError, match=f"^ingress.tenants_file: {file} cannot be read: No such file or directory; create it on every"
    ):
        read_keyring(settings_with(tenants_file=str(file)))


def test_a_file_of_keys_is_tenants_without_limits_named_by_their_digests(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("0123456789abcdef\n0123456789abcdef\n")
    keyring = read_keyring(settings_with(api_keys_file=str(file), shared_prefix_cache=True))
    assert len(keyring) == 1
    tenant, key = keyring.caller(b"0123456789abcdef", 0.0)
    name = digest("0123456789abcdef")[:12]
    assert (tenant, key.id) == (Tenant(name, shares_prefix_cache=True), name)


def test_the_schema_is_closed_and_described() -> None:
    schema = tenants_json_schema()
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        assert all("description" in field for field in section["properties"].values())

"""The file of tenants with keys, rights and limits (`ingress.tenants_file`), which becomes a `Keyring`.

No error quotes a key, nor any value in whose place a key may have been written.
"""

import dataclasses
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from serve_app.config.api_keys_file import FEWER_KEYS_HINT, MAX_KEYS, MIN_KEY_CHARS, SHA256_DIGITS
from serve_app.config.base import Int, Real, Section
from serve_app.config.checks import did_you_mean, dotted, load_yaml, refuse, shown, to_config_errors, wrong
from serve_app.config.settings import Settings
from serve_app.core.tenants import OIDC, SCOPES, Key, Keyring, Priority, Quota, Scope, Tenant
from serve_app.environment import as_typed
from serve_app.errors import ConfigError

_MAX_PROBLEMS = 100
TENANT_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
RESERVED_NAMES = ("none", "others")
"""Words that series use in place of a name."""
TENANTS_FILE = "ingress.tenants_file"
_HOW = f"`{as_typed()} tenants create` makes a key and its entry"
_OF_NOTHING = hashlib.sha256(b"").hexdigest()


def _day(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"\d{4}-\d\d-\d\d", value):
        if day := re.match(r"\d{4}-\d\d-\d\d(?=[T ])", value):
            raise wrong("", "has a time after the day", f"write the day alone: {day[0]}")
        raise wrong("", f"is {value[:20]!r}, which is no date", "write year, month and day, as 2027-01-31")
    if isinstance(value, int | float):  # pydantic would take a number for seconds
        raise wrong("", f"is {value}, which is no date", "write year, month and day, as 2027-01-31")
    return value


def _key_id(text: str) -> str:
    if not re.fullmatch(TENANT_PATTERN, text) or text in (*RESERVED_NAMES, OIDC):
        problem = f"has {len(text)} characters that are no id"  # it is not quoted: a key may have been written in its place
        raise wrong("", problem, "use up to 63 of a-z, 0-9, '.', '_' and '-', as in search-1, and not none, others or oidc")
    return text


def _digest(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(f"sha256:{SHA256_DIGITS.pattern}", value):
        raise wrong("", "begins with `sha256:`", "write the 64 hex digits alone")
    if not isinstance(value, str) or not SHA256_DIGITS.fullmatch(value):
        problem = f"has {len(str(value))} characters, and is not the 64 hex digits of a SHA-256"
        raise wrong("", problem, f"never write a key itself here: printf %s KEY | sha256sum; {_HOW}")
    if value.lower() == _OF_NOTHING:
        raise wrong("", "is the SHA-256 of nothing, so that no key would be needed", _HOW)
    return value.lower()


def _has_a_next_day(day: date) -> date:
    if day == date.max:
        raise wrong("", f"is {day}, after which there is no day", "leave it out for a key that does not expire")
    return day


Day = Annotated[date, BeforeValidator(_day), AfterValidator(_has_a_next_day)]


_QUOTAS_ELSEWHERE = {
    **dict.fromkeys(("rpm", "rpm_limit"), "requests_per_minute"),
    **dict.fromkeys(("tpm", "tpm_limit"), "tokens_per_minute"),
    "max_parallel_requests": "max_concurrent",
}
"""LiteLLM's names of quotas -> ours."""


class Part(Section):
    """A part of a tenants file. The error for a key that belongs in another part says where."""

    @classmethod
    def _hint_for(cls, key: str) -> str:
        place = next((place for place, part in _PLACES.items() if key in part.model_fields), "")
        if key in _QUOTAS_ELSEWHERE:
            return f"write limits.{_QUOTAS_ELSEWHERE[key]}"
        if re.fullmatch(r"(requests|tokens)_per_[a-z]+", key) and not place:
            return "convert it: quotas are requests_per_minute, tokens_per_minute and tokens_per_day"
        return f"it belongs {place}" if place else super()._hint_for(key)


class KeySettings(Part):
    """One API key, of which the file holds only the digest."""

    id: Annotated[str, AfterValidator(_key_id)]
    """Name of the key in errors, logs, series, ledger and traces. Unique in the file."""
    sha256: Annotated[str, BeforeValidator(_digest)] = Field(json_schema_extra={"pattern": f"^{SHA256_DIGITS.pattern}$"})
    """The SHA-256 of the key, as 64 hex digits. Unique in the file."""
    expires: Day | None = None
    """Last day (UTC) on which the key is valid. None: it does not expire."""
    revoked: Day | None = None
    """Day on which the key was revoked; the key is not valid, whatever the day. None: it was not. Its clients learn why they get 401."""
    scopes: tuple[Scope, ...] = Field(default=SCOPES, min_length=1)
    """`infer`: all routes that ask a model or its tokenizer. `batch`: files and batches, and the lines of batches."""

    def key(self) -> Key:
        expires_at = float("inf")
        if self.expires is not None:
            expires_at = datetime.combine(self.expires + timedelta(days=1), datetime.min.time(), UTC).timestamp()
        return Key(
            self.id,
            bytes.fromhex(self.sha256),
            frozenset(self.scopes),
            str(self.expires or ""),
            expires_at,
            str(self.revoked or ""),
        )


class TenantLimits(Part):
    """Limits of a tenant: of each request, and its quotas, which all its requests at all ingresses share."""

    max_tokens: Int | None = Field(default=None, ge=1)
    """Most tokens of one answer. A request that asks for more is refused; an answer that names no bound ends there. None: no limit."""
    max_context: Int | None = Field(default=None, ge=2)
    """Most tokens of a prompt and its answer together. A longer prompt is refused; an answer ends there. None: the model's own limit."""
    requests_per_minute: Int | None = Field(default=None, ge=1)
    """Most requests in any 60 seconds. A request counts when it goes to an engine, and each prompt of a list with an answer of its own as
    one. None: no limit."""
    tokens_per_minute: Int | None = Field(default=None, ge=1)
    """Most tokens of prompts and answers in any 60 seconds. A longer prompt is refused with 400. None: no limit."""
    tokens_per_day: Int | None = Field(default=None, ge=1)
    """Most tokens of prompts and answers in a day of UTC. None: no limit."""
    max_concurrent: Int | None = Field(default=None, ge=1)
    """Most requests that run or wait for a replica at once. None: no limit."""

    def quotas(self) -> dict[Quota, int]:
        """Return the quotas that are set."""
        return {name: value for name in get_args(Quota) if (value := getattr(self, name)) is not None}


class TenantDeadlines(Part):
    """How long the requests of a tenant may take, from the end of a request's head."""

    first_token_s: Real | None = Field(default=None, gt=0)
    """Seconds within which the first token has to come, or an embedding; else the request gets 503, at once if that is known. None: the
    model's limit."""
    total_s: Real | None = Field(default=None, gt=0)
    """Seconds within which the answer has to be complete. A longer answer ends with the error `deadline_passed`. None: no limit."""

    @model_validator(mode="after")
    def _first_token_comes_before_the_end(self) -> Self:
        if self.first_token_s is not None and self.total_s is not None and self.first_token_s >= self.total_s:
            problem = f"is {self.first_token_s:g}, and total_s is {self.total_s:g}: no time would be left for the answer"
            raise wrong("first_token_s", problem, "set it below total_s, or remove one of the two")
        return self


class TenantSettings(Part):
    """The keys, rights, limits, deadlines and weight of one tenant."""

    keys: tuple[KeySettings, ...] = ()
    """Its API keys: two while one replaces the other."""
    models: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """Names of the models that it may ask, each with its aliases, adapters and canary. None: all models."""
    limits: TenantLimits = TenantLimits()
    """Limits of each request, and quotas."""
    deadlines: TenantDeadlines = TenantDeadlines()
    """How long its requests may wait and take."""
    weight: Real = Field(default=1.0, ge=0.01, le=1000)
    """The tenant's share of GPU time while the engines are full, relative to the other tenants of its priority whose requests wait. With
    weights 3 and 1, two tenants get 75 % and 25 %."""
    priority: Priority = "interactive"
    """Which requests go first while the engines are full: those of `interactive` tenants go before those of `batch` tenants, and these
    before those of `background` tenants. Lines of the batch API are background work, whatever the priority of their tenant."""
    share_prefix_cache: bool | None = Field(default=None, strict=True)
    """Whether its prompts share cached blocks with the other tenants that share. None: as `ingress.shared_prefix_cache` says."""

    @field_validator("keys", mode="before")
    @classmethod
    def _keys_are_a_list_of_mappings(cls, keys: Any) -> Any:
        if not isinstance(keys, list | tuple):
            raise wrong("", "is no list", f"write each key on a line that starts with `- `; {_HOW}")
        for number, key in enumerate(keys, start=1):
            if not isinstance(key, Mapping):
                raise wrong(
                    "", f"has an entry, number {number}, that is no mapping", f"write {{id: NAME, sha256: DIGEST}}; {_HOW}"
                )
        return keys

    def tenant(self, name: str, *, shared: bool) -> Tenant:
        models = None if self.models is None else frozenset(self.models)
        shares = shared if self.share_prefix_cache is None else self.share_prefix_cache
        limits, deadlines = self.limits, self.deadlines
        return Tenant(
            name,
            models,
            limits.max_tokens,
            limits.max_context,
            shares,
            limits.quotas(),
            first_token_s=deadlines.first_token_s,
            total_s=deadlines.total_s,
            weight=self.weight,
            priority=self.priority,
        )


_PLACES: dict[str, type[Part]] = {
    "in an entry of `keys`": KeySettings,
    "under `limits`": TenantLimits,
    "under `deadlines`": TenantDeadlines,
    "to the tenant itself": TenantSettings,
}
"""Words of errors for the place of each part in the file."""


class TenantsFile(Part):
    """The file `ingress.tenants_file`."""

    tenants: dict[str, TenantSettings] = Field(min_length=1, json_schema_extra={"propertyNames": {"pattern": TENANT_PATTERN}})
    """The tenants by name. All together have up to 5,000 keys."""

    @model_validator(mode="after")
    def _keys_are_of_one_tenant(self) -> Self:
        refuse(self._duplicates())
        return self

    @classmethod
    def _problems_as_written(cls, values: Mapping[Any, Any]) -> Iterator[PydanticCustomError]:
        tenants = values.get("tenants")
        if "tenants" in values and tenants in ({}, None):
            yield wrong("tenants", "has no tenant", f"`{as_typed()} tenants create` makes a tenant and its key")
        for name, tenant in tenants.items() if isinstance(tenants, Mapping) else ():
            at = dotted(("tenants", int(name) if isinstance(name, int) else str(name)))
            if not isinstance(name, str):
                yield wrong(at, f"the name {shown(name)} is no text", "write it in quotes")
            elif not re.fullmatch(TENANT_PATTERN, name) or name in RESERVED_NAMES:
                hint = "use up to 63 of a-z, 0-9, '.', '_' and '-', as in search-team, and not none or others"
                yield wrong(at, f"the name {name[:63]!r} is no name of a tenant", hint)
            elif tenant is None:
                yield wrong(at, "has no value", "write {} for a tenant without keys, limits and a choice of models")

    def _duplicates(self) -> Iterator[PydanticCustomError]:
        if (num_keys := sum(len(tenant.keys) for tenant in self.tenants.values())) > MAX_KEYS:
            yield wrong("tenants", f"has {num_keys} keys in all, and the limit is {MAX_KEYS}", FEWER_KEYS_HINT)
        ids: dict[str, str] = {}
        digests: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for number, key in enumerate(tenant.keys):
                at = dotted(("tenants", name, "keys", number))
                if key.id in ids:
                    problem = f"is {key.id!r}, which a key of the tenant {ids[key.id]!r} has already"
                    yield wrong(f"{at}.id", problem, "give each key an id of its own")
                elif key.sha256 in digests:
                    problem = f"is the digest of the key {digests[key.sha256]!r} too: one key would be two clients"
                    yield wrong(f"{at}.sha256", problem, f"make another key; {_HOW}")
                ids[key.id], digests[key.sha256] = name, key.id

    def keyring(self, *, shared: bool, problem: str = "") -> Keyring:
        """Return the keys. ``shared``: whether tenants that do not say it share cached prefixes. ``problem``: of the `Keyring`."""
        tenants = (
            (tenant.tenant(name, shared=shared), [key.key() for key in tenant.keys]) for name, tenant in self.tenants.items()
        )
        return Keyring(tenants, problem=problem)

    def unknown_models(self, settings: Settings, ignored: Collection[str] = ()) -> Iterator[tuple[str, ConfigError]]:
        """Yield a tenant and an error for each model that is not served under this name, unless it is ``ignored``."""
        known = [name for name, model in settings.models.items() if model.canary is None]
        bases = {alias: name for name, model in settings.models.items() for alias in (*model.aliases, *model.adapters)}
        bases |= {name: model.canary.of for name, model in settings.models.items() if model.canary is not None}
        for name, tenant in self.tenants.items():
            for number, model in enumerate(tenant.models or ()):
                if model not in known and model not in ignored:
                    hint = did_you_mean(model, known)
                    if model in bases:
                        hint = f"name its model, {bases[model]}, which includes its aliases, adapters and canary"
                    yield (
                        name,
                        ConfigError(dotted(("tenants", name, "models", number)), f"is {model[:80]!r}, no served model", hint),
                    )


def parse_tenants(text: str) -> TenantsFile:
    """Return the tenants in the text of a file.

    Raises:
        ConfigError: The file has problems; their paths are those of keys in the file.
    """
    found = tenants_or_problems(text)
    if isinstance(found, TenantsFile):
        return found
    raise in_one(found)


def in_one(problems: Sequence[ConfigError]) -> ConfigError:
    """Return the first of one or more problems, which says how many others there are."""
    first, num_others = problems[0], len(problems) - 1
    more = [f"and {num_others} more, which `{as_typed()} check` shows"] if num_others else []
    return dataclasses.replace(first, hint="; ".join([first.hint, *more] if first.hint else more))


def tenants_or_problems(text: str) -> TenantsFile | list[ConfigError]:
    """Return the tenants, or all problems, at least one."""
    try:
        values: object = load_yaml(text)
        if not isinstance(values, Mapping):
            problem = "is empty" if values is None else "is no mapping"
            return [ConfigError("", problem, "start with `tenants:`; docs/tenants.md is complete")]
        if "models" in values and "tenants" not in values:
            hint = f"name the file of its key {TENANTS_FILE}"
            return [ConfigError("", "is the configuration of a fleet, not a tenants file", hint)]
        return _validated(values)
    except ConfigError as exc:
        return [exc]
    except RecursionError:
        return [ConfigError("", "is nested too deeply by aliases", "write each tenant out")]


def _validated(values: Mapping[Any, Any]) -> TenantsFile | list[ConfigError]:
    try:
        return TenantsFile.model_validate(values)
    except ValidationError as exc:
        texts = sorted({text for text in _texts(values) if may_be_a_key(text)}, key=len, reverse=True)
        return [_without_keys(error, texts) for error in to_config_errors(exc)[:_MAX_PROBLEMS]]


def _without_keys(error: ConfigError, texts: Sequence[str]) -> ConfigError:
    """Return the error without ``texts``, the longest first: they may be keys, written where something else belongs."""
    parts = [error.path, error.problem, error.hint]
    for length in (None, 80, 40, 20):  # as errors cut them; whole texts first, because one may begin with another
        for text in texts:
            parts = [part.replace(text[:length], f"<{len(text)} characters>") for part in parts]
    return ConfigError(*parts)


def may_be_a_key(text: str) -> bool:
    """Return whether the text is no name of a tenant or a key."""
    return len(text) >= MIN_KEY_CHARS and not re.fullmatch(TENANT_PATTERN, text)


def _texts(values: object) -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from (*_texts(key), *_texts(value))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value)
    elif isinstance(values, str):
        yield values


def tenants_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a tenants file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **TenantsFile.model_json_schema()}

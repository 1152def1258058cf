"""`problem_of` checks the form of an answer to `GET /fleet`, as far as commands read it. Other keys are ignored.

A key with a default may be missing; only `cold_start_s` may be null.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve_app.config.checks import dotted

_Time = Annotated[float, Field(ge=0, le=253_402_300_799, allow_inf_nan=False)]  # to the end of the year 9999, for `datetime`
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Member(_Part):
    replica_id: str
    model: str
    state: str
    host: str
    port: int
    pid: int
    vllm_version: str


class _ReplicaLoad(_Part):
    running: int
    waiting: int
    links: int
    steps: int
    kv_usage: float
    start_s: float = 0.0
    cold_start: dict[str, float] = {}


class _Replica(_Member):
    role: Literal["replica"]
    load: _ReplicaLoad


class _Canary(_Part):
    of: str
    state: str
    requests: int
    reason: str


class _ModelLoad(_Part):
    waiting: int
    resumptions: int
    moved: int
    cold_start_s: _Seconds | None = None
    canary: _Canary = _Canary(of="", state="", requests=0, reason="")


class _IngressLoad(_Part):
    streams: int = 0
    models: dict[str, _ModelLoad] = {}
    tenants_file_in_force: bool = True


class _Ingress(_Member):
    role: Literal["ingress"]
    load: _IngressLoad


class _Decision(_Part):
    time: _Time
    model: str
    before: int
    after: int
    rule: str


class _Lost(_Part):
    replica_id: str
    model: str
    time: _Time
    cause: str


class _Start(_Part):
    replica_id: str
    since: _Time
    host: str


class _Model(_Part):
    target: int
    starting: list[_Start]


class _Fleet(_Part):
    time: _Time
    members: list[Annotated[_Replica | _Ingress, Field(discriminator="role")]]
    decisions: list[_Decision]
    lost: list[_Lost] = []
    models: dict[str, _Model] = {}


def problem_of(answer: Any) -> str:
    """Return what is wrong with the form of the answer; "" if nothing is wrong."""
    try:
        _Fleet.model_validate(answer)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        return f"{dotted(first['loc'])}: {first['msg']}".removeprefix(": ")
    return ""

"""A scenario is one YAML file that says which requests a target gets, when, and which answers count as good.

Times are in seconds from the start of the run, rates in requests per second, lengths in tokens.
"""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails

from loadtest.errors import UsageError
from loadtest.inputs import read_yaml
from loadtest.plan.class_times import check_times
from loadtest.plan.laws import ARRIVALS, MAX_SEED, Arrival, Burst, Closed, Part, Seconds, Trace, Url, refuse_unwritable
from loadtest.plan.request_class import RECORDED, Conversation, Length, Pause, RequestClass
from loadtest.plan.slo import Slo, parse_slo
from loadtest.wording import shown

MAX_SHOWN = 200
"""An error message shows at most so many characters of a wrong value, and of the path of its key."""
MAX_CLASSES = 200
"""Most classes of requests: more take seconds to check and to draw."""


class Fault(Part):
    """A fault that the kit injects during the run; every plot over time marks it."""

    at_s: Seconds
    action: Literal["kill", "stop", "cut-link", "command"]
    """``stop`` is SIGSTOP and, after ``for_s``, SIGCONT. ``cut-link`` drops the connections of a relay between client and target."""
    process: str = ""
    """For kill and stop: part of the command line of exactly one process in ``below_pid``'s tree; ``a|b`` matches either part."""
    below_pid: int | None = None
    """Root of the process tree in which processes may be killed or stopped; no process outside the tree is."""
    command: tuple[str, ...] = ()
    """For ``command``: program and arguments, for example kubectl."""
    for_s: Seconds = 5.0
    """How long a process stays stopped or a link stays cut; a command may run at least a minute."""
    name: str = ""
    """Name on the plots; default: action and process."""


class Observe(Part):
    """The target's own metrics and replica counts that are recorded during the run."""

    metrics_url: Url = ""
    """URL of Prometheus text; default: /metrics of the target. ``none`` turns the scrape off."""
    interval_s: float = Field(default=1.0, gt=0.1, le=5)
    """Seconds between two scrapes. A scraped number of replicas is used for 10 s at most."""
    serve_status: bool = False
    """Also record Ray Serve's replicas, from the dashboard at ``ray_dashboard_url``. `serve-app up` starts no dashboard; if no dashboard
    answers from the start, the target's `/fleet` is asked instead, and the report says so."""
    ray_dashboard_url: str = "http://127.0.0.1:8265"
    """Address of Ray's dashboard."""
    fleet: bool = False
    """Also record the replicas that a serve-app ingress reports at the target's `/fleet`; needs no dashboard."""
    gpus_per_replica: int = Field(default=0, ge=0, le=64)
    """GPUs per replica, for the GPU-seconds in the report; 0: not reported."""
    kubernetes_selector: str = ""
    """Also record the pods with these labels, from the Kubernetes API with the service account of the kit's own pod."""
    kubernetes_namespace: str = Field(default="", pattern=r"^[a-z0-9-]{0,63}$")
    """Namespace of the pods; empty: that of the kit's own pod, else ``default``."""
    kubernetes_url: str = Field(default="", pattern=r"^(https?://[^/\s]+\S*)?$")
    """Address of `kubectl proxy`, like http://127.0.0.1:8001, if the kit runs outside a pod."""

    @model_validator(mode="after")
    def _selects(self) -> Self:
        for name in ("kubernetes_namespace", "kubernetes_url"):
            if getattr(self, name) and not self.kubernetes_selector:
                raise ValueError(f"{name} does nothing without kubernetes_selector; set that too, like app=x, or leave it out")
        return self


class Scenario(Part):
    """A whole scenario file."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,60}$")
    """Name of the scenario, in the report's title and the default folder. 1 to 60 letters, digits and ``._-``, not only dots."""
    model: str = ""
    """Model of the classes that set no ``model``. Empty: the first model that the target lists at /v1/models."""
    seed: int = Field(default=1, ge=0, le=MAX_SEED)
    """Seed of all random numbers: the same seed gives the same schedule and the same prompts."""
    arrival: Arrival
    """When requests are sent."""
    requests: tuple[RequestClass, ...] = Field(default=(RequestClass(),), min_length=1)
    """Classes of requests, drawn by their weights."""
    duration_s: Seconds = 60.0
    """Time at which the arrivals end."""
    warmup_s: Seconds = 5.0
    """Requests due before this time are sent and recorded, but left out of every figure. If the latencies show a longer warm-up in which no
    request failed and every limit of the SLO was kept, the longer warm-up is left out, and the report says how long it was."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest time from the due time to the end of the answer. A later answer is a timeout; every distribution counts it as 'at least
    this'."""
    drain_s: Seconds = 120.0
    """Seconds after the last arrival at which unfinished requests become timeouts."""
    stall_s: float = Field(default=1.0, gt=0)
    """A longer gap between chunks counts as a stall."""
    workers: int = Field(default=1, ge=1, le=256)
    """Number of load generator processes; plan one per 80 requests/s of 128 streamed tokens."""
    slo: Slo = Slo()
    """The limits by which the run is judged; a run without limits passes if it is valid."""
    keep_text: bool = True
    """Keep the text of each answer in the records (the audit needs the texts)."""
    tokenizer: str = ""
    """Path of a tokenizer.json, which cuts text prompts to the exact length and counts the output tokens again."""
    faults: tuple[Fault, ...] = ()
    """Faults to inject during the run."""
    observe: Observe = Observe()
    """What to record of the target during the run, beside the requests."""

    @property
    def has_conversations(self) -> bool:
        return any(c.conversation is not None for c in self.requests)

    def models(self, default: str) -> list[str]:
        """Return the models that requests name, without duplicates; ``default`` is the model of the classes that set none."""
        return list(dict.fromkeys(c.model or default for c in self.requests))

    @model_validator(mode="before")
    @classmethod
    def _slo_words(cls, values: Any) -> Any:
        refuse_unwritable(values)
        if isinstance(values, dict) and isinstance(values.get("slo"), str):
            return {**values, "slo": parse_slo(values["slo"])}
        return values

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        if len(self.requests) > MAX_CLASSES and info.context != RECORDED:
            raise ValueError(f"requests: {len(self.requests):,} classes, at most {MAX_CLASSES}; leave some out")
        if not self.name.strip("."):
            raise ValueError(f"name {self.name!r} is a folder's own name or the one above; add a letter or a digit")
        if self.warmup_s >= self.duration_s and not isinstance(self.arrival, Burst | Closed | Trace):
            raise ValueError(f"warmup_s {self.warmup_s:g} leaves nothing of duration_s {self.duration_s:g}")
        if len({c.name for c in self.requests}) < len(self.requests):
            raise ValueError(f"requests: names must differ, got {', '.join(c.name for c in self.requests)}")
        if self.model and all(c.model for c in self.requests):
            raise ValueError(f"model {self.model!r} is asked by no class of requests: each names its own; leave it out")
        if isinstance(self.arrival, Closed) and self.arrival.concurrency < self.workers:
            raise ValueError(f"arrival.concurrency {self.arrival.concurrency} is below workers {self.workers}")
        if self.has_conversations and isinstance(self.arrival, Burst | Closed | Trace):
            raise ValueError(f"arrival.law {self.arrival.law} has no conversations; take one with a rate, such as poisson")
        if isinstance(self.arrival, Trace) and any(c.prompts is not None for c in self.requests):
            raise ValueError("arrival.law trace has lengths of its own, and prompts of a file have theirs; take one of them")
        check_times(self.requests, self.arrival, duration_s=self.duration_s)
        return self


def scenario_file(name: Path) -> Path:
    """Return the scenario's file: the path itself, or the packaged scenario of that name.

    Raises:
        UsageError: ``name`` is a bare name, and neither a file nor a packaged scenario.
    """
    if os.path.exists(name) or name.suffix or name != Path(name.name):
        return name
    ours = {path.stem: path for path in sorted((Path(__file__).parents[1] / "scenarios").glob("*.yaml"))}
    if name.name not in ours:
        raise UsageError(shown(str(name)), f"is no file, and no scenario of the package: {', '.join(ours)}")
    return ours[name.name]


def load_scenario(name: Path, *, overrides: dict[str, Any] | None = None) -> Scenario:
    """Read the file that `scenario_file` finds; ``overrides`` replace its top-level keys.

    Raises:
        UsageError: The file cannot be read, or a value is wrong; the message has the key's path.
    """
    path = scenario_file(name)
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UsageError(str(path), "a scenario is a mapping of keys to values")
    return parse_scenario({**values, **(overrides or {})}, folder=path.parent)


def parse_scenario(values: dict[str, Any], *, folder: Path = Path(), context: Any = None) -> Scenario:
    """Check the values; paths of traces and prompts are relative to ``folder``.

    Args:
        context: `RECORDED` for values from a manifest.

    Raises:
        UsageError: One line with the path of the key, its value and the expected value.
    """
    try:
        scenario = Scenario.model_validate(values, context=context)
    except ValidationError as exc:
        raise _usage_error(exc.errors()[0]) from exc
    if isinstance(scenario.arrival, Trace):
        file = (folder / scenario.arrival.file).resolve()
        scenario = scenario.model_copy(update={"arrival": scenario.arrival.model_copy(update={"file": file})})
    if any(cls.prompts is not None for cls in scenario.requests):
        found = [
            cls if cls.prompts is None else cls.model_copy(update={"prompts": (folder / cls.prompts).resolve()})
            for cls in scenario.requests
        ]
        scenario = scenario.model_copy(update={"requests": tuple(found)})
    return scenario


_SECTIONS: dict[str | int, type[BaseModel]] = {
    **ARRIVALS,
    **{"requests": RequestClass, "input_tokens": Length, "output_tokens": Length},
    **{"conversation": Conversation, "turns": Length, "think_s": Pause},
    **{"faults": Fault, "observe": Observe, "slo": Slo},
}


def _usage_error(error: ErrorDetails) -> UsageError:
    """Return pydantic's first error as one line: the key's path in the file, the value, and the way out."""
    path, given, kind = error["loc"], error["input"], error["type"]
    section: type[BaseModel] = Scenario
    for part in path[:-1]:
        section = _SECTIONS.get(part, section)
    got = "" if isinstance(given, dict) else f" (got {repr(given)[:MAX_SHOWN]})"
    problem = error["msg"].removeprefix("Value error, ") + got
    if kind == "extra_forbidden":
        near = get_close_matches(str(path[-1]), section.model_fields, n=1)
        problem = f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known are {', '.join(section.model_fields)}"
    elif kind in ("float_parsing", "int_parsing", "float_type", "int_type"):
        problem = f"must be a number without a unit{got}"
    elif kind.startswith("union_tag"):
        problem = f"law must be one of {', '.join(ARRIVALS)}{' (got ' + repr(given.get('law')) + ')' if isinstance(given, dict) else got}"
    elif kind == "dict_type":
        problem = f"must be a mapping of keys to values{got}"
    elif kind in ("model_type", "model_attributes_type"):
        problem = f"must be a mapping with keys of {', '.join(_SECTIONS.get(path[-1], section).model_fields)}{got}"
    elif kind in ("tuple_type", "list_type"):
        problem = f"must be a list: lines that begin with a dash (got {repr(given)[:MAX_SHOWN]})"
    where = ".".join(str(part) for part in path if part not in ARRIVALS) or "scenario"
    return UsageError(shown(where, MAX_SHOWN), problem)

"""A scenario: one YAML file that says what is asked of a target, when, and what counts as good.

Times are in seconds from the start of the run, rates in requests per second, lengths in tokens.
"""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails

from loadtest.errors import UsageError
from loadtest.inputs import read_yaml
from loadtest.plan.class_times import check_times
from loadtest.plan.laws import ARRIVALS, MAX_SEED, Arrival, Burst, Closed, InputFile, Part, Seconds, Trace, Url, refuse_unwritable
from loadtest.plan.slo import Slo, parse_slo
from loadtest.wording import shown

Tokens = Annotated[int, Field(ge=1, le=1_000_000)]
ToolChoice = Annotated[
    JsonValue, WithJsonSchema({"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}, {"type": "null"}]})
]

MAX_SHOWN = 200
"""Characters of a wrong value, and of the path of its key, in the message."""
MAX_CLASSES = 200
"""Of requests: more take seconds to check and to draw."""
RECORDED = {"recorded": True}
"""Context of a scenario from a manifest: early ones name every field of a length, also those that its law does not use."""


class Length(Part):
    """A whole number, drawn for each request: of tokens, or of a conversation's turns."""

    dist: Literal["constant", "uniform", "exponential", "lognormal"] = "constant"
    """The law that each request's number is drawn from."""
    mean: float = Field(default=64, gt=0)
    """Of the law before anything is rejected; not of ``uniform``."""
    cv: float = Field(default=1.0, ge=0.001, le=100)
    """Standard deviation over mean; of ``lognormal`` alone."""
    min: Tokens = 1
    """Smallest number drawn."""
    max: Tokens = 4096
    """Draws outside min..max are drawn again, not cut: a cut would pile them up at the limit."""

    @property
    def _unused(self) -> set[str]:
        """Fields that the law does not use: refused where a file names them, and not written."""
        return {"lognormal": set[str](), "uniform": {"mean", "cv"}}.get(self.dist, {"cv"})

    @model_serializer(mode="wrap")
    def _used(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name not in self._unused}

    @model_validator(mode="after")
    def _ordered(self, info: ValidationInfo) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        for name in sorted(self._unused & self.model_fields_set) if info.context != RECORDED else ():
            takes = ", ".join(field for field in Length.model_fields if field not in {"dist", *self._unused})
            raise ValueError(f"{self.dist} takes {takes}, and not {name} ({getattr(self, name):g}); leave it out")
        if self.dist == "constant" and not self.min <= self.mean <= self.max:  # others are usually cut far below their mean
            raise ValueError(f"mean {self.mean:g} is outside min {self.min} .. max {self.max}")
        return self


class Pause(Part):
    """A number of seconds, drawn each time."""

    dist: Literal["constant", "exponential"] = "exponential"
    """The law that each number is drawn from."""
    mean: Seconds = 10.0


class Conversation(Part):
    """Requests that follow each other: each turn is sent with all that was said before it, the server's own answers included."""

    turns: Length = Length(mean=4, max=100)
    """How often the user speaks. A conversation ends early by an answer that fails, and with the scenario's ``duration_s``."""
    think_s: Pause = Pause()
    """From the end of an answer until the user's next turn is due."""


class RequestClass(Part):
    """One kind of request."""

    name: str = Field(default="default", pattern=r"^[A-Za-z0-9._-]{1,40}$")
    """Of the class, in report and records; classes of one scenario have different names. 1 to 40 letters, digits and ``._-``."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Share of the requests, beside the weights of the others."""
    from_s: Seconds = 0.0
    """The class is drawn only for requests that are due at this time or later, beside the other classes of that time. Must be below
    ``duration_s``. Works with laws that give requests times: not with ``closed`` and ``burst``."""
    until_s: Seconds | None = None
    """The class is drawn only for requests that are due before this time; without the key until the end. Must be above ``from_s``.
    Each time before ``duration_s`` needs a class. A conversation that has begun goes on."""
    model: str | None = None
    """The model or adapter that the class asks, by a name of the target's /v1/models. Without the key the class asks the
    scenario's ``model``. With ``endpoint: generate`` the field is sent only if the key is there."""
    endpoint: Literal["completions", "chat", "generate"] = "completions"
    """``/v1/completions``, ``/v1/chat/completions`` or ``/generate``."""
    stream: bool = True
    """Ask for the answer token by token. Without it there are no TPOT and no ITL, and TTFT is the time of the whole answer."""
    prompt: Literal["ids", "text"] = "ids"
    """``ids``: random token ids, exact in length (completions only). ``text``: English words, about one token each."""
    prompts: InputFile | None = None
    """File with prompts in place of made words: JSON as of ShareGPT, JSONL or Parquet; docs/loadtest.md lists the forms. Works with
    ``prompt: text``. A conversation says the turns of one record, as many as both the record and ``turns`` have. Relative to the
    scenario's folder."""
    token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], Annotated[int, Field(ge=0, lt=2**31)]] = (10, 1000)
    """Range of the random ids, both ends included; all must exist in the model's vocabulary."""
    shared_prefix_tokens: int = Field(default=0, ge=0, le=1_000_000)
    """The first so many tokens of each prompt are the same in all requests of the class; a shorter prompt is shared whole. Of a
    conversation they are the system prompt."""
    input_tokens: Length = Length()
    """Of the prompt, the shared prefix included; a chat template comes on top. Of a conversation: of what the user says in one turn."""
    output_tokens: Length = Length()
    """What ``max_tokens`` of the request is."""
    ignore_eos: bool = True
    """Answers are as long as drawn. Endpoints other than vLLM's may refuse the field; false leaves it out."""
    usage: Literal["continuous", "final"] = "continuous"
    """``continuous``: the server counts the tokens of each chunk (vLLM's ``continuous_usage_stats``). ``final``: only of the whole
    answer, as OpenAI's own field asks; each chunk then counts as one token. For servers that refuse fields which they do not know."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """0 is greedy: such answers can be compared with those of a reference run."""
    tools: tuple[dict[str, JsonValue], ...] = ()
    """Functions that the model may call, as OpenAI's API describes them. Works with ``endpoint: chat``. In a conversation the next
    turn holds the calls of the answer and a made result for each."""
    tool_choice: ToolChoice = None
    """Whether the model calls a tool: ``auto`` (what a server takes without the key) lets it choose, ``none`` forbids it, ``required``
    demands a call, and ``{type: function, function: {name: NAME}}`` demands one of that function. Works with ``tools``; a demanded
    call needs ``ignore_eos: false``."""
    response_format: dict[str, JsonValue] | None = None
    """What the answer must look like, as OpenAI's API describes it: ``{type: json_object}``, or ``{type: json_schema, json_schema:
    {name: NAME, schema: {...}}}``. Works with ``endpoint: chat`` and ``completions``, and needs ``ignore_eos: false``."""
    conversation: Conversation | None = None
    """Each arrival is that of a user who says several things, one after the other. Works with ``endpoint: chat``."""
    cancel_after_s: float | None = Field(default=None, gt=0)
    """The client goes away so long after sending; counts as cancelled, not as failed."""
    extra_body: dict[str, JsonValue] = Field(default={})
    """Further fields of the request's JSON body; they replace ours of the same name. Not ``model``, which is a key of its own."""

    @model_validator(mode="after")
    def _prompt_fits(self, info: ValidationInfo) -> Self:
        if self.token_ids[0] > self.token_ids[1]:
            raise ValueError(f"token_ids: the first one, {self.token_ids[0]}, is above the last one, {self.token_ids[1]}")
        if self.prompt == "ids" and self.endpoint != "completions":
            raise ValueError(f"prompt: ids works with endpoint: completions, not {self.endpoint}; take prompt: text")
        if self.prompts is not None and self.prompt != "text":
            raise ValueError("prompts are text; take prompt: text beside them")
        for name in ("input_tokens", "shared_prefix_tokens") if info.context != RECORDED else ():  # a manifest has all keys
            if self.prompts is not None and name in self.model_fields_set:
                raise ValueError(f"{name} does nothing beside prompts, whose file has the prompts; leave it out")
        if self.conversation is not None and self.endpoint != "chat":
            raise ValueError(f"conversation works with endpoint: chat, not {self.endpoint}; take endpoint: chat and prompt: text")
        return self

    @model_validator(mode="after")
    def _api_fits(self, info: ValidationInfo) -> Self:
        if self.model == "":
            raise ValueError("model '' is no name; name a model of the target's /v1/models, or leave the key out")
        if (
            "model" in self.extra_body and info.context != RECORDED
        ):  # neither the check of the target nor the report reads it there
            raise ValueError(f"extra_body holds model ({self.extra_body['model']!r}); name it by the class's own key, model")
        if self.tools and self.endpoint != "chat":
            raise ValueError(f"tools work with endpoint: chat, not {self.endpoint}; take endpoint: chat and prompt: text")
        if not (self.tool_choice in (None, "auto", "none", "required") or isinstance(self.tool_choice, dict)):
            forms = "auto, none, required and {type: function, function: {name: NAME}}"
            raise ValueError(f"tool_choice {self.tool_choice!r} is none of {forms}")
        if self.tool_choice is not None and not self.tools:
            raise ValueError(f"tool_choice {self.tool_choice!r} does nothing without tools; name them too, or leave it out")
        if self.response_format is not None and self.endpoint == "generate":
            raise ValueError("response_format works with endpoint: chat and completions, not generate; take one of them")
        # What must be JSON can end only where the JSON does; min_tokens forbids that end, and an engine then has no token to go on with.
        if self.ignore_eos and (self.response_format is not None or self.tool_choice not in (None, "auto", "none")):
            key = "tool_choice" if self.response_format is None else "response_format"
            raise ValueError(f"{key} {getattr(self, key)!r} needs ignore_eos: false, for the answer must end where its JSON does")
        return self


class Fault(Part):
    """Something that is broken on purpose during the run; marked on every plot over time."""

    at_s: Seconds
    action: Literal["kill", "stop", "cut-link", "command"]
    """``stop`` is SIGSTOP and, after ``for_s``, SIGCONT. ``cut-link`` drops the connections of a relay between client and target."""
    process: str = ""
    """Of kill and stop: part of the command line of exactly one process in ``below_pid``'s tree; ``a|b`` is one or the other."""
    below_pid: int | None = None
    """Root of the processes that may be touched; nothing outside its tree ever is."""
    command: tuple[str, ...] = ()
    """Of ``command``: program and arguments, for example kubectl."""
    for_s: Seconds = 5.0
    """How long a process stands still or a link stays cut; a command has at least a minute."""
    name: str = ""
    """On the plots, in place of action and process."""


class Observe(Part):
    """What is recorded of the target once a second."""

    metrics_url: Url = ""
    """Prometheus text; default: /metrics of the target. ``none`` switches it off."""
    interval_s: float = Field(default=1.0, gt=0.1, le=5)
    """Between two scrapes. A number of replicas that is told holds for 10 s at most."""
    serve_status: bool = False
    """Also the replicas of Ray Serve, from the dashboard at ``ray_dashboard_url``. If that fails from the start, as beside `serve-app up`,
    which starts none, `/fleet` of the target is asked in its place, and the report says so."""
    ray_dashboard_url: str = "http://127.0.0.1:8265"
    """Where Ray's dashboard listens."""
    fleet: bool = False
    """Also the replicas that an ingress of serve-app tells by `/fleet` of the target; needs no dashboard."""
    gpus_per_replica: int = Field(default=0, ge=0, le=64)
    """GPUs of one replica, for the GPU-seconds in the report; 0: not reported."""
    kubernetes_selector: str = ""
    """Also the pods with these labels, from the Kubernetes API by the account of the pod that this runs in."""
    kubernetes_namespace: str = Field(default="", pattern=r"^[a-z0-9-]{0,63}$")
    """Empty: the pod's own, else ``default``."""
    kubernetes_url: str = Field(default="", pattern=r"^(https?://[^/\s]+\S*)?$")
    """Outside a pod: where `kubectl proxy` listens, like http://127.0.0.1:8001."""

    @model_validator(mode="after")
    def _selects(self) -> Self:
        for name in ("kubernetes_namespace", "kubernetes_url"):
            if getattr(self, name) and not self.kubernetes_selector:
                raise ValueError(f"{name} does nothing without kubernetes_selector; set that too, like app=x, or leave it out")
        return self


class Scenario(Part):
    """The whole file."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,60}$")
    """In the report's title and the default folder. 1 to 60 letters, digits and ``._-``, not dots alone."""
    model: str = ""
    """What the classes ask that name no ``model`` of their own. Empty: the first one that the target lists at /v1/models."""
    seed: int = Field(default=1, ge=0, le=MAX_SEED)
    """Of all that is drawn: the same seed gives the same schedule and the same prompts."""
    arrival: Arrival
    """When requests are sent."""
    requests: tuple[RequestClass, ...] = Field(default=(RequestClass(),), min_length=1)
    """What is asked: classes of requests, drawn by their weights."""
    duration_s: Seconds = 60.0
    """Arrivals end here."""
    warmup_s: Seconds = 5.0
    """Requests due before it are sent, kept and left out of every figure. If latencies show a longer warm-up, in which no request failed
    and every limit of the SLO was kept, all of that is left out, and the report says how long it was."""
    timeout_s: float = Field(default=120.0, gt=0)
    """From due to the end of the answer; a later answer is a timeout, which every distribution keeps as 'at least this'."""
    drain_s: Seconds = 120.0
    """After the last arrival; what is unfinished then is a timeout."""
    stall_s: float = Field(default=1.0, gt=0)
    """A gap between chunks above this is counted as a stall."""
    workers: int = Field(default=1, ge=1, le=256)
    """Load generator processes; plan one per 80 requests/s of 128 streamed tokens."""
    slo: Slo = Slo()
    """The limits that the run is judged by; none: it passes if it is valid."""
    keep_text: bool = True
    """Keep each answer's text in the records (the audit needs it)."""
    tokenizer: str = ""
    """Path of a tokenizer.json: prompts of text are cut to the exact length, and output tokens are counted again with it."""
    faults: tuple[Fault, ...] = ()
    """What is broken on purpose during the run."""
    observe: Observe = Observe()
    """What is recorded of the target beside the requests."""

    @property
    def has_conversations(self) -> bool:
        return any(c.conversation is not None for c in self.requests)

    def models(self, default: str) -> list[str]:
        """Return the models that are asked, each once; ``default`` is the one of the classes that name none."""
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
    """Return the file of the name: the path itself, or that of a scenario that comes with the package.

    Raises:
        UsageError: It is a bare name, and there is neither.
    """
    if os.path.exists(name) or name.suffix or name != Path(name.name):
        return name
    ours = {path.stem: path for path in sorted((Path(__file__).parents[1] / "scenarios").glob("*.yaml"))}
    if name.name not in ours:
        raise UsageError(shown(str(name)), f"is no file, and no scenario of the package: {', '.join(ours)}")
    return ours[name.name]


def load_scenario(name: Path, *, overrides: dict[str, Any] | None = None) -> Scenario:
    """Read the file, as `scenario_file` finds it; ``overrides`` replace its top-level keys.

    Raises:
        UsageError: It cannot be read, or a value is wrong; the message has the key's path.
    """
    path = scenario_file(name)
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UsageError(str(path), "a scenario is a mapping of keys to values")
    return parse_scenario({**values, **(overrides or {})}, folder=path.parent)


def parse_scenario(values: dict[str, Any], *, folder: Path = Path(), context: Any = None) -> Scenario:
    """Check the values; the files of a trace and of prompts are looked up from ``folder``.

    Args:
        context: `RECORDED` for values from a manifest.

    Raises:
        UsageError: One line with the path of the key, the value and what it should be.
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
    """Return pydantic's first complaint as one line: the key's path as the file has it, the value, and the way out."""
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

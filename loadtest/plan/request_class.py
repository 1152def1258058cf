"""`RequestClass` is one kind of request of a scenario: which endpoint it asks, with what prompts, lengths, tools and conversations.

Lengths are in tokens, times in seconds.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from loadtest.plan.laws import InputFile, Part, Seconds

Tokens = Annotated[int, Field(ge=1, le=1_000_000)]
ToolChoice = Annotated[
    JsonValue, WithJsonSchema({"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}, {"type": "null"}]})
]

RECORDED = {"recorded": True}
"""Validation context for a scenario from a manifest: old manifests have every field of a length, even fields that its law ignores."""


class Length(Part):
    """A whole number that is drawn for each request: a number of tokens, or of a conversation's turns."""

    dist: Literal["constant", "uniform", "exponential", "lognormal"] = "constant"
    """The distribution of the numbers."""
    mean: float = Field(default=64, gt=0)
    """Mean of the distribution before numbers outside min..max are rejected; ``uniform`` has none."""
    cv: float = Field(default=1.0, ge=0.001, le=100)
    """Standard deviation over mean; only for ``lognormal``."""
    min: Tokens = 1
    """Smallest number."""
    max: Tokens = 4096
    """Largest number. Numbers outside min..max are drawn again, not cut: a cut would accumulate them at the limit."""

    @property
    def _unused(self) -> set[str]:
        """Fields that the law does not use: they are refused in a file, and not written."""
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
        if self.dist == "constant" and not self.min <= self.mean <= self.max:  # other laws often have max far below their mean
            raise ValueError(f"mean {self.mean:g} is outside min {self.min} .. max {self.max}")
        return self


class Pause(Part):
    """A number of seconds that is drawn for each pause."""

    dist: Literal["constant", "exponential"] = "exponential"
    """The distribution of the seconds."""
    mean: Seconds = 10.0


class Conversation(Part):
    """Requests that follow each other: each turn sends all earlier messages too, the server's own answers included."""

    turns: Length = Length(mean=4, max=100)
    """Number of the user's messages. A conversation ends early if an answer fails, and at the scenario's ``duration_s``."""
    think_s: Pause = Pause()
    """Pause from the end of an answer until the user's next turn is due."""


class RequestClass(Part):
    """One kind of request."""

    name: str = Field(default="default", pattern=r"^[A-Za-z0-9._-]{1,40}$")
    """Name of the class in report and records; no two classes of a scenario share a name. 1 to 40 letters, digits and ``._-``."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """The class gets this share of the sum of all weights."""
    from_s: Seconds = 0.0
    """The class is drawn only for requests that are due at this time or later, together with the other classes of that time. Must be below
    ``duration_s``. Works with laws that give requests times: not with ``closed`` and ``burst``."""
    until_s: Seconds | None = None
    """The class is drawn only for requests that are due before this time; without the key, until the end. Must be above ``from_s``.
    Each time before ``duration_s`` needs a class. A conversation that has begun continues."""
    model: str | None = None
    """The model or adapter of the class's requests: a name of the target's /v1/models. The default is the scenario's ``model``.
    With ``endpoint: generate`` the field is sent only if this key is set."""
    endpoint: Literal["completions", "chat", "generate"] = "completions"
    """``/v1/completions``, ``/v1/chat/completions`` or ``/generate``."""
    stream: bool = True
    """Ask for the answer token by token. If false, there is no TPOT and no ITL, and TTFT is the time of the whole answer."""
    prompt: Literal["ids", "text"] = "ids"
    """``ids``: random token ids, exact in length (completions only). ``text``: English words, about one token each."""
    prompts: InputFile | None = None
    """File with prompts to send instead of generated words: ShareGPT's JSON, JSONL or Parquet; docs/loadtest.md lists the forms. Works
    with ``prompt: text``. A conversation sends the turns of one record, as many as both the record and ``turns`` have. The path is
    relative to the scenario's folder."""
    token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], Annotated[int, Field(ge=0, lt=2**31)]] = (10, 1000)
    """Range of the random ids, both ends included; all must exist in the model's vocabulary."""
    shared_prefix_tokens: int = Field(default=0, ge=0, le=1_000_000)
    """This many tokens at the start of each prompt are the same in all requests of the class; a shorter prompt is shared whole. In a
    conversation they are the system prompt."""
    input_tokens: Length = Length()
    """Length of the prompt, the shared prefix included; a chat template adds tokens to it. In a conversation: length of one message of
    the user."""
    output_tokens: Length = Length()
    """The request's ``max_tokens``."""
    ignore_eos: bool = True
    """Make answers exactly as long as drawn. Endpoints other than vLLM's may refuse the field; false leaves it out."""
    usage: Literal["continuous", "final"] = "continuous"
    """``continuous``: the server counts the tokens of each chunk (vLLM's ``continuous_usage_stats``). ``final``: it counts only those of
    the whole answer, as OpenAI's own field asks; each chunk then counts as one token. Use ``final`` if the server refuses unknown
    fields."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature; 0 is greedy, and greedy answers can be compared with those of a reference run."""
    tools: tuple[dict[str, JsonValue], ...] = ()
    """Functions that the model may call, as OpenAI's API describes them. Works with ``endpoint: chat``. In a conversation the next
    turn holds the calls of the answer and an invented result for each."""
    tool_choice: ToolChoice = None
    """When the model calls a tool: ``auto`` (the servers' default) lets the model choose, ``none`` forbids calls, ``required``
    demands a call, and ``{type: function, function: {name: NAME}}`` demands one of that function. Works with ``tools``; a demanded
    call needs ``ignore_eos: false``."""
    response_format: dict[str, JsonValue] | None = None
    """Format of the answer, as OpenAI's API describes it: ``{type: json_object}``, or ``{type: json_schema, json_schema:
    {name: NAME, schema: {...}}}``. Works with ``endpoint: chat`` and ``completions``, and needs ``ignore_eos: false``."""
    conversation: Conversation | None = None
    """Make each arrival a user who sends several messages, one after the other. Works with ``endpoint: chat``."""
    cancel_after_s: float | None = Field(default=None, gt=0)
    """Seconds after sending at which the client disconnects; the request counts as cancelled, not as failed."""
    extra_body: dict[str, JsonValue] = Field(default={})
    """Further fields of the request's JSON body; they replace the kit's fields of the same name. ``model`` is refused: set the key
    ``model`` instead."""

    @model_validator(mode="after")
    def _prompt_fits(self, info: ValidationInfo) -> Self:
        if self.token_ids[0] > self.token_ids[1]:
            raise ValueError(f"token_ids: the first one, {self.token_ids[0]}, is above the last one, {self.token_ids[1]}")
        if self.prompt == "ids" and self.endpoint != "completions":
            raise ValueError(f"prompt: ids works with endpoint: completions, not {self.endpoint}; take prompt: text")
        if self.prompts is not None and self.prompt != "text":
            raise ValueError("prompts are text; take prompt: text beside them")
        for name in (
            ("input_tokens", "shared_prefix_tokens") if info.context != RECORDED else ()
        ):  # a manifest has all keys, set or not
            if self.prompts is not None and name in self.model_fields_set:
                raise ValueError(f"{name} does nothing beside prompts, whose file has the prompts; leave it out")
        if self.conversation is not None and self.endpoint != "chat":
            raise ValueError(f"conversation works with endpoint: chat, not {self.endpoint}; take endpoint: chat and prompt: text")
        return self

    @model_validator(mode="after")
    def _api_fits(self, info: ValidationInfo) -> Self:
        if self.model == "":
            raise ValueError("model '' is no name; name a model of the target's /v1/models, or leave the key out")
        if "model" in self.extra_body and info.context != RECORDED:  # neither the check of the target nor the report looks there
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
        # A JSON answer can end only where the JSON does. min_tokens forbids that end, and the engine is left without an allowed token.
        if self.ignore_eos and (self.response_format is not None or self.tool_choice not in (None, "auto", "none")):
            key = "tool_choice" if self.response_format is None else "response_format"
            raise ValueError(f"{key} {getattr(self, key)!r} needs ignore_eos: false, for the answer must end where its JSON does")
        return self

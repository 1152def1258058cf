"""The law file fixes in advance how the server answers which requests.

Times are in seconds. Those in `Stall` and `WarmUp` count from the first generation request that the server reads.
"""

import math
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loadtest.errors import UsageError

Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Constant(_Part):
    """Always ``s``."""

    law: Literal["constant"] = "constant"
    s: Seconds

    def quantile(self, u: float) -> float:
        """Return the time below which a share ``u`` of all draws stays, 0 < u < 1; the other laws do likewise."""
        return self.s


class Exponential(_Part):
    law: Literal["exponential"] = "exponential"
    mean_s: Seconds

    def quantile(self, u: float) -> float:
        return -self.mean_s * math.log1p(-u)


class Lognormal(_Part):
    """``cv`` is the standard deviation over the mean of the times themselves, not of their logarithms."""

    law: Literal["lognormal"] = "lognormal"
    mean_s: Seconds
    cv: float = Field(gt=0, le=20)

    def quantile(self, u: float) -> float:
        variance = math.log1p(self.cv**2)
        return self.mean_s * math.exp(math.sqrt(variance) * NormalDist().inv_cdf(u) - variance / 2)


class TwoPoint(_Part):
    """``high_s`` with probability ``high_probability``, else ``low_s``."""

    law: Literal["two-point"] = "two-point"
    low_s: Seconds
    high_s: Seconds
    high_probability: Probability

    def quantile(self, u: float) -> float:
        return self.low_s if u < 1 - self.high_probability else self.high_s


Distribution = Annotated[Constant | Exponential | Lognormal | TwoPoint, Field(discriminator="law")]


class Stall(_Part):
    """The server's own clock stops: nothing is sent or accepted, and later due times move by ``for_s``."""

    at_s: Seconds
    for_s: Seconds


class WarmUp(_Part):
    """A request that starts before ``for_s`` takes ``factor`` times as long. ``linear``: the factor falls to 1 gradually; ``step``: at
    the end."""

    for_s: float = Field(gt=0)
    factor: float = Field(ge=1, le=1000)
    shape: Literal["linear", "step"] = "linear"


class Failure(_Part):
    """A failure and its requests: number ``every``, 2 x ``every``, ... in order of arrival, or each with ``probability``."""

    kind: Literal["drop", "truncate", "error-event", "status", "html", "duplicate", "slow-headers"]
    """``drop`` closes without an answer, ``truncate`` in mid-answer. ``duplicate`` counts and logs the request twice."""
    every: int = Field(default=0, ge=0)
    probability: Probability = 0
    after_tokens: int = Field(default=0, ge=0)
    """For ``truncate`` and ``error-event``: number of tokens that are sent before; at most all."""
    status: int = Field(default=503, ge=300, le=599)
    retry_after_s: int | None = Field(default=1, ge=0)
    """The Retry-After header of ``status``; None leaves it out."""
    delay_s: Seconds = 1.0
    """For ``slow-headers``: the status line and headers come byte by byte over this time."""

    @model_validator(mode="after")
    def _one_pattern(self) -> Self:
        if bool(self.every) == bool(self.probability):
            raise ValueError(f"give either every or probability, got every {self.every} and probability {self.probability:g}")
        return self


class Law(_Part):
    """A whole law file. The first chunk of a streamed answer is due queue + ttft + edge after arrival, each further chunk a gap later."""

    model: str = "truth"
    adapters: tuple[str, ...] = ()
    """Further names at /v1/models, answered like the model."""
    ttft: Distribution = Constant(s=0.1)
    """Time from the start in a slot to the first chunk: the prefill."""
    prompt_token_s: Seconds = 0.0
    """Added to ``ttft`` for each token of the prompt."""
    gap: Distribution = Constant(s=0.02)
    """Time between chunks, one draw for each gap."""
    service: Distribution | None = None
    """Replaces ttft and gap by one draw for the whole answer; its chunks are due at equal distances, the last at the end."""
    edge: Distribution = Constant(s=0)
    """Delay of every chunk of a request, one draw for all: outside the slot and not in /metrics, like a proxy in front."""
    slots: int = Field(default=0, ge=0, le=10_000)
    """Number of requests served at a time; others wait in order of arrival. 0: no limit. A client that disconnects keeps its slot until
    the end by the law, so that a queue can be computed from arrivals alone."""
    refuses_when_full: bool = False
    """Answer a request that finds all ``slots`` busy with 429 at once, instead of queueing it: Erlang's loss system, M/G/c/c."""
    tokens_per_chunk: int = Field(default=1, ge=1)
    coalesce: int = Field(default=1, ge=1)
    """Number of events that are sent in one write, when the last of them is due."""
    split: int | Literal["bytes"] = 1
    """Number of writes into which each event (or ``coalesce`` events) is cut; ``bytes``: one write per byte. The last write is on time;
    the others are spread over the ``split_over_s`` before it."""
    split_over_s: Seconds = 0.005
    refuses: tuple[str, ...] = ()
    """Fields of the body, or of its ``stream_options``, that are answered with 400, as a server answers unknown fields."""
    text: Literal["ascii", "multi-byte"] = "ascii"
    framing: Literal["chunked", "chunked-trailer", "close"] = "chunked"
    """How the end of a stream is marked: ``close`` is HTTP/1.0's way."""
    answers_per_connection: int = Field(default=0, ge=0)
    """Number of answers after which the connection is closed without an announcement; 0: never."""
    kv_tokens: int = Field(default=100_000, ge=1)
    """Number of tokens at which vllm:kv_cache_usage_perc is 1."""
    stalls: tuple[Stall, ...] = ()
    warm_up: WarmUp | None = None
    failures: tuple[Failure, ...] = ()
    """Failures; the first that matches a request applies."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.refuses_when_full and not self.slots:
            raise ValueError("refuses_when_full with slots 0: without a limit no request finds all slots taken; give slots")
        for before, after in pairwise(self.stalls):
            if after.at_s < before.at_s + before.for_s:
                raise ValueError(f"stalls: the one at {after.at_s:g} begins before the one at {before.at_s:g} has ended")
        if self.split != "bytes" and self.split < 1:
            raise ValueError(f"split {self.split} is below 1")
        return self


def load_law(path: Path) -> Law:
    """Read the file.

    Raises:
        UsageError: The file cannot be read, or a value is wrong; the message has the key's path.
    """
    try:
        return Law.model_validate(yaml.safe_load(path.read_text()) or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise UsageError(str(path), " ".join(str(exc).split())) from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {where}".rstrip(": "), f"{first['msg']} (got {first['input']!r})") from exc

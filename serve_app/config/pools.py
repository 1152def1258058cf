"""`PoolsSettings` gives a model's replicas roles: some compute long prompts, the others make the answers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field
from pydantic_core import PydanticCustomError

from serve_app.config.base import Int, Section
from serve_app.config.checks import wrong

if TYPE_CHECKING:
    from serve_app.config.model import ModelSettings


class PoolBounds(Section):
    """The bounds of one pool."""

    min: Int = Field(default=1, ge=1)
    """Replicas that have this role if all of the model's `replicas.min` run. With fewer replicas, both pools have fewer."""
    max: Int | None = Field(default=None, ge=1)
    """Most replicas that have this role. Default: all but the other pool's min."""


class Sizes(NamedTuple):
    """The bounds of both pools, in the order of `core.pool_sizes.PoolSizes`."""

    prefill_min: int
    prefill_max: int
    decode_min: int
    decode_max: int


class PoolsSettings(Section):
    """The model's replicas in two pools. `replicas` has the number of both together."""

    prefill: PoolBounds = PoolBounds()
    """Replicas that compute long prompts, and hand the answers over. With a fixed number of replicas: min of them."""
    decode: PoolBounds = PoolBounds()
    """Replicas that make the answers, and compute short prompts."""

    def sizes(self, most: int) -> Sizes:
        """Return the bounds of a model with at most ``most`` replicas."""
        prefill, decode = self.prefill, self.decode
        return Sizes(
            prefill_min=prefill.min,
            prefill_max=prefill.max or most - decode.min,
            decode_min=decode.min,
            decode_max=decode.max or most - prefill.min,
        )


def pool_problems(model: "ModelSettings") -> Iterator[PydanticCustomError]:
    """Yield what does not fit to the pools of the model."""
    if (pools := model.pools) is None:
        return
    if not model.kv.is_on:
        problem = f"is set and kv.transfer is {model.kv.transfer!r}: answers move to the other pool only with their KV"
        yield wrong("pools", problem, "set kv.transfer: nixl, or remove pools")
    if model.routing.apart:
        yield wrong("routing.apart", "is true and pools is set: both place long prompts", "remove one of the two")
    replicas, (prefill, decode) = model.replicas, (pools.prefill, pools.decode)
    for name, pool in (("prefill", prefill), ("decode", decode)):
        if pool.max is not None and pool.max < pool.min:
            yield wrong(f"pools.{name}.max", f"min is {pool.min} and max is {pool.max}", f"set max to {pool.min} or more")
    if replicas.min < (least := prefill.min + decode.min):
        problem = f"is {replicas.min}, and pools.prefill.min is {prefill.min} and pools.decode.min is {decode.min}"
        yield wrong("replicas.min", problem, f"set it to {least} or more")
    if prefill.max is not None and decode.max is not None and prefill.max + decode.max < replicas.max:
        problem = f"is {replicas.max}, and pools.prefill.max is {prefill.max} and pools.decode.max is {decode.max}"
        yield wrong("replicas.max", problem, f"set it to {prefill.max + decode.max}, or raise the other two")
    if not replicas.is_scaled and prefill.max not in (None, prefill.min):
        problem = f"has no effect: it is {prefill.max}, and with a fixed number of replicas, min of them compute prompts"
        yield wrong("pools.prefill.max", problem, "remove it, or set replicas.max above replicas.min")

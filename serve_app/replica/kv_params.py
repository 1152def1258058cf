"""This module checks where the KV of a request is that another replica handed over, before vLLM takes it. Pure.

vLLM does not check it: a wrong number of blocks ends its engine, and the KV of other tokens makes wrong text.
"""

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

CAME_AT = "serve_app_came_at"
"""Key of the parameters: when they came, by this process's monotonic clock, in seconds."""

_Text = Annotated[str, Meta(min_length=1, max_length=512)]
_Block = Annotated[int, Meta(ge=0, lt=1 << 31)]


class _Params(msgspec.Struct, frozen=True):
    """The part of ``kv_transfer_params`` that vLLM's NIXL connector reads. Other keys are left out."""

    do_remote_prefill: bool
    remote_block_ids: Annotated[list[list[_Block]], Meta(min_length=1, max_length=1)]
    """One list: that of the only kind of layers."""
    remote_engine_id: _Text
    remote_request_id: _Text
    remote_host: _Text
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_num_tokens: int
    tp_size: Annotated[int, Meta(ge=1)]
    remote_registration_generation: Annotated[int, Meta(ge=0)] = 0
    """From vLLM 0.33 on. It grows when the other engine has registered its KV anew, as after a sleep: earlier addresses are wrong then."""


_decoder = msgspec.msgpack.Decoder(_Params)


def params_of(kv: bytes, num_tokens: int, block_size: int, came_at: float) -> dict[str, Any]:
    """Return vLLM's ``kv_transfer_params`` for a request whose prompt has ``num_tokens`` tokens.

    Args:
        kv: `Add.kv`.
        num_tokens: At least 1. The KV has to be that of all of them but the last.
        block_size: Tokens of a block, in both engines.
        came_at: The value for `CAME_AT`.

    Raises:
        ValueError: These are no parameters, or not those of this prompt.
    """
    params = _decoder.decode(kv)  # msgspec's errors are ValueErrors
    if not params.do_remote_prefill:
        raise ValueError("do_remote_prefill is false")
    if params.remote_num_tokens != num_tokens - 1:
        raise ValueError(f"KV of {params.remote_num_tokens} tokens for a prompt of {num_tokens}")
    (blocks,) = params.remote_block_ids
    if len(blocks) != math.ceil(num_tokens / block_size):
        raise ValueError(f"{len(blocks)} blocks of {block_size} for a prompt of {num_tokens} tokens")
    return {**msgspec.structs.asdict(params), CAME_AT: came_at}

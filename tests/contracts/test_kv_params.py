"""`params_of` passes on each parameter by which vLLM's NIXL connector reads the KV of a request that was handed over."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from serve_app.replica.kv_params import CAME_AT, params_of
from tests.contracts.changes import difference, fail_with, line

NIXL = Path("distributed/kv_transfer/kv_connector/v1/nixl")
LEFT_OUT = """
    do_remote_decode _p_side_truncated _remote_blocks_processed
    pp_size dcp_size remote_block_size remote_blocks_expiry_time"""
"""Marks of vLLM's own, and values that are equal or without effect in all engines whose KV we move (`HandingOver.keeps_kv`)."""
SINCE_033 = {"remote_registration_generation"}
KV = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_request_id": "r@0",
    "remote_host": "10.0.0.1",
    "remote_port": 15600,
    "remote_num_tokens": 7,
    "tp_size": 1,
}


def keys(node: ast.AST) -> Iterator[str]:
    """Yield the key if the node reads a key of ``params`` or ``kv_transfer_params``."""
    match node:
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
            pass
        case ast.Call(func=ast.Attribute(value=value, attr="get"), args=[ast.Constant(value=str(key)), *_]):
            pass
        case _:
            return
    if ast.unparse(value).endswith("params"):
        yield key


def test_each_parameter_that_nixl_reads_is_passed_on_or_known() -> None:
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.submodule_search_locations is not None
    files = Path(vllm.submodule_search_locations[0], NIXL).glob("*.py")
    read = {key for file in files for node in ast.walk(ast.parse(file.read_text())) for key in keys(node)}
    ours = params_of(msgspec.msgpack.encode(KV), 8, 16, 0.0).keys() - {CAME_AT}
    assert {*KV, *SINCE_033} == ours
    known = {*ours, *LEFT_OUT.split()}
    fail_with([line("NIXL reads of kv_transfer_params", difference(sorted(known - SINCE_033), sorted(read - SINCE_033)))])

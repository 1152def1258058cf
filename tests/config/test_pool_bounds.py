"""Pools need KV that moves, bounds that fit to the model's replicas, and no other setting that places long prompts."""

from typing import Any

import pytest

from serve_app.config import parse_settings, problems
from serve_app.core.pool_sizes import PoolSizes
from tests.config.helpers import LLAMA, refusal

NIXL = LLAMA | {"kv": {"transfer": "nixl"}, "replicas": {"min": 3, "max": 8}}


def pools(**bounds: Any) -> dict[str, Any]:
    return NIXL | {"pools": bounds}


def test_a_models_replicas_have_no_roles_by_default() -> None:
    assert parse_settings({"models": {"m": NIXL}}).models["m"].pools is None


@pytest.mark.parametrize(
    ("bounds", "sizes"),
    [
        ({}, PoolSizes(1, 7, 1, 7)),
        ({"prefill": {"max": 2}}, PoolSizes(1, 2, 1, 7)),
        ({"prefill": {"min": 1, "max": 3}, "decode": {"min": 2, "max": 6}}, PoolSizes(1, 3, 2, 6)),
    ],
)
def test_a_pool_without_max_may_have_all_but_the_others_min(bounds: dict[str, Any], sizes: PoolSizes) -> None:
    model = parse_settings({"models": {"m": pools(**bounds)}}).models["m"]
    assert model.pools is not None
    assert PoolSizes(*model.pools.sizes(model.replicas.max)) == sizes


def test_pools_are_a_setting_of_ingresses_and_start_no_replica_anew() -> None:
    releases = {parse_settings({"models": {"m": model}}).models["m"].release() for model in (NIXL, pools())}
    assert len(releases) == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"kv": {"transfer": "none"}},
            "pools: is set and kv.transfer is 'none': answers move to the other pool only with their KV; "
            "set kv.transfer: nixl, or remove pools",
        ),
        ({"routing": {"apart": True}}, "routing.apart: is true and pools is set: both place long prompts; remove one of the two"),
        (
            {"replicas": {"min": 1, "max": 4}},
            "replicas.min: is 1, and pools.prefill.min is 1 and pools.decode.min is 1; set it to 2 or more",
        ),
        (
            {"pools": {"prefill": {"max": 2}, "decode": {"max": 3}}},
            "replicas.max: is 8, and pools.prefill.max is 2 and pools.decode.max is 3; set it to 5, or raise the other two",
        ),
        ({"pools": {"decode": {"min": 2, "max": 1}}}, "pools.decode.max: min is 2 and max is 1; set max to 2 or more"),
        (
            {"replicas": {"min": 3, "max": 3}, "pools": {"prefill": {"max": 2}}},
            "pools.prefill.max: has no effect: it is 2, and with a fixed number of replicas, min of them compute prompts; "
            "remove it, or set replicas.max above replicas.min",
        ),
        ({"pools": {"prefill": {"min": 0}}}, "pools.prefill.min: is 0, but should be greater than or equal to 1"),
        ({"pools": {"prefill": {"max": 0}}}, "pools.prefill.max: is 0, but should be greater than or equal to 1"),
        (
            {"pools": {"prefill": 2}},
            "pools.prefill: is 2, but should be a mapping; write its keys on lines of their own below, indented",
        ),
        ({"pools": {"prefil": {}}}, "pools.prefil: unknown key; did you mean prefill?"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_way_out(changed: dict[str, Any], said: str) -> None:
    assert refusal(models={"m": pools() | changed}) == f"models.m.{said}"


def test_a_fixed_number_of_replicas_may_say_the_same_twice() -> None:
    fixed = pools(prefill={"min": 1, "max": 1}) | {"replicas": {"min": 3, "max": 3}}
    assert problems({"models": {"m": fixed}}) == []


def test_a_canary_may_try_pools_that_its_model_has_not() -> None:
    canary = pools() | {"kv": {"transfer": "nixl", "port": 15856}, "canary": {"of": "m"}}
    assert problems({"models": {"m": NIXL, "c": canary}}) == []

"""Each of a model's two pools is sized by its own demand. A request of the plant has 400 prompt tokens, 0.04 s, and 0.04 s of answer."""

from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest

from serve_app.autoscaling.capacity import Capacity, Mix, Slo
from serve_app.autoscaling.decision import Decision, ScalingRules
from serve_app.autoscaling.decision_log import Record
from serve_app.autoscaling.fleet import FleetObservation, FleetScaler
from serve_app.autoscaling.memory import Memory, pack, unpack
from serve_app.autoscaling.pools import OrderedShare, PooledCapacity, PoolMix, pool_inputs
from serve_app.autoscaling.rules import rules_of
from serve_app.autoscaling.signals import ModelLoad
from serve_app.cli.decision_text import explanation
from serve_app.config import parse_settings
from serve_app.core.pool_sizes import PoolSizes
from serve_app.core.step_costs import REPORT_PREFIX, MeasuredCosts
from serve_app.membership import PoolNote
from tests.autoscaling.controller import BIG, INGRESS, SETTINGS, Controller
from tests.autoscaling.plant import PROMPT, RULES, TIMES, Plant

POOLED = {"model": "/big", "kv": {"transfer": "nixl"}, "replicas": {"min": 2, "max": 8}, "pools": {}}
WIDE = PoolSizes(1, 50, 1, 50)
WHOLE = Capacity(times=TIMES, mix=Mix(prompt_tokens=4000, output_tokens=100), max_batch=256, slo=Slo(ttft_s=5.0, itl_s=0.1))


def learnt(*, long_prompts: float, long_tokens: float, prefilled: float) -> PoolMix:
    mix = PoolMix()
    mix.learn(
        ModelLoad(
            interval_s=1.0,
            long_prompts=long_prompts,
            long_prompt_tokens=long_tokens,
            prefilled_tokens=prefilled,
            first_tokens=10.0,
        )
    )
    return mix


def test_without_pools_nothing_changes() -> None:
    assert learnt(long_prompts=1, long_tokens=8000, prefilled=9000).divided(WHOLE, None) is WHOLE
    assert pool_inputs(WHOLE, 3.0, 1.0) == {}


def test_work_divides_into_long_prompts_and_the_rest() -> None:
    divided = learnt(long_prompts=2, long_tokens=16_000, prefilled=20_000).divided(WHOLE, WIDE)
    assert isinstance(divided, PooledCapacity)
    assert divided.prefill.mix == Mix(prompt_tokens=8000, output_tokens=1)
    assert divided.decode.mix.prompt_tokens == pytest.approx(800)
    assert divided.decode.mix.output_tokens == 100
    # 0.32 s of 4,000 x 0.1 ms + 100 x 0.4 ms = 0.44 s are long prompts.
    assert divided.prefill_part == pytest.approx(0.32 / 0.44)
    prefill, decode = divided.pools_for(4.4)
    assert (prefill, decode) == (divided.prefill.replicas_for(3.2), divided.decode.replicas_for(1.2))
    assert divided.replicas_for(4.4) == prefill + decode
    assert divided.replicas_for(0.0) == 0
    share = pool_inputs(divided, 4.4, 1.0)["prefill_share"]
    assert (prefill - 1) / (prefill + decode - 1) < share < prefill / (prefill + decode - 1)


def test_at_a_low_load_the_share_is_that_of_the_work_and_not_of_whole_replicas() -> None:
    few_long = learnt(long_prompts=0.1, long_tokens=800, prefilled=20_000).divided(WHOLE, WIDE)
    assert isinstance(few_long, PooledCapacity)
    assert few_long.pools_for(0.1) == (1, 1)
    assert pool_inputs(few_long, 0.1, 1.0)["prefill_share"] < 0.15
    no_long = learnt(long_prompts=0, long_tokens=0, prefilled=20_000).divided(WHOLE, WIDE)
    assert pool_inputs(no_long, 0.1, 1.0)["prefill_share"] == 0.0
    assert PoolSizes(1, 7, 1, 7).num_prefill(8, 0.0) == 1


def test_each_pool_stays_within_its_bounds_and_has_room_of_its_own() -> None:
    mix = learnt(long_prompts=2, long_tokens=16_000, prefilled=20_000)
    divided = mix.divided(WHOLE, PoolSizes(2, 3, 1, 50))
    assert isinstance(divided, PooledCapacity)
    assert divided.pools_for(0.1) == (2, 1)
    assert divided.pools_for(100.0)[0] == 3
    assert divided.replicas_with_room(4.4, 0.0) == 0
    wide = mix.divided(WHOLE, WIDE)
    assert wide.replicas_with_room(4.4, 0.4) > wide.replicas_with_room(4.4, 0.01)


class LongPrompts(Plant):
    """All prompt tokens are those of long prompts: ``part`` of the requests have all of them."""

    part = 0.1

    def load(self, rate: float) -> ModelLoad:
        load = super().load(rate)
        return replace(load, long_prompts=self.part * load.first_tokens, long_prompt_tokens=load.prefilled_tokens)


def loaded(rate: float, **sizes: int) -> LongPrompts:
    """Return a plant after minutes of a steady load."""
    bounds = {"prefill_min": 1, "prefill_max": 50, "decode_min": 1, "decode_max": 50} | sizes
    rules = ScalingRules(slo=RULES.slo, headroom=0.0, pools=PoolSizes(**bounds))
    plant = LongPrompts(rules=rules, minimum=2)
    plant.run(rate, 400)
    return plant


def test_the_autoscaler_wants_what_both_pools_need_and_explains_it() -> None:
    plant = loaded(60.0)
    decision = plant.decisions[-1]
    inputs = decision.inputs
    assert inputs["prefill_demand"] == pytest.approx(60 * PROMPT * TIMES.prompt_token_s, rel=0.1)
    assert inputs["prefill_demand"] == pytest.approx(inputs["demand"] / 2, rel=0.1)
    assert inputs["prefill_needed"] >= 3 <= inputs["decode_needed"]
    assert decision.desired >= inputs["prefill_needed"] + inputs["decode_needed"] - 1
    assert 0.3 < inputs["prefill_share"] < 0.7
    seen = FleetObservation(at=plant.at, models={"m": plant.see(plant.load(60.0))})
    lines = list(explanation(Record(number=1, time=0.0, seen=seen, decided={"m": decision}), "m"))
    (pools,) = [line for line in lines if line.startswith("  pools ")]
    assert pools.endswith(f": {inputs['prefill_share']:.0%} of the need is that of prompts")


def test_a_bound_of_one_pool_does_not_starve_the_other() -> None:
    bounded, wide = (loaded(60.0, **sizes).decisions[-1].inputs for sizes in ({"prefill_max": 1}, {}))
    assert (bounded["prefill_needed"], bounded["decode_needed"]) == (1, wide["decode_needed"])


def test_the_rules_take_the_bounds_from_the_settings() -> None:
    model = {"model": "/m", "kv": {"transfer": "nixl"}, "replicas": {"min": 2, "max": 6}, "pools": {"prefill": {"max": 2}}}
    assert rules_of(parse_settings({"models": {"m": model}})).models["m"].pools == PoolSizes(1, 2, 1, 5)


def test_the_policy_says_how_the_replicas_divide_and_repeats_it() -> None:
    controller = Controller(SETTINGS | {"models": SETTINGS["models"] | {"big": POOLED}})
    costs = MeasuredCosts(
        step_s=0.03,
        output_token_s=4e-4,
        prompt_token_s=1e-4,
        step_error_s=3e-4,
        output_token_error_s=4e-6,
        prompt_token_error_s=1e-6,
    )
    measured = {f"{REPORT_PREFIX}{name}": value for name, value in asdict(costs).items()}
    for second in range(60):
        total = 20.0 * second
        counters = dict.fromkeys(("requests", "first_tokens", "finished"), total)
        counters |= {"prompt_tokens": 400 * total, "prefilled_tokens": 400 * total, "long_prompt_tokens": 400 * total}
        counters |= {"long_prompts": total / 10, "output_tokens": 100 * total, "finished_tokens": 100 * total}
        controller.report(INGRESS, "i1", **{f"{name}__big": value for name, value in counters.items()})
        controller.report(
            BIG, "b1", steps=0.0, busy_s=0.0, running=20.0, waiting=0.0, kv_usage=0.1, max_num_seqs=256.0, **measured
        )
        controller.tick()
    notes = controller.pools
    assert {note.model for note in notes} == {"big"}
    assert all(0.2 < note.prefill_share < 0.8 for note in notes)
    repeats = [note for note in notes if note == notes[-1]]
    assert len(repeats) >= 3, "a board that starts again has no shares"


def inputs(share: float, *, prefill: int = 1, decode: int = 1) -> dict[str, float]:
    return {"prefill_share": share, "prefill_needed": float(prefill), "decode_needed": float(decode), "keep_s": 60.0}


def ordered(*asked: tuple[float, float], share: float = 0.5, desired: int = 8) -> list[float]:
    """Return the shares that are in force after each pair of a time and the share asked for."""
    order, found = OrderedShare(share), []
    for at, each in asked:
        order.ask(inputs(each), desired, at)
        found.append(order.share)
    return found


def test_a_small_change_of_the_demand_changes_no_role() -> None:
    controller = Controller(SETTINGS | {"models": SETTINGS["models"] | {"big": POOLED}})
    memory = Memory(FleetScaler(rules_of(parse_settings(SETTINGS))), 0.0)
    memory.ordered_shares["tiny"] = OrderedShare(0.5)  # from a configuration in which it had pools
    for second, share in enumerate((0.25, 0.3, 0.2, 0.33, 0.4)):
        decided = Decision(desired=8, wish="keep", alternatives={}, inputs=inputs(share))
        memory.decided = {"big": decided, "tiny": replace(decided, inputs={})}
        controller.policy._plan_pools(memory, float(second))
    assert controller.pools == [PoolNote("big", share, ("big",)) for share in (0.25, 0.4)], (
        "0.33 of 8 replicas are less than three quarters more"
    )


def test_more_replicas_compute_prompts_at_once_and_fewer_once_fewer_have_long_sufficed() -> None:
    assert ordered((0, 0.75), (1, 0.25), (30, 0.4), (60, 0.25), (61, 0.25)) == [0.75, 0.75, 0.75, 0.75, 0.4]
    assert ordered((1, 0.25), (59, 0.45), (62, 0.25), (121, 0.25), (122, 0.25)) == [0.5, 0.5, 0.5, 0.5, 0.25], (
        "0.45 of 8 replicas are hardly fewer than 0.5: the time begins anew"
    )


def test_the_pool_for_prompts_gets_whole_replicas_if_the_other_one_has_more_than_it_needs() -> None:
    for decode, share in ((5, 2 / 7), (6, 1.5 / 7)):
        order = OrderedShare(0.0)
        order.ask(inputs(1.5 / 7, prefill=2, decode=decode), 7, 0.0)
        assert order.share == pytest.approx(share)


class RareLongPrompts(LongPrompts):
    """One request in a hundred has a long prompt of 20,000 tokens, by chance."""

    rng: np.random.Generator

    def load(self, rate: float) -> ModelLoad:
        load = super().load(rate)
        number = float(self.rng.poisson(load.first_tokens / 100))
        return replace(load, long_prompts=number, long_prompt_tokens=min(load.prefilled_tokens, 20_000 * number))


def test_chance_in_a_steady_load_hardly_changes_a_role_in_20_minutes() -> None:
    plant = RareLongPrompts(rules=ScalingRules(slo=RULES.slo, headroom=0.0, pools=WIDE), minimum=2)
    plant.rng = np.random.default_rng(1)
    plant.run(60.0, 1600)
    order, shares = OrderedShare(0.0), []
    for second, decision in enumerate(plant.decisions[400:]):
        order.ask(decision.inputs, decision.desired, float(second))
        shares.append(order.share)
    asked = [round(decision.inputs["prefill_share"] * decision.desired) for decision in plant.decisions[400:]]
    assert sum(before != after for before, after in pairwise(asked)) > 20
    assert sum(before != after for before, after in pairwise(shares[1:])) <= 4


def test_a_new_controller_takes_over_the_ordered_shares_of_models_that_are_the_same() -> None:
    memory = Memory(FleetScaler(rules_of(parse_settings(SETTINGS))), 0.0, models={"big": "1", "tiny": "2"})
    order = OrderedShare(0.5)
    order.ask(inputs(0.25), 8, 7.0)
    memory.ordered_shares = {"big": order, "tiny": OrderedShare(0.25)}
    data = pack(memory, time=100.0)
    assert data is not None
    found = unpack(data, time=101.0, models={"big": "1", "tiny": "3"}, clock_s=0.0)
    assert found is not None
    assert found.ordered_shares == {"big": order}

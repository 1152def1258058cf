"""The autoscaler learns the lengths of answers and prompts from the requests that run, and from those that ended."""

import random
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.autoscaling.capacity import StepCosts, StepTimes
from serve_app.autoscaling.model_autoscaler import ModelAutoscaler
from serve_app.autoscaling.signals import ModelLoad
from serve_app.autoscaling.simulation.simulated_replica import Hardware, Job, Replica, steps_of_times
from tests.autoscaling.plant import ANSWER, RULES
from tests.autoscaling.queue_plant import QueuePlant, rate_of

TOKENS_PER_S = 20.0
RISE_AT, RISE_S = 120, 10


def answers(
    shape: int | None, rate: float, seed: int, *, factor: float = 1.0, longer: float = 1.0, seconds: int = RISE_AT + RISE_S
) -> Iterator[tuple[ModelLoad, float]]:
    """Yield (load, mean tokens of the answers that ended) for each second; rate or lengths change at `RISE_AT`.

    Args:
        shape: Of the gamma law of the lengths, whose mean is `ANSWER`; 1 is exponential, None is all alike.
        rate: Requests per second.
        seed: Seed of all chance.
        factor: Factor on the rate from then on.
        longer: Factor on the lengths of requests that arrive from then on.
        seconds: How many seconds to yield.
    """
    rng = random.Random(seed)
    running: list[list[float]] = []  # tokens made, and of the whole answer
    for second in range(seconds):
        arrived = rate * (factor if second >= RISE_AT else 1.0)
        length = ANSWER * (longer if second >= RISE_AT else 1.0)
        for _ in range(int(arrived) + (rng.random() < arrived % 1)):
            running.append([0.0, length if shape is None else rng.gammavariate(shape, length / shape)])
        made = 0.0
        for answer in running:
            new = min(TOKENS_PER_S, answer[1] - answer[0])
            answer[0] += new
            made += new
        ended = [whole for so_far, whole in running if so_far >= whole]
        running = [answer for answer in running if answer[0] < answer[1]]
        load = ModelLoad(
            interval_s=1.0,
            output_tokens=made,
            finished=len(ended),
            finished_tokens=sum(ended),
            finished_tokens_squared=sum(whole**2 for whole in ended),
        )
        yield load, fmean(ended) if ended else ANSWER


def learnt(shape: int | None, seed: int) -> tuple[float, float]:
    """Return the learnt mean length, and that of the answers that ended, over the seconds after a threefold rise."""
    scaler, found, plain = ModelAutoscaler(RULES), [], []
    for second, (load, ended) in enumerate(answers(shape, 20.0, seed, factor=3.0)):
        scaler._learn_lengths(load)
        if second >= RISE_AT:
            found.append(scaler._output_tokens.value or 0.0)
            plain.append(ended)
    return fmean(found), fmean(plain)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([1, 2, None]), st.integers(0, 1000))
def test_a_rise_does_not_make_answers_look_shorter(shape: int | None, seed: int) -> None:
    """Lengths are exponential, less scattered, or all equal. The deviation of the mean of some 300 answers is 6 %."""
    assert learnt(shape, seed)[0] == pytest.approx(ANSWER, rel=0.2)


def test_by_those_that_ended_alone_answers_would_look_shorter() -> None:
    """Without this, the test above would prove nothing."""
    assert fmean(learnt(1, seed)[1] for seed in range(10)) < 0.85 * ANSWER
    assert fmean(learnt(1, seed)[0] for seed in range(10)) == pytest.approx(ANSWER, rel=0.05)


def grown(shape: int | None, seed: int, seconds: int) -> tuple[float, float]:
    """Return the learnt growth of the length, as a share, this long after answers became four times as long; then that of ended ones."""
    whole, ended = ModelAutoscaler(RULES), ModelAutoscaler(RULES)
    found: list[tuple[float, ...]] = []
    for load, _ in answers(shape, 20.0, seed, longer=4.0, seconds=RISE_AT + seconds):
        whole._learn_lengths(load)
        ended._learn_lengths(replace(load, output_tokens=load.finished_tokens))
        found.append(tuple(scaler._output_tokens.value or 0.0 for scaler in (whole, ended)))
    before, after = found[RISE_AT - 1], found[-1]
    return after[0] / before[0] - 1, after[1] / before[1] - 1


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("shape", [1, 2])
def test_longer_answers_are_learnt_while_they_run(shape: int, seed: int) -> None:
    """After 20 s, the duration of a mean long answer."""
    learnt_share, ended_share = grown(shape, seed, 20)
    assert learnt_share >= max(0.4, 1.8 * ended_share)


def test_longer_answers_that_are_all_alike_are_learnt_once_the_first_end() -> None:
    """Until then none of the long answers ends, and no counter distinguishes them from shorter ones."""
    assert grown(None, 1, 15)[0] == pytest.approx(0.0)
    assert grown(None, 1, 30)[0] >= 0.8


@settings(max_examples=4, deadline=None)
@given(st.sampled_from([0.0, 0.3, 0.8]), st.integers(0, 1000))
def test_prompt_tokens_that_the_prefix_cache_saves_are_no_demand(cached: float, seed: int) -> None:
    """The plant's replicas compute only the rest of the prompts, so the demand is that of correspondingly shorter prompts."""
    plant = QueuePlant(running=4, cold_start_s=40.0, seed=seed, prompt_factor=1 - cached)
    for _ in range(120):
        load = plant.load(rate_of(4))
        saved = load.prefilled_tokens * cached / (1 - cached)
        plant.tick(replace(load, prompt_tokens=load.prompt_tokens / (1 - cached), cached_tokens=saved))
    other = QueuePlant(running=4, cold_start_s=40.0, seed=seed, prompt_factor=1 - cached)
    other.run(rate_of(4), 120)
    mine, same = plant.decisions[-1], other.decisions[-1]
    assert mine.inputs["cached_share"] == pytest.approx(cached)
    assert mine.inputs["demand"] == pytest.approx(same.inputs["demand"], rel=1e-6)
    assert mine.desired == same.desired


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize(("seed", "rate"), [(1, 0.05), (2, 0.05), (3, 0.03), (4, 0.06), (5, 1 / 900)])
def test_prompts_that_take_longer_than_a_window_of_the_fit_cost_what_they_cost(seed: int, rate: float, is_measured: bool) -> None:
    """Each takes 12 s, and no report counts its tokens before its end. With windows of 5 s the cost of a token came out below a third."""
    rng, true = random.Random(seed), StepTimes(step_s=0.03, output_token_s=1e-4, prompt_token_s=4e-4)
    hardware = Hardware(step_s=steps_of_times(true), kv_tokens=1_000_000, max_num_seqs=256)
    costs, replica = StepCosts(), Replica("r", hardware, 0.0)
    costs.start_from(hardware.measured() if is_measured else None)
    counted: dict[str, int] = {}  # request -> its output tokens that were counted
    steps, busy_s = 0, 0.0
    for second in range(1, max(1200, int(5 / rate))):
        if rng.random() < rate:
            name = str(second)
            replica.add(
                Job(name, second - 1.0, rng.randint(24_000, 36_000), 1 + int(rng.expovariate(1 / 128))), name, second - 1.0
            )
        begun, made = 0, sum(counted.values())
        for job, name, _ in replica.run_to(float(second)):
            begun += job.prompt_tokens * (name not in counted)
            counted[name] = job.output_tokens if job.done_at is not None else 1
        counted |= {name: job.output_tokens - (end - replica.steps) for end, name, job in replica.running}
        costs.add(
            1.0,
            steps=replica.steps - steps,
            busy_s=replica.busy_s - busy_s,
            output_tokens=sum(counted.values()) - made,
            prefilled_tokens=begun,
            prompts=begun / 30_000,
        )
        steps, busy_s = replica.steps, replica.busy_s
    found = costs.times()
    assert found is not None
    assert found.prompt_token_s == pytest.approx(true.prompt_token_s, rel=0.4)

"""The replicas that fit counts carry their load on simulated replicas, and what it calls the most of one replica is its limit."""

import random
import statistics
from dataclasses import replace

import pytest

from serve_app.autoscaling.capacity import Slo
from serve_app.autoscaling.simulation.simulated_replica import Hardware, Job, Replica
from serve_app.sizing.architecture import architecture_of
from serve_app.sizing.fits import Plan, accelerator_named, batch_defaults, least_fit
from serve_app.sizing.rate import Load, Replicas, hardware_of, replicas_for
from serve_app.sizing.weights import parameters_of, weight_bytes
from tests.sizing import shapes
from tests.sizing.shapes import Config

LOAD = Load(requests_per_s=20, prompt_tokens=500, answer_tokens=200, slo=Slo(ttft_s=2, itl_s=0.1), utilization=0.95, headroom=0.4)


def sized(config: Config, gpu: str, load: Load) -> tuple[Hardware, Replicas]:
    shape = architecture_of(config, "config.json")
    counts, accelerator = parameters_of(shape), accelerator_named(gpu)
    step_tokens, max_seqs = batch_defaults(accelerator)
    plan = Plan(step_tokens=step_tokens, max_seqs=max_seqs)
    found = least_fit(shape, counts, weight_bytes(shape, counts, element=2), accelerator, 8192, plan)
    assert found is not None
    replicas = replicas_for(shape, counts, found, load)
    assert replicas is not None
    return hardware_of(shape, counts, found, load.prompt_tokens + load.answer_tokens), replicas


def answered(hardware: Hardware, requests_per_s: float, load: Load, num: int = 1500) -> list[Job]:
    """Return the jobs of one replica with Poisson arrivals, all of them answered."""
    rng, now = random.Random(7), 0.0
    replica = Replica("r", hardware, at=0.0)
    jobs = []
    for index in range(num):
        now += rng.expovariate(requests_per_s)
        replica.run_to(now)
        jobs.append(Job(str(index), now, load.prompt_tokens, load.answer_tokens))
        replica.add(jobs[-1], str(index), now)
    replica.run_to(float("1e9"))
    return jobs


def ttfts_s(jobs: list[Job]) -> list[float]:
    return sorted(job.first_at - job.due_at for job in jobs if job.first_at is not None)


CASES = [(shapes.LLAMA_8B, "l4"), (shapes.LLAMA_8B, "h100"), (shapes.MIXTRAL, "h100"), (shapes.QWEN_32B, "l40s")]


@pytest.mark.parametrize(("config", "gpu"), CASES)
def test_the_replicas_keep_the_limits(config: Config, gpu: str) -> None:
    hardware, replicas = sized(config, gpu, LOAD)
    jobs = answered(hardware, LOAD.requests_per_s / replicas.num, LOAD)
    assert ttfts_s(jobs)[int(0.95 * len(jobs))] < LOAD.slo.ttft_s
    gaps = [(job.done_at - job.first_at) / (job.output_tokens - 1) for job in jobs if job.done_at and job.first_at]
    assert statistics.fmean(gaps) < LOAD.slo.itl_s
    assert statistics.fmean(gaps) == pytest.approx(replicas.token_s, rel=0.35)  # a rough law: fit says tens of percent


@pytest.mark.parametrize(("config", "gpu"), CASES)
def test_one_replica_fails_above_its_most(config: Config, gpu: str) -> None:
    hardware, replicas = sized(config, gpu, replace(LOAD, requests_per_s=1))
    jobs = answered(hardware, 1.5 * replicas.most_per_replica, LOAD, num=3000)
    waits = ttfts_s(jobs)
    assert waits[int(0.95 * len(waits))] > LOAD.slo.ttft_s

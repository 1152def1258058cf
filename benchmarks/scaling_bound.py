"""The bound is the fewest replica-seconds with which any policy, even one that knows the future, serves given requests. Pure.

A replica is paid from its order to its end, so at least while it works; the bound is the least work, with the best batches of the hardware.
It follows from three facts about the simulated replica (`serve_app/autoscaling/simulation/simulated_replica.py`):

1. A request takes at least as many steps as its answer has tokens, and in all of them it holds KV cache for its prompt and its answer. The
   requests of one step fit into the cache, so there are at least sum(answer x (prompt + answer)) / cache steps. There are also at least
   sum(answer) / max_num_seqs steps, since a step runs at most max_num_seqs requests.
2. A step lasts overhead + max(compute, memory), which is at least overhead + w x compute + (1 - w) x memory for each w from 0 to 1.
   Both are sums over the requests of the step, except that each step reads the model's weights once.
3. There are never fewer than ``minimum`` replicas.

Deadlines, chance, cold starts and whole replicas only add to the bound: a policy that keeps first tokens in time needs more. A request that
the policy refused costs nothing and is left out, so a bound belongs to one run.
"""

from collections.abc import Iterable

from serve_app.autoscaling.simulation.simulated_fleet import Outcome
from serve_app.autoscaling.simulation.simulated_replica import Hardware, Job
from serve_app.simulated.profiles import Profile
from serve_app.simulated.timing import StepWork, step_time_s

WEIGHTS = tuple(number / 20 for number in range(21))
"""Weights, each of which gives a bound; the largest bound counts."""


def least_busy_s(jobs: Iterable[Job], hardware: Hardware, profile: Profile) -> float:
    """Return the fewest seconds of work in which replicas serve ``jobs`` to their ends.

    Args:
        jobs: Requests that were served completely.
        hardware: One replica's hardware; its step times are those of ``profile``.
        profile: The accelerator whose step times are split into compute and memory.
    """
    held = steps = tokens = contexts = 0.0
    for job in jobs:
        computed = job.prompt_tokens - int(hardware.cached_share * job.prompt_tokens)
        decodes = job.output_tokens - 1  # the first token comes with the last chunk of the prompt
        held += job.output_tokens * min(1.0, (job.prompt_tokens + job.output_tokens) / hardware.kv_tokens)
        steps += job.output_tokens
        tokens += computed + decodes
        contexts += decodes * (job.prompt_tokens + 1)  # steps between two events count with the context of the first event
    num_steps = max(held, steps / hardware.max_num_seqs)
    overhead_s = profile.step_overhead_s
    compute_s, memory_s, weights_s = _token_costs(profile)
    return max(
        num_steps * (overhead_s + (1 - w) * weights_s) + w * compute_s * tokens + (1 - w) * memory_s * (tokens + contexts)
        for w in WEIGHTS
    )


def least_replica_s(outcome: Outcome, hardware: Hardware, profile: Profile, *, minimum: int) -> float:
    """Return the fewest replica-seconds of any policy that serves the requests of this run.

    Raises:
        ArithmeticError: The run itself took fewer, so the bound is wrong.
    """
    served = (job for job in outcome.jobs if job.done_at is not None)
    bound_s = max(least_busy_s(served, hardware, profile), minimum * outcome.duration_s)
    if bound_s > outcome.replica_s:
        raise ArithmeticError(f"the bound of {bound_s:.0f} replica-seconds lies above the {outcome.replica_s:.0f} of a run")
    return bound_s


def _token_costs(profile: Profile) -> tuple[float, float, float]:
    """Return the seconds of compute per token, of memory per token in the cache, and of memory for the weights."""
    many = 1_000_000
    # For very many tokens without context, compute is longer; for one token with very many in the cache, memory is.
    compute_s = (step_time_s(profile, StepWork(many, 0, 0)) - profile.step_overhead_s) / many
    full_s, fuller_s = (step_time_s(profile, StepWork(1, many * n, 0)) for n in (1, 2))
    memory_s = (fuller_s - full_s) / many
    return compute_s, memory_s, full_s - profile.step_overhead_s - many * memory_s

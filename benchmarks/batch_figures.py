"""This module makes the tables of the batch benchmark from its JSON alone. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.batch_lines import Lengths, lines, sizes
from serve_app.autoscaling.simulation.simulated_replica import Hardware, Job, Replica, steps_of_profile
from serve_app.simulated.profiles import PROFILES, Profile

PUBLISHED = {"naive": 59.137, "vllm": 2.481}
"""vCPU-hours of 10,000 prompts in the published documents to compare with: fixed batches, and one vLLM per worker."""


def tables(parts: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    return "\n".join(text for name, part in parts.items() for text in _table(name, part))


def best_s(profile: Profile, asked: Sequence[Mapping[str, Any]]) -> float:
    """Return the simulated seconds of the engine's own scheduler if all lines are there from the start and the host takes no time."""
    hardware = Hardware(step_s=steps_of_profile(profile), kv_tokens=profile.kv_cache_tokens, max_num_seqs=256)
    replica = Replica("best", hardware, 0.0)
    for number, line in enumerate(asked):
        replica.add(Job(str(number), 0.0, *sizes(dict(line))), str(number), 0.0)
    while not replica.is_idle():
        replica.run_to(replica.next_at() or 0.0)
    return replica.busy_s


def _table(name: str, part: Mapping[str, Any]) -> list[str]:
    results, num = part["results"], part["num_lines"]
    asked = lines(num, Lengths(**part["lengths"]))
    totals = [sum(column) for column in zip(*map(sizes, asked), strict=True)]
    said = [f"{name}: {num:,} lines, {totals[0]:,} prompt tokens, {totals[1]:,} answer tokens", ""]
    unit = "simulated GPU-hours" if name == "simulated" else "CPU-hours"
    said += [f"| side | {unit} | Beam's default / this | batches | seconds |", "|---|---|---|---|---|"]
    base = _cost_s(results[0])
    for result in results:
        batches = result["num_batches"] or "none"
        cost = _cost_s(result)
        said.append(f"| {result['side']} | {cost / 3600:.4f} | {base / cost:.1f} | {batches} | {result['seconds']:.0f} |")
    if name == "simulated":
        best = best_s(PROFILES["t4-gemma-2b"], asked)
        said.append(f"| the engine's scheduler alone, computed | {best / 3600:.4f} | {base / best:.1f} | none | {best:.0f} |")
    else:
        said += ["", *(_roles(result) for result in results)]
    naive, vllm = PUBLISHED["naive"], PUBLISHED["vllm"]
    return [*said, "", f"Published: {naive} against {vllm} vCPU-hours, {naive / vllm:.1f}.", ""]


def _cost_s(result: Mapping[str, Any]) -> float:
    cpu_s: Mapping[str, float] | None = result["cpu_s"]
    return float(result["seconds"]) if cpu_s is None else sum(cpu_s.values())


def _roles(result: Mapping[str, Any]) -> str:
    spent = sorted(result["cpu_s"].items(), key=lambda pair: -pair[1])
    return f"- {result['side']}: " + ", ".join(f"{role} {seconds:.1f} s" for role, seconds in spent)

"""Makes replicates of a scenario: real runs one after the other, a folder each below one folder, and replicates.json at the end."""

from collections.abc import Callable, Sequence
from pathlib import Path

from loadtest.errors import ExitCode, UsageError
from loadtest.recorder import claim, write_json
from loadtest.records import read_manifest
from loadtest.replicates import MIN_RUNS, pool
from loadtest.runner import run
from loadtest.scenario import Scenario
from loadtest.target import Target


def repeat(
    scenario: Scenario,
    target: Target,
    out: Path,
    num: int,
    *,
    command: Sequence[str],
    say: Callable[[str], None],
    report: bool = True,
) -> ExitCode:
    """Run the scenario with its seed and the ``num - 1`` that follow, and pool the runs. The first invalid or interrupted one is the last.

    Raises:
        UsageError: Too few to pool, or as `loadtest.runner.run`.
        InvalidRun: The generator could not be started.
    """
    if num < MIN_RUNS:
        raise UsageError("--repeat", f"{num} runs cannot show how much they differ; take 1, or {MIN_RUNS} and more")
    claim(out, marker="replicates.json")
    folders = []
    for seed in range(scenario.seed, scenario.seed + num):
        folders.append(out / f"seed-{seed}")
        code = run(scenario.model_copy(update={"seed": seed}), target, folders[-1], command=command, quiet=True, report=report)
        say(f"{folders[-1].name}: {code.name.lower().replace('_', ' ')} ({len(folders)} of {num})")
        if code is ExitCode.INVALID or read_manifest(folders[-1]).state != "finished":
            say(f"not pooled: {folders[-1]} says why")
            return code
    pooled = pool(folders)
    write_json(out / "replicates.json", pooled)
    say("\n".join(pooled.lines()))
    return pooled.exit_code()

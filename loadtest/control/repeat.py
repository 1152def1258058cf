"""This module makes replicates of a scenario: real runs one after the other, each in its own folder, then replicates.json."""

from collections.abc import Callable, Sequence
from pathlib import Path

from loadtest.control.runner import check_target, run
from loadtest.errors import ExitCode, LoadtestError, UsageError
from loadtest.judge.replicates import MIN_RUNS, pool
from loadtest.plan.laws import MAX_SEED
from loadtest.plan.scenario import Scenario
from loadtest.recorder import claim, give_up, write_json
from loadtest.records import read_manifest
from loadtest.wire.target import Target


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
    """Run the scenario with its seed and the ``num - 1`` seeds that follow, and pool the runs. An invalid or interrupted run is the last.

    If a later run cannot be made at all, the earlier runs are pooled if they are enough, but the result is not a pass.

    Raises:
        UsageError: ``num`` is too small to pool, or the first run raises it as `loadtest.control.runner.run` does.
        InvalidRun: The generator could not be started for the first run.
    """
    if num < MIN_RUNS:
        raise UsageError("--repeat", f"{num} runs cannot show how much they differ; take 1, or {MIN_RUNS} and more")
    if (last := scenario.seed + num - 1) > MAX_SEED:
        raise UsageError("--repeat", f"{num} runs from seed {scenario.seed} on would need seed {last}; the largest is {MAX_SEED}")
    check_target(scenario, target)
    is_new = claim(out, marker="replicates.json")
    folders: list[Path] = []
    for seed in range(scenario.seed, scenario.seed + num):
        folder = out / f"seed-{seed}"
        try:
            code = run(scenario.model_copy(update={"seed": seed}), target, folder, command=command, quiet=True, report=report)
        except LoadtestError as exc:
            if not folders:
                give_up(out, ["replicates.json"], is_new=is_new)
                raise
            say(f"{folder.name}: {exc}; the runs end here ({len(folders)} of {num})")
            break
        folders.append(folder)
        say(f"{folder.name}: {code.name.lower().replace('_', ' ')} ({len(folders)} of {num})")
        if code is ExitCode.INVALID or read_manifest(folder).state != "finished":
            say(f"not pooled: {folder} says why")
            return code
    return _pooled(folders, out, num, say)


def _pooled(folders: Sequence[Path], out: Path, num: int, say: Callable[[str], None]) -> ExitCode:
    if len(folders) < MIN_RUNS:
        say(f"not pooled: {len(folders)} runs cannot show how much they differ")
        return ExitCode.UNDECIDED
    pooled = pool(folders)
    say("\n".join(pooled.lines()))  # printed first: the disk may be full
    write_json(out / "replicates.json", pooled)
    code = pooled.exit_code()
    return ExitCode.UNDECIDED if code is ExitCode.PASS and len(folders) < num else code

"""The autoscaler serves lines of batches by their deadlines, and not as a queue that must be emptied at once."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from serve_app.autoscaling.capacity import Slo, StepTimes
from serve_app.autoscaling.deadlines import Lines
from serve_app.autoscaling.decision import Observation, ScalingRules
from serve_app.autoscaling.model_autoscaler import ModelAutoscaler
from serve_app.autoscaling.signals import ModelLoad
from serve_app.autoscaling.simulation.simulated_fleet import SimulatedFleet, World
from serve_app.autoscaling.simulation.simulated_replica import Hardware, Job, steps_of_times
from serve_app.batch.deadlines import lines_per_s
from serve_app.batch.records import Batch
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_report import num_lines
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.load import EngineLoad
from serve_app.core.request import RequestState, Resume
from serve_app.core.routing import ReplicaState

TIMES = StepTimes(step_s=0.02, output_token_s=0.001, prompt_token_s=0.0001)
HARDWARE = Hardware(step_s=steps_of_times(TIMES), kv_tokens=400_000, max_num_seqs=64)
PROMPT, ANSWER, AT_ONCE = 200, 50, 32
BEGIN_S = 5
LEARNT = ModelLoad(interval_s=1.0, lines=10, line_prompt_tokens=2000, lines_finished=10, line_finished_tokens=500)
"""Lines of 200 and 50 tokens, 0.07 s of work each."""


@dataclass
class Lot:
    """A batch of ``num`` lines, `AT_ONCE` of them in work, whose deadline the autoscaler knows."""

    num: int
    window_s: int
    answered: list[Job] = field(default_factory=list)
    most: int = 0

    def __post_init__(self) -> None:
        self.scaler = ModelAutoscaler(ScalingRules(slo=Slo(ttft_s=2.0, itl_s=0.1)))

    def lines(self) -> Iterator[Job]:
        """Send as many lines as were answered, every quarter of a second, and refused lines again, until all have answers."""
        at, sent = float(BEGIN_S), list[Job]()
        while len(self.answered) < self.num:
            self.answered += [job for job in sent if job.done_at is not None]
            sent = [job for job in sent if job.done_at is None and not job.refused]
            for _ in range(max(1, AT_ONCE - len(sent))):  # at least one: the simulation needs a next line to continue
                sent.append(Job(f"line-{at}-{len(sent)}", at, PROMPT, ANSWER, background=True))
                yield sent[-1]
            at += 0.25

    def scale(self, at: float, seen: Observation) -> int:
        values = ("b", "", "f", "/v1/completions", "", BEGIN_S, BEGIN_S + self.window_s, 3600)
        batch = Batch(*values, status="in_progress", total=self.num, lines={"m": self.num}, completed=len(self.answered))
        is_open = at >= BEGIN_S and len(self.answered) < self.num
        needed = lines_per_s([batch] if is_open else [], at).get("m", 0.0)
        desired = self.scaler.observe(replace(seen, load=replace(seen.load, lines_per_s=needed)), at=at).desired
        self.most = max(self.most, desired)
        return desired


@pytest.mark.parametrize(("window_s", "replicas"), [(2000, 1), (180, 2)])
def test_a_long_window_adds_no_replica_and_a_short_one_is_kept_by_more(window_s: int, replicas: int) -> None:
    # A line is 50 x 1 ms + 200 x 0.1 ms = 0.07 s of a replica, all of them 140 s. In 1,800 s that is 0.08 of one; in 162 s it is 0.86,
    # which is more than a replica does beside its steps: 0.02 s are the work of 14 tokens, and 64 / (64 + 15) = 0.81.
    lot = Lot(2000, window_s)
    world = World(hardware=HARDWARE, cold_starts_s=(20.0,), no_replica_s=60.0)
    SimulatedFleet(world).run(lot.lines(), 60.0, lot.scale)
    assert len(lot.answered) >= 2000
    assert replicas <= lot.most <= 2 * replicas - 1
    assert max(job.done_at or 0.0 for job in lot.answered) <= BEGIN_S + window_s


def test_one_replica_stays_until_the_cost_of_a_line_is_known() -> None:
    lines = Lines()
    assert lines.replicas(ModelLoad(lines_per_s=100.0), TIMES, 1e6, demand=0.0) == 1
    assert lines.replicas(ModelLoad(), TIMES, 1e6, demand=3.0) == 0
    lines.learn(replace(LEARNT, lines_held=10_000))
    assert lines.replicas(ModelLoad(lines_per_s=100.0), TIMES, 1e6, demand=0.0) == 8  # 7 / 0.95
    assert lines.replicas(ModelLoad(lines_per_s=100.0), TIMES, 1e6, demand=5.0) == 13  # 12 / 0.95


@pytest.mark.parametrize(
    ("held", "per_s", "replicas"), [(0, 100.0, 1), (32, 1.0, 1), (32, 20.0, 4), (32, 100.0, 9), (1000, 100.0, 9)]
)
def test_no_more_replicas_are_asked_for_than_the_lines_that_run_at_once_can_use(held: int, per_s: float, replicas: int) -> None:
    """A line takes 1 s of steps and 0.07 s of work: 32 at once are answered at 32 a second at most."""
    lines = Lines()
    lines.learn(replace(LEARNT, lines_held=held))
    assert lines.replicas(ModelLoad(lines_per_s=per_s), TIMES, 64, demand=0.0) == replicas


def test_a_line_costs_what_those_that_ended_cost_whatever_runs() -> None:
    """256 lines of some 500 tokens run, and the first has ended: the tokens of the others must not count as its own."""
    lines = Lines()
    for _ in range(20):
        lines.learn(ModelLoad(interval_s=1.0, lines=12.8, line_prompt_tokens=2560, line_output_tokens=6400, lines_held=256))
    lines.learn(ModelLoad(interval_s=1.0, lines_finished=1, line_finished_tokens=450, lines_held=256))
    assert lines.replicas(ModelLoad(lines_per_s=1.0), TIMES, 256, demand=0.0) == 1


def test_lines_of_one_engine_hide_no_queue_of_another() -> None:
    lines = {f"line-{n}": RequestState(f"line-{n}", 8, 8, Resume.CONTINUE, background=True) for n in range(32)}
    fleet = FleetState(FleetSettings(model="m"))
    fleet.replicas = {
        "a": ReplicaState("a", credit=64, heard_at=0.0, load=EngineLoad(waiting=20), queued_chats=20),
        "b": ReplicaState("b", credit=64, heard_at=0.0, held=lines),
    }
    assert num_lines(fleet) == (32, 0), "engine b reads the prompts of all"
    fleet.replicas["b"].load = EngineLoad(waiting=5)
    assert num_lines(fleet) == (32, 5)
    fleet.replicas["a"].load = EngineLoad()  # its chats went to a new replica, and its next heartbeat is still to come
    assert num_lines(fleet) == (32, 5)


def test_lines_that_run_are_no_demand_and_keep_one_replica() -> None:
    scaler = ModelAutoscaler(ScalingRules(slo=Slo(ttft_s=2.0, itl_s=0.1)))
    load = ModelLoad(
        interval_s=1.0, lines=20, line_prompt_tokens=4000, running=32, lines_held=32, kv_usage=0.5, busy_s=1.0, steps=20
    )
    decided = [
        scaler.observe(Observation(running=1, target=1, minimum=0, maximum=9, load=load), at=float(at)) for at in range(200)
    ]
    assert {decision.desired for decision in decided} == {1}
    assert dict(decided[-1].alternatives) == {"first": 1}

"""This machine runs the judge against an engine that works, computes, stops or deadlocks, under a supervisor that may itself be away.

The machine keeps its own account in whole tenths of a second, so that no float decides on which side of a limit a history is.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serve_app.core.health import (
    Eject,
    EngineJudge,
    HealthLimits,
    Looked,
    ProbeAnswered,
    ProcessUse,
    QuestionAnswered,
    SendProbe,
    Stepped,
)
from serve_app.errors import EngineSilent, EngineStopped, StepTooLong

PROBE, EJECT, MAX_STEP, MAX_GAP = 30, 70, 300, 20  # tenths of a second
LIMITS = HealthLimits(probe_after_s=3.0, eject_after_s=7.0, max_step_s=30.0, max_gap_s=2.0)
LOOK = 5
PIDS = (1, 2, 3)
SLACK = 1  # of a float's sum


class HealthMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.judge = EngineJudge(LIMITS)
        self.now = 0
        self.step = 0
        self.probes = 0
        """Sent and not answered."""
        self.cpu = dict.fromkeys(PIDS, 0)
        """Hundredths of a second."""
        self.stopped: set[int] = set()
        self.silent = self.quiet = 0
        """Observed tenths since the last progress, and since the last that was neither progress nor any CPU time."""
        self.stopped_for = dict.fromkeys(PIDS, 0)
        """Observed tenths without a sign that the process ran."""
        self.seen: dict[int, int] = {}
        """CPU time of the processes that were stopped at the last look."""
        self.ejected: Eject | None = None

    @initialize()
    def first_look(self) -> None:
        self.look(0)

    def look(self, passed: int) -> None:
        """Let ``passed`` tenths go by, and look."""
        self.now += passed
        seen = min(passed, MAX_GAP)
        self.silent += seen
        self.quiet += seen
        for pid in PIDS:
            still = pid in self.stopped and self.seen.get(pid) == self.cpu[pid]
            self.stopped_for[pid] = self.stopped_for[pid] + seen if still else 0
        self.seen = {pid: self.cpu[pid] for pid in self.stopped}
        use = {pid: ProcessUse(self.cpu[pid] / 100, pid in self.stopped) for pid in PIDS}
        for instruction in self.judge.handle(Looked(use), now=self.now / 10):
            assert self.ejected is None, "an ejected engine gets no further instruction"
            if isinstance(instruction, SendProbe):
                assert self.silent >= PROBE - SLACK
                self.probes += 1
            else:
                self.judge_was_right(instruction)
                self.ejected = instruction

    def judge_was_right(self, verdict: Eject) -> None:
        match verdict.error:
            case EngineStopped():
                assert self.stopped
                assert max(self.stopped_for.values()) >= EJECT - SLACK or self.silent >= EJECT - SLACK
            case StepTooLong():
                assert self.silent >= MAX_STEP - SLACK
            case EngineSilent():
                assert self.probes == 1, "the probe was sent before"
                assert self.silent >= EJECT - SLACK
            case other:
                raise AssertionError(other)

    # What happens.

    @rule(seconds=st.integers(1, 4))
    def work(self, seconds: int) -> None:
        """Let the engine step between any two looks, whatever else it does."""
        for _ in range(2 * seconds):
            self.step += 1
            self.cpu[1] += 3
            self.judge.handle(Stepped(self.step), now=self.now / 10)
            self.silent = self.quiet = 0
            self.look(LOOK)

    @rule(seconds=st.integers(1, 12), pid=st.sampled_from(PIDS), share=st.integers(4, 100))
    def compute(self, seconds: int, pid: int, share: int) -> None:
        """Run one long silent step, in which a process uses ``share`` hundredths of a core."""
        for _ in range(2 * seconds):
            self.cpu[pid] += share // 2 if pid not in self.stopped else 0
            self.quiet = 0 if pid not in self.stopped else self.quiet
            self.look(LOOK)

    @rule(seconds=st.integers(1, 12))
    def say_nothing(self, seconds: int) -> None:
        for _ in range(2 * seconds):
            self.look(LOOK)

    @rule(seconds=st.integers(3, 1000))
    def supervisor_is_away(self, seconds: int) -> None:
        self.look(10 * seconds)

    @rule()
    def answer(self) -> None:
        if self.probes:
            self.probes -= 1
            self.judge.handle(ProbeAnswered(), now=self.now / 10)
            self.silent = self.quiet = 0

    @rule()
    def answer_another_question(self) -> None:
        self.judge.handle(QuestionAnswered(), now=self.now / 10)
        self.silent = self.quiet = 0

    @rule()
    def tell_an_old_step(self) -> None:
        self.judge.handle(Stepped(self.step), now=self.now / 10)

    @rule(pid=st.sampled_from(PIDS))
    def stop(self, pid: int) -> None:
        self.stopped.add(pid)

    @rule(pid=st.sampled_from(PIDS))
    def go_on(self, pid: int) -> None:
        self.stopped.discard(pid)

    # What holds.

    @invariant()
    def a_hung_engine_has_been_ejected(self) -> None:
        """Check that the engine is ejected in time: the limit, one look, and CPU time too small to count as computing."""
        if self.ejected is None:
            assert self.silent < MAX_STEP + LOOK
            assert self.quiet < EJECT + MAX_GAP + LOOK
            assert max(self.stopped_for.values()) < EJECT + MAX_GAP

    @invariant()
    def one_probe_is_out_at_most(self) -> None:
        assert self.probes <= 1

    @invariant()
    def state_is_consistent(self) -> None:
        self.judge.validate()


HealthMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestHealth = HealthMachine.TestCase

"""These tests give the judge of an engine hand-made histories: one look a second, limits of 3, 7 and 60 s."""

import pytest

from serve_app.core.health import (
    EngineJudge,
    Event,
    HealthLimits,
    Looked,
    ObservedTime,
    PeerSilence,
    ProbeAnswered,
    ProcessUse,
    QuestionAnswered,
    SendProbe,
    Stepped,
)

LIMITS = HealthLimits(probe_after_s=3.0, eject_after_s=7.0, max_step_s=60.0, max_gap_s=2.0)
CORE, WORKER = 10, 11


class History:
    """A judge and the supervisor's looks, one per `second`."""

    def __init__(self) -> None:
        self.judge = EngineJudge(LIMITS)
        self.now = 100.0
        self.said: list[str] = []
        """Instructions of the judge, with the seconds since the start."""
        self.use = {CORE: ProcessUse(5.0, stopped=False), WORKER: ProcessUse(30.0, stopped=False)}
        self.look()

    def look(self) -> None:
        for instruction in self.judge.handle(Looked(dict(self.use)), now=self.now):
            what = "probe" if isinstance(instruction, SendProbe) else f"{instruction.error.code} {instruction.error.after_s:g}"
            self.said.append(f"{self.now - 100.0:g}: {what}")
        self.judge.validate()

    def tell(self, event: Event) -> None:
        assert self.judge.handle(event, now=self.now) == []

    def seconds(self, count: int, *, cpu_s: float = 0.0, stopped: int = 0, step_s: float = 1.0) -> list[str]:
        """Let time pass in which the worker uses ``cpu_s`` a look and ``stopped`` is a stopped process; return the instructions."""
        before = len(self.said)
        for _ in range(count):
            self.now += step_s
            self.use = {
                pid: ProcessUse(use.cpu_s + (cpu_s if pid == WORKER else 0.0), stopped=pid == stopped)
                for pid, use in self.use.items()
            }
            self.look()
        return self.said[before:]


def test_an_idle_engine_is_asked_and_one_that_answers_is_left_alone() -> None:
    history = History()
    for _ in range(20):
        (said,) = history.seconds(3)
        assert said.endswith("probe")
        history.tell(ProbeAnswered())


def test_an_engine_that_steps_is_never_asked() -> None:
    history = History()
    for step in range(1, 60):
        history.tell(Stepped(step))
        assert history.seconds(2) == []


def test_an_engine_without_step_answer_or_cpu_time_is_ejected_once() -> None:
    assert History().seconds(30) == ["3: probe", "7: engine_silent 7"]


def test_the_same_count_of_steps_reported_again_is_no_progress() -> None:
    history = History()
    history.tell(Stepped(4))
    for _ in range(7):
        history.tell(Stepped(4))
        history.seconds(1)
    assert history.said == ["3: probe", "7: engine_silent 7"]


def test_a_long_step_that_computes_is_waited_for_up_to_its_own_limit() -> None:
    history = History()
    assert history.seconds(59, cpu_s=0.2) == ["3: probe"]
    assert history.seconds(10, cpu_s=0.2) == ["60: step_too_long 60"]


def test_an_engine_that_computed_before_it_hung_is_ejected_seven_seconds_after_its_last_tenth_of_a_second() -> None:
    history = History()
    history.seconds(20, cpu_s=0.2)
    assert history.seconds(20) == ["27: engine_silent 7"]


def test_an_engine_that_gets_a_twentieth_of_a_core_is_left_alone() -> None:
    history = History()
    assert history.seconds(50, cpu_s=0.05) == ["3: probe"]


def test_a_silence_in_which_a_process_is_stopped_is_laid_to_that() -> None:
    history = History()
    history.seconds(2)
    assert history.seconds(10, stopped=CORE) == ["3: probe", "7: engine_stopped 7"]


def test_one_stopped_process_ejects_an_engine_whose_others_compute() -> None:
    history = History()
    history.seconds(1, cpu_s=1.0)
    assert history.seconds(20, cpu_s=1.0, stopped=CORE) == ["3: probe", "9: engine_stopped 7"]


def test_a_process_that_is_stopped_and_continued_in_turns_is_not_stopped() -> None:
    history = History()
    for step in range(50):
        history.seconds(4, cpu_s=0.0, stopped=WORKER)
        history.seconds(1, cpu_s=0.2)
        history.tell(Stepped(step))
    assert {said.partition(": ")[2] for said in history.said} <= {"probe"}


def test_a_process_that_ran_between_two_looks_was_not_stopped_all_the_time() -> None:
    history = History()
    for _ in range(40):
        history.seconds(1, cpu_s=0.2, stopped=WORKER)
    assert {said.partition(": ")[2] for said in history.said} <= {"probe"}


def test_the_answer_to_another_question_than_the_probe_ends_a_silence_and_leaves_the_probe_out() -> None:
    history = History()
    assert history.seconds(5) == ["3: probe"]
    history.tell(QuestionAnswered())
    assert history.seconds(10) == ["12: engine_silent 7"]


def test_time_that_the_supervisor_missed_does_not_count() -> None:
    history = History()
    assert history.seconds(3, step_s=600.0) == ["1200: probe"]


def test_a_worker_that_ends_does_not_hide_what_the_others_compute() -> None:
    history = History()
    history.seconds(1, cpu_s=1.0)
    history.use = {CORE: ProcessUse(5.0, stopped=False)}
    history.look()
    for _ in range(30):
        history.use = {CORE: ProcessUse(history.use[CORE].cpu_s + 0.2, stopped=False)}
        history.now += 1.0
        history.look()
    assert {said.partition(": ")[2] for said in history.said} <= {"probe"}


@pytest.mark.parametrize(("calls", "passed"), [([5.0], [0.0]), ([5.0, 5.5, 6.0], [0.0, 0.5, 0.5]), ([5.0, 99.0], [0.0, 2.0])])
def test_observed_time_is_cut_where_the_observer_was_away(calls: list[float], passed: list[float]) -> None:
    time = ObservedTime(2.0)
    assert [time.passed(now) for now in calls] == passed


def test_a_peer_has_hung_after_its_limit_of_seconds_without_a_sign_in_which_the_observer_was_awake() -> None:
    silence = PeerSilence(limit_s=3.0, max_gap_s=1.0)
    assert [silence.is_over(now) for now in (0.0, 1.0, 50.0)] == [False, False, False]
    silence.heard()
    assert [silence.is_over(now) for now in (51.0, 52.0, 53.0)] == [False, False, True]
    assert silence.silent_s == 3.0

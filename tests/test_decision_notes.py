"""The autoscaler's notes on their way to the lease board, without Ray."""

import threading

from serve_app.decision_notes import QUEUED, DecisionNotes
from serve_app.membership import ScalingNote

LIMIT_S = 30.0  # only ends a test that hangs


def note(number: int) -> ScalingNote:
    return ScalingNote(float(number), "tiny", number, number + 1, "demand")


def test_a_board_that_does_not_answer_holds_nobody_up_and_the_notes_come_in_order() -> None:
    answers, told, all_told = threading.Event(), list[float](), threading.Event()

    def put(given: ScalingNote) -> None:
        answers.wait(LIMIT_S)
        told.append(given.time)
        if len(told) == 3:
            all_told.set()

    notes = DecisionNotes(put)
    for number in range(3):
        notes.tell(note(number))
    assert told == []
    answers.set()
    assert all_told.wait(LIMIT_S)
    assert told == [0.0, 1.0, 2.0]


def test_a_note_that_cannot_be_told_is_lost_alone() -> None:
    told = threading.Event()

    def put(given: ScalingNote) -> None:
        if given.time == 0:
            raise ValueError("no actor has that name")
        told.set()

    notes = DecisionNotes(put)
    notes.tell(note(0))
    notes.tell(note(1))
    assert told.wait(LIMIT_S)


def test_more_notes_than_may_wait_are_dropped_and_not_waited_for() -> None:
    answers, taken = threading.Event(), threading.Event()

    def put(given: ScalingNote) -> None:
        taken.set()
        answers.wait(LIMIT_S)

    notes = DecisionNotes(put)
    notes.tell(note(0))
    assert taken.wait(LIMIT_S)
    for number in range(1, QUEUED + 50):
        notes.tell(note(number))
    assert notes._queue.qsize() == QUEUED
    answers.set()

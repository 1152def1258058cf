"""The autoscaler's notes, and what it knows, on their way to the lease board, without Ray."""

import threading

from serve_app.autoscaling.decision_notes import QUEUED, READ_S, BoardKeeper, DecisionNotes, board_keeper
from serve_app.membership import LeaseBoard, ScalingNote

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


def answer_of(keeper: BoardKeeper) -> bytes:
    """Return what was kept once the thread has asked for it."""
    keeper.kept()
    assert keeper._reading is not None
    keeper._reading.exception(LIMIT_S)
    answer = keeper.kept()
    assert answer is not None
    return answer


def test_what_the_autoscaler_knows_comes_back_from_the_board() -> None:
    board = LeaseBoard(expiry_s=10.0)
    first = BoardKeeper(board.keep, board.kept)
    assert answer_of(first) == b""
    first.keep(b"known")
    assert first._writing is not None
    first._writing.result(LIMIT_S)
    assert answer_of(BoardKeeper(board.keep, board.kept)) == b"known"


def test_a_board_that_does_not_answer_holds_nobody_up_and_one_that_fails_knows_nothing() -> None:
    answers = threading.Event()

    def get() -> bytes:
        answers.wait(LIMIT_S)
        raise ValueError("no actor has that name")

    keeper = BoardKeeper(lambda data: None, get)
    assert keeper.kept() is None
    answers.set()
    assert answer_of(keeper) == b""


def test_a_board_that_never_answers_is_not_waited_for_longer_than_a_limit() -> None:
    answers, now = threading.Event(), [0.0]
    keeper = BoardKeeper(lambda data: None, lambda: b"" if answers.wait(LIMIT_S) else b"late", lambda: now[0])
    assert keeper.kept() is None
    now[0] = READ_S
    assert keeper.kept() == b""
    answers.set()


def test_while_a_copy_is_under_way_later_ones_are_left_out() -> None:
    answers, put = threading.Event(), list[bytes]()

    def slow(data: bytes) -> None:
        answers.wait(LIMIT_S)
        put.append(data)

    keeper = BoardKeeper(slow, lambda: b"")
    keeper.keep(b"1")
    keeper.keep(b"2")
    answers.set()
    assert keeper._writing is not None
    keeper._writing.result(LIMIT_S)
    keeper.keep(b"3")
    keeper._writing.result(LIMIT_S)
    assert put == [b"1", b"3"]


def test_outside_ray_nothing_is_kept() -> None:
    assert board_keeper("serve-app") is None

"""The autoscaler's notes and memory reach the lease board, without Ray."""

import threading

from serve_app.autoscaling.decision_notes import QUEUED, READ_S, BoardMemoryStore, DecisionNotes, board_memory_store
from serve_app.membership import LeaseBoard, ScalingNote

LIMIT_S = 30.0  # only ends a test that hangs


def note(number: int) -> ScalingNote:
    return ScalingNote(float(number), "tiny", number, number + 1, "demand")


def test_a_board_that_does_not_answer_delays_no_caller_and_the_notes_come_in_order() -> None:
    answers, sent, all_sent = threading.Event(), list[float](), threading.Event()

    def put(given: ScalingNote) -> None:
        answers.wait(LIMIT_S)
        sent.append(given.time)
        if len(sent) == 3:
            all_sent.set()

    notes = DecisionNotes(put)
    for number in range(3):
        notes.send(note(number))
    assert sent == []
    answers.set()
    assert all_sent.wait(LIMIT_S)
    assert sent == [0.0, 1.0, 2.0]


def test_a_note_that_cannot_be_sent_is_lost_alone() -> None:
    sent = threading.Event()

    def put(given: ScalingNote) -> None:
        if given.time == 0:
            raise ValueError("no actor has that name")
        sent.set()

    notes = DecisionNotes(put)
    notes.send(note(0))
    notes.send(note(1))
    assert sent.wait(LIMIT_S)


def test_more_notes_than_may_wait_are_dropped_and_not_waited_for() -> None:
    answers, taken = threading.Event(), threading.Event()

    def put(given: ScalingNote) -> None:
        taken.set()
        answers.wait(LIMIT_S)

    notes = DecisionNotes(put)
    notes.send(note(0))
    assert taken.wait(LIMIT_S)
    for number in range(1, QUEUED + 50):
        notes.send(note(number))
    assert notes._queue.qsize() == QUEUED
    answers.set()


def answer_of(store: BoardMemoryStore) -> bytes:
    """Return the kept memory once the thread has asked for it."""
    store.kept()
    assert store._reading is not None
    store._reading.exception(LIMIT_S)
    answer = store.kept()
    assert answer is not None
    return answer


def test_what_the_autoscaler_knows_comes_back_from_the_board() -> None:
    board = LeaseBoard(expiry_s=10.0)
    first = BoardMemoryStore(board.keep, board.kept)
    assert answer_of(first) == b""
    first.keep(b"known")
    assert first._writing is not None
    first._writing.result(LIMIT_S)
    assert answer_of(BoardMemoryStore(board.keep, board.kept)) == b"known"


def test_a_board_that_does_not_answer_delays_no_caller_and_one_that_fails_knows_nothing() -> None:
    answers = threading.Event()

    def get() -> bytes:
        answers.wait(LIMIT_S)
        raise ValueError("no actor has that name")

    store = BoardMemoryStore(lambda data: None, get)
    assert store.kept() is None
    answers.set()
    assert answer_of(store) == b""


def test_a_board_that_never_answers_is_not_waited_for_longer_than_a_limit() -> None:
    answers, now = threading.Event(), [0.0]
    store = BoardMemoryStore(lambda data: None, lambda: b"" if answers.wait(LIMIT_S) else b"late", lambda: now[0])
    assert store.kept() is None
    now[0] = READ_S
    assert store.kept() == b""
    answers.set()


def test_while_a_copy_is_under_way_later_ones_are_left_out() -> None:
    answers, put = threading.Event(), list[bytes]()

    def slow(data: bytes) -> None:
        answers.wait(LIMIT_S)
        put.append(data)

    store = BoardMemoryStore(slow, lambda: b"")
    store.keep(b"1")
    store.keep(b"2")
    answers.set()
    assert store._writing is not None
    store._writing.result(LIMIT_S)
    store.keep(b"3")
    store._writing.result(LIMIT_S)
    assert put == [b"1", b"3"]


def test_outside_ray_nothing_is_kept() -> None:
    assert board_memory_store("serve-app") is None

"""Outcomes name the end of an HTTP request in one word."""

import pytest

from serve_app.errors import BadRequest, NoFreePlace, QueueFull, QuotaExceeded, ReplicaLost, RequestQuarantined, ServingError
from serve_app.ingress.exchange.outcomes import Sent, ending

WHOLE = Sent(200, ended=True, error_status=0)
BEGUN = Sent(200, ended=False, error_status=0)
NOTHING = Sent(0, ended=False, error_status=0)
FULL = QueueFull(waiting=1, limit=1, retry_after_s=5.0)
LOST = ReplicaLost(request="r", reason="it died")
QUARANTINED = RequestQuarantined(blocked_s=600.0)


@pytest.mark.parametrize(
    ("answer", "error", "started", "word"),
    [
        (WHOLE, None, True, "complete"),
        (WHOLE, None, False, "complete"),  # /tokenize
        (BEGUN, None, True, "failed"),
        (Sent(200, ended=True, error_status=500), None, True, "failed"),
        (Sent(200, ended=True, error_status=400), None, False, "invalid"),  # vLLM looks at some values only in the stream
        (Sent(200, ended=True, error_status=400), None, True, "failed"),
        (Sent(500, ended=True, error_status=0), None, True, "failed"),
        (Sent(400, ended=True, error_status=0), None, False, "invalid"),
        (NOTHING, BadRequest("model", "name one of a, b"), False, "invalid"),
        (NOTHING, FULL, False, "rejected"),
        (NOTHING, NoFreePlace(waiting=1, retry_after_s=1.0), False, "held_back"),
        (NOTHING, QuotaExceeded("red", "max_concurrent", 1, 1, 1, 1.0), False, "over_quota"),
        (NOTHING, LOST, True, "failed"),
        (NOTHING, QUARANTINED, True, "quarantined"),
        (NOTHING, QUARANTINED, False, "blocked"),
    ],
)
def test_the_series_have_one_word_for_each_end(answer: Sent, error: ServingError | None, started: bool, word: str) -> None:
    ends = ("length",) if answer == WHOLE and started else ("",)
    assert ending(answer, error, gone=None, stalled=False, started=started, engines_ends=ends).word() == word


def test_a_client_that_left_first_has_aborted_whatever_came_of_it() -> None:
    left = ending(BEGUN, LOST, gone=BEGUN, stalled=False, started=True, engines_ends=("error",))
    assert (left, left.word()) == (("aborted", 200, "client_gone"), "aborted")


def test_a_request_that_the_engine_gave_up_has_the_engines_reason() -> None:
    assert ending(WHOLE, None, gone=None, stalled=False, started=True, engines_ends=("error",)).reason == "engine_error"
    assert ending(WHOLE, None, gone=None, stalled=False, started=True, engines_ends=("abort",)).word() == "aborted"

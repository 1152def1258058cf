"""The fleet page describes the difference of two reports, and draws them."""

from typing import Any

import pytest

from serve_app.ui.changes import changes, is_older
from serve_app.ui.fleet_view import fleet_html, happenings_html
from tests.ui.fake_service import MODEL, ingress, member

DECISION = {"time": 990.0, "model": MODEL, "before": 1, "after": 2, "rule": "demand"}


def report(*members: dict[str, Any], time: float = 1000.0, decisions: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"time": time, "members": list(members), "decisions": list(decisions)}


BEFORE = report(ingress(), member("a"), member("b"))


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (report(ingress(), member("a"), member("b")), []),
        (
            report(ingress(), member("a"), member("b"), member("c")),
            [f"Replica of {MODEL} c joined after a start of 31 s"],
        ),
        (report(ingress(), member("a"), member("b", state="draining")), [f"Replica of {MODEL} b is draining"]),
        (
            report(ingress(resumptions=2), member("a")),
            [f"Replica of {MODEL} b is gone", f"{MODEL}: 2 answers resumed at another replica"],
        ),
        (
            report(ingress(), member("a"), member("b"), decisions=(DECISION,)),
            [f"Autoscaler: {MODEL} 1 → 2 replicas (demand)"],
        ),
    ],
)
def test_each_change_is_a_sentence(after: dict[str, Any], said: list[str]) -> None:
    assert [happening.text for happening in changes(BEFORE, after)] == said


def test_a_replica_that_drained_is_told_from_one_that_was_lost() -> None:
    before = report(ingress(), member("a", state="draining"))
    assert [h.text for h in changes(before, report(ingress()))] == [f"Replica of {MODEL} a has drained and left"]


def test_decisions_from_before_the_page_was_opened_are_told_once() -> None:
    now = report(ingress(), decisions=(DECISION,))
    (told,) = changes(None, now)
    assert told.clock() == "00:16:30"
    assert changes(now, now) == []


def test_a_new_ingress_counts_from_zero_and_resumes_nothing() -> None:
    before = report(member("a"))
    assert [h.text for h in changes(before, report(ingress(resumptions=7), member("a")))] == ["Ingress in1 joined"]


def test_the_page_shows_loads_and_escapes_what_the_service_says() -> None:
    drawn = fleet_html(report(ingress(resumptions=3), member("<b>x", running=6), member("y", state="draining")))
    assert "<b>1</b><span>replica ready, 1 draining</span>" in drawn
    assert "<b>7</b><span>running on engines</span>" in drawn
    assert "<b>3</b><span>answers resumed</span>" in drawn
    assert "<b>x" not in drawn
    assert "&lt;b&gt;x" in drawn


def test_a_model_without_a_replica_is_shown_all_the_same() -> None:
    assert f'<h3>{MODEL}</h3><p class="quiet">none</p>' in fleet_html(report(ingress()))


def test_the_newest_happening_comes_first() -> None:
    listed = happenings_html(changes(BEFORE, report(ingress(), member("a"), decisions=(DECISION,))))
    assert listed.index("is gone") < listed.index("Autoscaler")


@pytest.mark.parametrize(("time", "older"), [(1000.5, False), (1000.0, True), (999.0, True), (989.0, False)])
def test_a_report_that_is_much_older_comes_from_another_clock(time: float, older: bool) -> None:
    assert is_older(report(time=time), report()) is older

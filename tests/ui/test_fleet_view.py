"""The fleet page describes the difference of two reports, and draws them."""

from typing import Any

import pytest

from serve_app.ui.changes import Happening, changes, is_older
from serve_app.ui.fleet_view import MAX_DOTS, fleet_html, happenings_html
from serve_app.ui.replicas import models_of, ready_of, ready_of_all, replicas_of, span
from tests.ui.fake_service import MODEL, ingress, lost, member, starting

DECISION = {"time": 990.0, "model": MODEL, "before": 1, "after": 2, "rule": "demand"}


def report(*members: dict[str, Any], time: float = 1000.0, decisions: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """The answer of an ingress of an older release, or of one to which Serve is silent: without targets and losses."""
    return {"time": time, "members": list(members), "decisions": list(decisions)}


def report_of_all(
    *members: dict[str, Any], target: int = 2, starts: tuple[dict[str, Any], ...] = (), losses: tuple[dict[str, Any], ...] = ()
) -> dict[str, Any]:
    models = {MODEL: {"target": target, "starting": list(starts)}}
    return {**report(*members), "lost": list(losses), "models": models}


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


KILLED = lost("b", time=998.0, cause="its engine was killed")


def test_a_loss_has_its_cause_once_while_the_lease_lasts_and_after() -> None:
    before = report_of_all(ingress(), member("a"), member("b"))
    leased = report_of_all(ingress(), member("a"), member("b", state="lost"), losses=(KILLED,))
    ended = report_of_all(ingress(), member("a"), losses=(KILLED,))
    said = [f"Replica of {MODEL} b is lost: its engine was killed"]
    assert [(h.clock(), h.text) for h in changes(before, leased)] == [("00:16:38", *said)]
    assert [h.text for h in changes(before, ended)] == said
    assert changes(leased, ended) == []
    assert changes(ended, report_of_all(ingress(), member("a"))) == []
    assert [h.text for h in changes(None, ended)] == said, "known to a page that was opened after the loss"


def test_a_replica_that_was_lost_only_for_a_moment_is_ready_again() -> None:
    gone = report_of_all(ingress(), member("a"), member("b", state="lost"), losses=(KILLED,))
    assert [h.text for h in changes(gone, report_of_all(ingress(), member("a"), member("b")))] == [
        f"Replica of {MODEL} b is ready"
    ]


def test_a_loss_is_said_once_though_ingresses_that_answer_in_turn_noted_it_at_other_times_or_not_at_all() -> None:
    first = report_of_all(ingress(), member("a"), member("b", state="lost"), losses=(KILLED,))
    later = lost("b", time=1001.5, cause="the connection to it broke off")
    second = report_of_all(ingress(), member("a"), member("b", state="lost"), losses=(later,))
    third = report_of_all(ingress(), member("a"), member("b"))
    before, known = None, list[Happening]()
    for answer in (first, second, third, first, third, second, third, first):
        known += changes(before, answer, known)
        before = answer
    assert [h.text for h in known] == [f"Replica of {MODEL} b is lost: its engine was killed", f"Replica of {MODEL} b is ready"]


def test_a_second_loss_of_a_replica_is_said() -> None:
    first = report_of_all(ingress(), member("a"), losses=(KILLED,))
    again = report_of_all(ingress(), member("a"), losses=(KILLED | {"time": 1050.0},))
    assert [h.clock() for h in changes(first, again, changes(None, first))] == ["00:17:30"]


def test_a_decision_that_one_ingress_knows_later_is_said_once() -> None:
    early, late = report(ingress(), decisions=(DECISION,)), report(ingress())
    known = changes(None, early)
    assert [*changes(early, late, known), *changes(late, early, known)] == []


def test_a_start_is_said_when_serve_begins_it_and_not_again_after_serves_silence() -> None:
    before, now = report_of_all(ingress()), report_of_all(ingress(), starts=(starting("c", since=999.0),))
    assert [h.text for h in changes(before, now)] == [f"Replica of {MODEL} c starts"]
    assert changes(now, now) == []
    assert changes(report(ingress()), now) == []


def test_replicas_that_serve_start_and_are_lost_stand_side_by_side() -> None:
    starts = starting("c", since=988.0), starting("d", since=999.0, host=""), starting("a", since=970.0)
    members = ingress(cold_start_s=48.0), member("a", running=3), member("b", state="lost")
    shown = replicas_of(report_of_all(*members, starts=starts, losses=(KILLED,)), MODEL)
    assert [(r.replica_id.rsplit("#")[-1], r.state, r.doing, r.started) for r in shown] == [
        ("a", "ready", "answers 3 requests", None),
        ("c", "starting", "for 12 s: loads the model; most starts take 48 s or less", 0.25),
        ("d", "starting", "for 1 s: waits for a place and a process; most starts take 48 s or less", 1 / 48),
        ("b", "lost", "2 s ago: its engine was killed", None),
    ]


@pytest.mark.parametrize(
    ("running", "waiting", "state", "doing"),
    [
        (0, 0, "ready", "idle"),
        (1, 0, "ready", "answers 1 request"),
        (2, 1, "ready", "answers 2 requests, 1 waits in its queue"),
        (0, 4, "ready", "answers 0 requests, 4 wait in its queue"),
        (2, 0, "draining", "finishes 2 requests and takes no new ones"),
        (0, 0, "draining", "takes no new requests"),
    ],
)
def test_a_replica_says_what_it_does_now(running: int, waiting: int, state: str, doing: str) -> None:
    busy = member("a", running=running, state=state)
    busy["load"]["waiting"] = waiting
    (shown,) = replicas_of(report(busy), MODEL)
    assert shown.doing == doing


@pytest.mark.parametrize(("phase", "state"), [("asleep", "asleep"), ("waking", "waking"), ("awake", "ready")])
def test_a_replica_whose_engine_sleeps_is_not_ready(phase: str, state: str) -> None:
    sleeper = member("a", running=0)
    sleeper["load"]["sleep"] = phase
    (shown,) = replicas_of(report(sleeper), MODEL)
    assert shown.state == state
    assert ready_of(report(sleeper), MODEL) == ("1 ready" if state == "ready" else f"0 ready, 1 {state}")


def test_ready_replicas_are_counted_against_the_target_where_it_is_known() -> None:
    members = ingress(), member("a"), member("b", state="lost")
    starts = (starting("c", since=999.0),)
    assert ready_of(report_of_all(*members, starts=starts, losses=(KILLED,)), MODEL) == "1 of 2 ready, 1 starting, 1 lost"
    assert ready_of(report(ingress(), member("a"), member("b", state="draining")), MODEL) == "1 ready, 1 draining"
    assert models_of({**report(), "models": {"m": {}}, "lost": [KILLED]}) == [MODEL, "m"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(-3.0, "0 s"), (59.9, "59 s"), (60.0, "1 min"), (7199.0, "1 h"), (86400.0 * 3, "3 d")]
)
def test_a_span_is_in_its_largest_full_unit(seconds: float, said: str) -> None:
    assert span(seconds) == said


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


def test_replicas_of_all_models_are_counted_together() -> None:
    other = {**member("b", state="draining"), "model": "m"}
    models = {MODEL: {"target": 2, "starting": []}, "m": {"target": 1, "starting": []}}
    members = report(ingress(), member("a"), other)
    assert ready_of_all({**members, "models": models}) == ("1 of 3", "replicas ready, 1 draining")
    assert ready_of_all({**members, "models": {MODEL: models[MODEL]}}) == ("1", "replica ready, 1 draining")
    assert ready_of_all(report()) == ("0", "replicas ready")


def test_the_picture_shows_requests_as_dots_the_age_and_the_way_of_requests() -> None:
    busy = member("a", running=MAX_DOTS + 6)
    busy["load"]["waiting"] = 3
    busy["epoch"] = int((1000.0 - 125) * 1e9)
    drawn = fleet_html(report_of_all(ingress(), busy, losses=(KILLED,)))
    assert (drawn.count("<i></i>"), drawn.count("<u></u>")) == (MAX_DOTS - 3, 3)
    assert "<span>+9</span>" in drawn
    assert "serves for 2 min · 127.0.0.1:4001 · 9 steps · started in 31 s" in drawn
    assert "<b>1 of 2</b><span>replicas ready, 1 lost</span>" in drawn
    assert '<div class="card lost"><div class="head"><b>b</b><span class="state lost">lost</span></div>' in drawn
    assert f'<h2>{MODEL} <span class="quiet">1 of 2 ready, 1 lost</span></h2>' in drawn


def test_an_ingress_is_a_card_with_its_requests() -> None:
    drawn = fleet_html(report(ingress(resumptions=3)))
    assert "<p>2 requests, 0 waiting for a replica</p><small>127.0.0.1:4000 · 3 resumed · 0 moved</small>" in drawn


def test_a_start_is_a_bar_that_is_full_after_the_usual_time() -> None:
    drawn = fleet_html(report_of_all(ingress(cold_start_s=20.0), starts=(starting("c", since=985.0),)))
    assert '<span>start</span><span class="bar"><i style="width:75%"></i></span><span>75%</span>' in drawn


def test_a_model_without_a_replica_is_shown_all_the_same() -> None:
    assert f'<h2>{MODEL}</h2><p class="quiet">none</p>' in fleet_html(report(ingress()))


def test_the_newest_happening_comes_first() -> None:
    listed = happenings_html(changes(BEFORE, report(ingress(), member("a"), decisions=(DECISION,))))
    assert listed.index("is gone") < listed.index("Autoscaler")


@pytest.mark.parametrize(("time", "older"), [(1000.5, False), (1000.0, True), (999.0, True), (989.0, False)])
def test_a_report_that_is_much_older_comes_from_another_clock(time: float, older: bool) -> None:
    assert is_older(report(time=time), report()) is older

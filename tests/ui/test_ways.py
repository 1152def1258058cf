"""The fleet page draws the ways of single requests."""

import re
from typing import Any

import pytest

from serve_app.ui.fleet_view import fleet_html
from serve_app.ui.ways import MAX_MOVED, MAX_OTHERS, ways_html
from tests.ui.fake_service import MODEL, ingress, member, way


def told(*others: dict[str, Any], moved: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"time": 1000.0, "moved": list(moved), "others": list(others)}


def texts(drawn: str) -> list[list[str]]:
    """Return the texts of each request's parts: who, the replicas, the numbers."""
    lines = re.findall(r"<li>(.*?)</li>", drawn)
    return [[re.sub(r"<[^>]+>", "", part).strip() for part in re.findall(r"<div[^>]*>(.*?)</div>", line)] for line in lines]


def test_a_request_that_moved_has_both_replicas_with_the_reasons() -> None:
    moved = way("chatcmpl-1", ("aaa", "its engine was killed"), ("bbb", ""))
    assert texts(ways_html(told(moved=(moved,)))) == [
        [
            f"chatcmpl-1 running {MODEL}",
            "it had the least to do → aaa → moved: its engine was killed → bbb",
            "queued 0.25 s · 42 tokens · 2.0 s · 00:16:40",
        ]
    ]


@pytest.mark.parametrize(
    ("shown", "path"),
    [
        (way("r", state="arriving"), "is read and tokenized"),
        (way("r", state="queued"), "waits for a replica"),
        (
            way("r", ("a", "its engine died"), state="queued"),
            "it had the least to do → a → its engine died → waits for a replica",
        ),
        (way("r", ("a", "moved"), ("b", "")), "it had the least to do → a → moved → b"),
        (way("r", state="rejected", reason="queue_full"), "queue_full"),
        (way("r", ("a", ""), state="complete"), "it had the least to do → a"),
        (
            way("r", ("a", "it died"), state="failed", reason="replica_lost"),
            "it had the least to do → a → it died → replica_lost",
        ),
    ],
)
def test_a_request_says_where_it_is(shown: dict[str, Any], path: str) -> None:
    ((_, drawn, _),) = texts(ways_html(told(shown)))
    assert drawn == path


@pytest.mark.parametrize(
    ("tenant", "key", "said"), [("red", "r1", f"{MODEL} · red · r1"), ("ab12", "ab12", f"{MODEL} · ab12"), (None, None, MODEL)]
)
def test_a_request_names_its_tenant_and_key_id(tenant: str | None, key: str | None, said: str) -> None:
    ((who, _, _),) = texts(ways_html(told(way("r", tenant=tenant, key=key))))
    assert who == f"r running {said}"


def test_a_request_that_was_never_queued_and_has_no_id_is_drawn() -> None:
    ((who, _, numbers),) = texts(ways_html(told(way("", state="invalid", queued_s=None, model=""))))
    assert (who, numbers) == ("without an id invalid", "42 tokens · 2.0 s · 00:16:40")


def test_moved_requests_come_first_and_few_are_drawn() -> None:
    moved = tuple(way(f"m{number}", ("a", "x"), ("b", "")) for number in range(9))
    drawn = texts(ways_html(told(*(way(f"o{number}", ("a", "")) for number in range(9)), moved=moved)))
    names = [who.split()[0] for who, _, _ in drawn]
    assert names == [*(f"m{number}" for number in range(MAX_MOVED)), *(f"o{number}" for number in range(MAX_OTHERS))]


def test_all_text_from_the_service_is_escaped() -> None:
    evil = "<script>x</script>"
    shown = way(evil, (evil, evil), state=evil, reason=evil, model=evil, tenant=evil, key=evil)
    shown["hops"][0]["reason"] = evil
    drawn = ways_html(told(shown))
    assert "<script" not in drawn
    assert drawn.count("&lt;script&gt;") >= 7


def test_the_ways_stand_between_the_numbers_and_the_replicas_where_the_service_shows_them() -> None:
    report = {"time": 1000.0, "members": [ingress(), member("a")], "decisions": []}
    drawn = fleet_html(report, told(way("mine", ("a", ""))))
    assert drawn.index("answers resumed") < drawn.index("mine") < drawn.index('class="cards"')
    assert "No request yet." in fleet_html(report, told())
    assert "Ways of requests" not in fleet_html(report)

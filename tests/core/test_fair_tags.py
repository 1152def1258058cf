import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.fair_tags import (
    BACKGROUND_PRIORITY,
    FIRST_TAG,
    Overtakers,
    gives_way,
    is_ahead,
    is_in_same_range,
    later,
    priority_of_tag,
    tag_of,
)
from serve_app.core.tenants import PRIORITIES, Priority

YEAR_S = 365 * 86400.0
LEVEL, AHEAD = (tag_of("interactive", 5.0, is_ahead=ahead) for ahead in (False, True))
BATCH, BATCH_AHEAD = (tag_of("batch", 5.0, is_ahead=ahead) for ahead in (False, True))
LINE = tag_of("background", 5.0, is_ahead=False)
CHOSEN = (-7, 0, 7)
"""Numbers that clients choose where there are no tenants."""
EDGES = [-(1 << 63), *FIRST_TAG.values(), -(1 << 60), 0, (1 << 63) - 1]
NUMBERS = st.sampled_from([edge + more for edge in EDGES for more in (-2, -1, 0, 1, 2)]) | st.integers(-(1 << 63), (1 << 63) - 1)


@given(priority=st.sampled_from(PRIORITIES), tag_s=st.floats(), ahead=st.booleans())
def test_a_tag_is_in_the_range_of_its_priority_whatever_the_virtual_time(
    priority: Priority, tag_s: float, *, ahead: bool
) -> None:
    tag = tag_of(priority, tag_s, is_ahead=ahead)
    assert priority_of_tag(tag) == priority
    assert is_in_same_range(tag, FIRST_TAG[priority])
    assert tag < 1 << 63, "an engine gets it as a 64-bit number"
    assert tag % 2 == ahead


@given(one=NUMBERS, other=NUMBERS)
def test_of_two_requests_at_most_one_gives_way(one: int, other: int) -> None:
    assert not (gives_way(one, other) and gives_way(other, one))


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_tag_tells_its_priority_and_whether_the_tenant_is_ahead_for_years(priority: Priority, *, ahead: bool) -> None:
    tags = [tag_of(priority, seconds, is_ahead=ahead) for seconds in (0.0, 1e-6, 1.0, 10 * YEAR_S)]
    assert tags == sorted(set(tags))
    assert {priority_of_tag(tag) for tag in tags} == {priority}
    assert {is_ahead(tag) for tag in tags} == {ahead and priority != "background"}


@pytest.mark.parametrize(
    ("running", "waiting"),
    [
        (AHEAD, LEVEL),
        (BATCH, LEVEL),
        (BATCH, AHEAD),
        (BATCH_AHEAD, BATCH),
        (LINE, LEVEL),
        (LINE, AHEAD),
        (LINE, BATCH),
        (LINE, 0),
    ],
)
def test_a_later_priority_and_a_tenant_that_is_ahead_give_way(running: int, waiting: int) -> None:
    assert gives_way(running, waiting)
    assert not gives_way(waiting, running)


@pytest.mark.parametrize("tag", [LEVEL, AHEAD, BATCH, LINE, *CHOSEN, BACKGROUND_PRIORITY])
def test_equals_do_not_give_way(tag: int) -> None:
    assert not gives_way(tag, tag)


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("waiting", [LEVEL, BATCH, *CHOSEN, LINE])
def test_a_number_that_a_client_chose_gives_way_to_none(chosen: int, waiting: int) -> None:
    assert not gives_way(chosen, waiting)
    assert not is_ahead(chosen)


def test_tags_are_in_the_order_of_priorities() -> None:
    assert sorted(FIRST_TAG.values()) == [FIRST_TAG[priority] for priority in PRIORITIES]


@pytest.mark.parametrize("noted_at", [100.0, 107.0, 119.9])
def test_a_request_that_others_overtake_for_20_to_40_seconds_counts_as_one_of_theirs(noted_at: float) -> None:
    overtakers = Overtakers()
    overtakers.note(LEVEL, 100.0)
    overtakers.note(LEVEL + 200, noted_at)
    assert not overtakers.is_overdue(AHEAD, noted_at + 19.9)
    assert overtakers.is_overdue(AHEAD, noted_at + 40.0)


def test_only_a_lower_odd_tag_of_the_same_priority_is_overdue() -> None:
    overtakers = Overtakers()
    overtakers.note(BATCH + 200, 0.0)
    overdue = {tag: overtakers.is_overdue(tag, 41.0) for tag in (BATCH_AHEAD, BATCH, BATCH_AHEAD + 200, AHEAD, LINE, *CHOSEN)}
    assert [tag for tag, is_overdue in overdue.items() if is_overdue] == [BATCH_AHEAD]


def test_what_overtook_a_minute_ago_is_forgotten() -> None:
    overtakers = Overtakers()
    overtakers.note(LEVEL + 200, 0.0)
    assert overtakers.is_overdue(AHEAD, 59.0)
    assert not overtakers.is_overdue(AHEAD, 61.0)


@given(value=NUMBERS, seconds=st.floats(0.0, 1e12))
def test_a_later_tag_keeps_its_range_and_whether_its_tenant_is_ahead(value: int, seconds: float) -> None:
    after = later(value, seconds)
    assert after >= value
    assert is_in_same_range(after, value)
    assert is_ahead(after) == is_ahead(value)


def test_only_tags_of_interactive_and_batch_requests_become_later() -> None:
    for priority in ("interactive", "batch"):
        for ahead in (False, True):
            assert later(tag_of(priority, 5.0, is_ahead=ahead), 2.5) == tag_of(priority, 7.5, is_ahead=ahead)
    assert [later(value, 2.5) for value in (LINE, *CHOSEN, -(1 << 63))] == [LINE, *CHOSEN, -(1 << 63)]

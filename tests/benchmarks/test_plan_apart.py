"""The plan for prefill and decode apart plays what fits, and answers by the limits that it was given."""

from dataclasses import replace

import pytest

from benchmarks.apart import CONTEXT
from benchmarks.plan_apart import APART, TOGETHER, Played, draw, fitting, sides, table, verdict
from benchmarks.virtual_fleet import SHARED
from loadtest.records import ScheduledRequest

SLOW = Played(TOGETHER, good=0.9, firsts_s=[0.1, 0.2], gaps_s=[0.01] * 97 + [0.05] * 3, num_failed=0, moves=0)
QUICK = replace(SLOW, gaps_s=[0.01] * 100, moves=7)


def test_requests_of_the_first_seconds_that_fit_into_the_context_are_played() -> None:
    longest = CONTEXT - SHARED - 10
    asked = [(0.0, 100, 20), (2.0, longest, 10), (3.0, longest, 11), (3.9, 1, 1), (4.0, 100, 20)]
    requests = [ScheduledRequest(number, due_s, "", prompt, answer) for number, (due_s, prompt, answer) in enumerate(asked)]
    loads, num_left_out = fitting(requests, 2.0, 2.0)
    assert [(at, load.own, load.answer) for at, load in loads] == [
        (0.0, (100, 100), (20, 20)),
        (1.0, (longest, longest), (10, 10)),
        (1.95, (1, 1), (1, 1)),
    ]
    assert num_left_out == 1


def test_there_is_a_side_for_each_number_of_replicas_for_prompts() -> None:
    assert list(sides(4)) == [TOGETHER, APART, "pools 1", "pools 2", "pools 3"]


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([replace(QUICK, side=APART), replace(QUICK, side="pools 1", good=0.85)], "Yes: with `routing.apart: true` 90.0%"),
        (
            [replace(SLOW, side=APART), replace(SLOW, side="pools 2", good=0.95)],
            "Yes: with `pools: {prefill: {min: 2, max: 2}}` 95.0%",
        ),
        (
            [replace(SLOW, side=APART), replace(SLOW, side="pools 1", good=0.2)],
            "No, it would hardly pay: with `routing.apart: true`",
        ),
        ([replace(QUICK, side=APART, good=0.8)], "No, it would hardly pay: with `routing.apart: true` 80.0%"),
    ],
)
def test_the_answer_names_the_best_setting_and_both_figures(others: list[Played], said: str) -> None:
    answer = verdict([SLOW, *others], ttft_s=2.0, itl_s=0.1)
    assert answer.startswith(said)
    assert "and 90.0% without; the ITL p99 is " in answer
    assert answer.endswith("and 50.0 ms (simulated).")


def test_the_figure_has_the_best_sides_and_the_table_all() -> None:
    played = [SLOW, *(replace(QUICK, side=side, good=good) for side, good in ((APART, 0.9), ("pools 1", 0.1), ("pools 2", 0.95)))]
    left, right = draw(played, ttft_s=2.0, itl_s=0.1).axes
    labels = [label.split(" (")[0] for label in left.get_legend_handles_labels()[1]]
    assert labels == [TOGETHER, "pools 2", APART]
    assert "simulated" in left.get_xlabel()
    assert "simulated" in right.get_xlabel()
    assert len(table(played)) == 5

"""The phases of a request, from the times in its account."""

import pytest

from serve_app.core.request import RequestState, Resume
from serve_app.ingress.exchange.account import Account, Phase
from serve_app.ingress.exchange.outcomes import Answer


def request(
    *, arrived_at: float, starts: list[float], scheduled_at: float | None = None, first: float | None = None, last: float = 0.0
) -> RequestState:
    state = RequestState("r", prompt_tokens=5, max_tokens=5, resume=Resume.CONTINUE, arrived_at=arrived_at)
    trail = state.trail
    trail.starts, trail.scheduled_at, trail.first_token_at, trail.last_token_at = starts, scheduled_at, first, last
    return state


WAITS = request(arrived_at=2.0, starts=[])
RUNS = request(arrived_at=2.0, starts=[3.0])
ANSWERS = request(arrived_at=2.0, starts=[3.0, 3.5], scheduled_at=4.0, first=6.0, last=8.0)
SECOND_CHOICE = request(arrived_at=2.0, starts=[3.0], first=6.5, last=9.0)


@pytest.mark.parametrize(
    ("requests", "phases"),
    [
        ([], [("intake", 1.0, 10.0)]),
        ([WAITS], [("intake", 1.0, 2.0), ("queue", 2.0, 10.0)]),
        ([RUNS], [("intake", 1.0, 2.0), ("queue", 2.0, 3.0), ("prefill", 3.0, 10.0)]),
        (
            [ANSWERS],
            [
                ("intake", 1.0, 2.0),
                ("queue", 2.0, 3.0),
                ("engine_queue", 3.0, 4.0),
                ("prefill", 4.0, 6.0),
                ("decode", 6.0, 8.0),
                ("finish", 8.0, 10.0),
            ],
        ),
        (
            [ANSWERS, SECOND_CHOICE],
            [
                ("intake", 1.0, 2.0),
                ("queue", 2.0, 3.0),
                ("engine_queue", 3.0, 4.0),
                ("prefill", 4.0, 6.0),
                ("decode", 6.0, 9.0),
                ("finish", 9.0, 10.0),
            ],
        ),
    ],
)
def test_each_phase_begins_where_the_one_before_it_ends(requests: list[RequestState], phases: list[Phase]) -> None:
    account = Account(0, "/v1/completions", None)
    account.arrived_at = 1.0
    for each in requests:
        account.add(each, "answer")
    assert account.phases(10.0) == phases


def prompt_tokens_of(*engine_requests: tuple[str, int]) -> int:
    account = Account(0, "/v1/completions", None)
    for answer_id, prompt_tokens in engine_requests:
        account.add(RequestState("r", prompt_tokens, 1, Resume.CONTINUE), answer_id)
    return account.line(0, Answer(200, True, 0), None, stalled=False).prompt_tokens


def test_the_prompt_of_a_beam_search_counts_once_and_each_prompt_of_a_list_does() -> None:
    steps = [(f"cmpl-x-{step:032x}-beam-{beam}", 100 + step) for step in range(3) for beam in range(4 if step else 1)]
    assert prompt_tokens_of(*steps) == 100
    assert prompt_tokens_of(("cmpl-x-0", 100), ("cmpl-x-0", 100), ("cmpl-x-1", 7)) == 107, "n=2, then another prompt"


def test_an_engines_clock_that_is_ahead_makes_no_phase_negative() -> None:
    account = Account(0, "/v1/completions", None)
    account.arrived_at = 1.0
    account.add(request(arrived_at=2.0, starts=[3.0], scheduled_at=7.0, first=6.0, last=8.0), "answer")
    assert [(name, end - begin) for name, begin, end in account.phases(10.0)] == [
        ("intake", 1.0),
        ("queue", 1.0),
        ("engine_queue", 4.0),
        ("prefill", 0.0),
        ("decode", 1.0),
        ("finish", 2.0),
    ]

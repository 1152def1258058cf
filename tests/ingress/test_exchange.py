"""An exchange knows the phases of its time, its tokens and its end, and is visible to the code that answers it."""

import asyncio
import contextvars
import itertools
from collections.abc import Sequence

import pytest

from serve_app.books.ledger_lines import LedgerLine
from serve_app.core.quotas import Prompt
from serve_app.core.request import RequestState, Resume
from serve_app.errors import QueueFull
from serve_app.ingress.books.ledger import line_of
from serve_app.ingress.exchange.exchange import Exchange, Phase
from serve_app.ingress.exchange.held_answer import current_exchange
from tests.ingress.helpers import answering


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
    exchange = Exchange("/v1/completions")
    exchange.arrived_at = 1.0
    for each in requests:
        exchange.requests.add(each, "answer")
    assert exchange.phases(10.0) == phases


def line_after(*engine_requests: tuple[str, RequestState], prompts: Sequence[Prompt] = ()) -> LedgerLine:
    exchange = Exchange("/v1/completions")
    exchange.prompts = [*prompts]
    for answer_id, each in engine_requests:
        exchange.add_engine_request(each, answer_id)
    ending = exchange.end()
    return line_of(exchange, ending, exchange.requests.totals(ending.outcome), None, seq=0)


def prompt_tokens_of(*engine_requests: tuple[str, int]) -> int:
    states = [(answer_id, RequestState("r", prompt_tokens, 1, Resume.CONTINUE)) for answer_id, prompt_tokens in engine_requests]
    return line_after(*states).prompt_tokens


def test_the_prompt_of_a_beam_search_counts_once_and_each_prompt_of_a_list_does() -> None:
    steps = [(f"cmpl-x-{step:032x}-beam-{beam}", 100 + step) for step in range(3) for beam in range(4 if step else 1)]
    assert prompt_tokens_of(*steps) == 100
    assert prompt_tokens_of(("cmpl-x-0", 100), ("cmpl-x-0", 100), ("cmpl-x-1", 7)) == 107, "n=2, then another prompt"


def answered(request_id: str, prompt_tokens: int, cached_tokens: int | None) -> RequestState:
    state = RequestState(request_id, prompt_tokens, 1, Resume.CONTINUE, emitted_ids=[7])
    state.trail.cached_tokens = cached_tokens
    state.trail.finished("length")
    return state


def test_cached_tokens_are_those_of_the_prompts_that_count() -> None:
    choices = [("cmpl-x-0", answered("a", 100, 16)), ("cmpl-x-0", answered("b", 100, 96)), ("cmpl-x-1", answered("c", 7, 0))]
    assert line_after(*choices).cached_tokens == 16, "the second choice found the prompt of the first one"
    beams = [(f"x-{step}-beam-{beam}", answered(f"{step}{beam}", 100 + step, 96)) for step in range(30) for beam in range(4)]
    assert line_after(*beams).cached_tokens == 96, "of the first step, which has been folded into the totals"
    assert line_after(("cmpl-x-0", answered("a", 100, None))).cached_tokens is None


def test_each_prompt_of_a_list_of_beam_searches_counts() -> None:
    """Their engine requests have ids of one form, and come in steps: at first each search's prompt, then its beams."""
    searches, ids = [(100, 16), (30, 0), (100, 96)], itertools.count()

    def steps(longer: int, width: int) -> list[tuple[str, RequestState]]:
        return [
            (f"cmpl-x-{search:032x}-beam-{beam}", answered(str(next(ids)), length + longer, cached))
            for search, (length, cached) in enumerate(searches)
            for beam in range(width)
        ]

    prompts = [Prompt(length, 2, 9, is_beam_search=True) for length, _ in searches]
    line = line_after(*steps(0, 1), *steps(1, 2), *steps(2, 2), prompts=prompts)
    assert (line.prompt_tokens, line.cached_tokens, line.output_tokens) == (230, 112, 15)


def test_an_engine_has_computed_what_was_not_cached_of_each_choice_that_it_answered() -> None:
    exchange = Exchange("/v1/completions")
    for each in (answered("a", 100, 16), answered("b", 100, 96), RequestState("c", 50, 1, Resume.CONTINUE)):
        exchange.requests.add(each, "cmpl-x-0")
    pooled, failed = (RequestState(name, 9, 1, Resume.RESTART) for name in "de")
    pooled.trail.finished("stop")
    failed.trail.finished("error")
    for each in (pooled, failed):
        exchange.requests.add(each, "embd-x-0")
    totals = exchange.requests.totals("complete")
    assert (totals.num_answered, totals.computed_tokens) == (3, 84 + 4 + 9)
    exchange.begin_again()
    totals = exchange.requests.totals("complete")
    assert (totals.num_answered, totals.computed_tokens, totals.cached_tokens) == (0, 0, None)


def test_an_engines_clock_that_is_ahead_makes_no_phase_negative() -> None:
    exchange = Exchange("/v1/completions")
    exchange.arrived_at = 1.0
    exchange.requests.add(request(arrived_at=2.0, starts=[3.0], scheduled_at=7.0, first=6.0, last=8.0), "answer")
    assert [(name, end - begin) for name, begin, end in exchange.phases(10.0)] == [
        ("intake", 1.0),
        ("queue", 1.0),
        ("engine_queue", 4.0),
        ("prefill", 0.0),
        ("decode", 1.0),
        ("finish", 2.0),
    ]


def test_the_first_error_ends_a_request_and_none_does_after_the_whole_answer() -> None:
    first, second = QueueFull(waiting=1, limit=1, retry_after_s=5.0), QueueFull(waiting=2, limit=1, retry_after_s=5.0)
    failed, answered = Exchange("/generate"), Exchange("/generate")
    failed.fail(first)
    failed.fail(second)
    answered.status, answered.answered = 200, True
    answered.fail(first)
    assert (failed.error, answered.error) == (first, None)
    failed.begin_again()
    failed.fail(second)
    assert failed.error is second


def test_outside_of_a_request_there_is_no_exchange() -> None:
    assert contextvars.Context().run(current_exchange) is None


def test_tasks_of_one_request_share_its_exchange_and_those_of_another_do_not() -> None:
    async def engine_request(error: QueueFull | None) -> None:
        exchange = current_exchange()
        assert exchange is not None
        if error is not None:
            exchange.fail(error)

    async def http_request(error: QueueFull | None) -> Exchange:
        exchange = Exchange("/v1/completions")
        with answering(exchange):
            await asyncio.gather(engine_request(None), engine_request(error))
        return exchange

    async def both() -> tuple[Exchange, Exchange]:
        return await asyncio.gather(http_request(full), http_request(None))

    full = QueueFull(waiting=1, limit=1, retry_after_s=5.0)
    refused, accepted = asyncio.run(both())
    assert (refused.error, accepted.error) == (full, None)

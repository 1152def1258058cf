"""Beam search gives the sums and quotients worked out by hand; logarithms are multiples of 1/8, so they are exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.generate.beam_search.utils import get_beam_search_score

from serve_app.ingress.routes.beam_search import Beam, BeamSearch

EOS = 0


def search_of(*prompt: int, width: int = 2, length_penalty: float = 1.0, early_stopping: bool = False) -> BeamSearch:
    return BeamSearch(prompt, width=width, eos_token_id=EOS, length_penalty=length_penalty, early_stopping=early_stopping)


def test_the_prompt_is_the_only_beam_at_first() -> None:
    search = search_of(5, 6)
    assert (search.running, search.done) == ([Beam((5, 6), 0.0)], False)


def test_a_step_keeps_the_width_likeliest_extensions_of_all_beams() -> None:
    search = search_of(5)
    search.advance([{7: -0.125, 8: -1.0, 9: -2.0, 6: -3.0}])
    assert search.running == [Beam((5, 7), -0.125), Beam((5, 8), -1.0)]
    # -0.125 - 1 = -1.125, -0.125 - 3 = -3.125; -1 - 0.25 = -1.25, -1 - 0.5 = -1.5
    search.advance([{3: -1.0, 4: -3.0}, {3: -0.25, 4: -0.5}])
    assert search.running == [Beam((5, 7, 3), -1.125), Beam((5, 8, 3), -1.25)]


def test_one_beam_may_supply_all_survivors() -> None:
    search = search_of(5)
    search.advance([{7: -0.125, 8: -4.0}])
    search.advance([{1: -1.0, 2: -1.5, 3: -2.0}, {1: -0.125, 2: -0.25, 3: -0.5}])
    assert search.running == [Beam((5, 7, 1), -1.125), Beam((5, 7, 2), -1.625)]


def test_an_end_of_sequence_token_finishes_its_beam_which_then_competes_by_its_mean_log_probability() -> None:
    search = search_of(5)
    search.advance([{7: -0.125, 8: -1.0, 9: -2.0, EOS: -3.0}])
    # running (5,7) -0.125/2, (5,8) -1/2; finished (5,) -3/1
    assert search.best() == [Beam((5, 7), -0.125), Beam((5, 8), -1.0)]
    search.advance([{EOS: -0.5, 3: -1.0}, {3: -0.25, EOS: -4.0}])
    # finished (5,7) -0.625/2 = -0.3125; running (5,7,3) -1.125/3 = -0.375 and (5,8,3) -1.25/3
    assert search.best() == [Beam((5, 7), -0.625), Beam((5, 7, 3), -1.125)]


@pytest.mark.parametrize(
    ("length_penalty", "best"),
    [
        (0.0, [Beam((5, 7), -0.625), Beam((5, 7, 3), -0.75)]),  # -0.625 before -0.75
        (1.0, [Beam((5, 7, 3), -0.75), Beam((5, 7), -0.625)]),  # -0.75/3 = -0.25 before -0.625/2 = -0.3125
        (-1.0, [Beam((5, 7), -0.625), Beam((5, 7, 3), -0.75)]),  # -0.625*2 = -1.25 before -0.75*3 = -2.25
    ],
)
def test_the_length_penalty_divides_by_a_power_of_the_length(length_penalty: float, best: list[Beam]) -> None:
    search = search_of(5, length_penalty=length_penalty)
    search.advance([{7: -0.125, 8: -100.0}])
    search.advance([{EOS: -0.5, 3: -0.625}, {EOS: -100.0, 3: -100.0}])
    assert search.best() == best


def test_ignored_end_of_sequence_tokens_continue_but_a_last_one_adds_no_length() -> None:
    search = BeamSearch([5, 6], width=2, eos_token_id=EOS, ignore_eos=True)
    search.advance([{EOS: -1.0, 7: -1.25}])
    assert search.running == [Beam((5, 6, EOS), -1.0), Beam((5, 6, 7), -1.25)]
    # -1/2 = -0.5 against -1.25/3 = -0.41...
    assert search.best() == [Beam((5, 6, 7), -1.25), Beam((5, 6, EOS), -1.0)]


def test_without_an_end_of_sequence_token_nothing_finishes() -> None:
    search = BeamSearch([5], width=1, eos_token_id=None)
    search.advance([{EOS: -0.5, 7: -1.0}])
    assert (search.running, search.done) == ([Beam((5, EOS), -0.5)], False)


def test_a_search_without_a_running_beam_is_done() -> None:
    search = search_of(5, width=1)
    search.advance([{EOS: -0.5}])
    assert (search.running, search.done, search.best()) == ([], True, [Beam((5,), -0.5)])


def test_early_stopping_ends_when_width_beams_are_finished_and_gives_up_the_running_ones() -> None:
    search = search_of(5, early_stopping=True)
    search.advance([{EOS: -8.0, 7: -0.125, 8: -0.25}])
    assert not search.done
    search.advance([{EOS: -4.0, 3: -0.125}, {3: -0.125, 4: -0.25}])
    # finished (5,) -8/1 and (5,7) -4.125/2; running ones, all better, do not count
    assert (search.done, search.best()) == (True, [Beam((5, 7), -4.125), Beam((5,), -8.0)])


def test_without_early_stopping_finished_beams_are_outdone_by_later_ones() -> None:
    search = search_of(5, width=1)
    search.advance([{EOS: -1.0, 7: -1.5}])
    assert search.best() == [Beam((5, 7), -1.5)]  # -1.5/2 before -1/1
    search.advance([{EOS: -0.125, 3: -4.0}])
    assert (search.done, search.best()) == (False, [Beam((5, 7), -1.625)])


def test_candidates_must_be_given_for_each_running_beam() -> None:
    with pytest.raises(ValueError, match="zip"):
        search_of(5).advance([])


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    cum_logprob=st.floats(-100, 0),
    length_penalty=st.floats(-2, 2),
)
def test_the_score_of_a_beam_is_vllms(tokens: list[int], cum_logprob: float, length_penalty: float) -> None:
    search = BeamSearch([9], width=1, eos_token_id=0, length_penalty=length_penalty)
    assert search.score(Beam(tuple(tokens), cum_logprob)) == get_beam_search_score(tokens, cum_logprob, 0, length_penalty)

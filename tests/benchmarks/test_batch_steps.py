"""These tests check, in computed time, the figures that docs/batch.md promises for chats beside a batch."""

import numpy as np
import pytest

from benchmarks.batch_steps import Found, Way, play
from serve_app.simulated.profiles import PROFILES

SECONDS = 25.0


def ratio(both: Found, alone: Found, name: str) -> float:
    return float(np.quantile(getattr(both, name), 0.99) / np.quantile(getattr(alone, name), 0.99))


@pytest.mark.parametrize(("profile", "rate"), [("h100-llama-8b", 6.0), ("t4-gemma-2b", 3.0)])
def test_beside_a_batch_chats_keep_their_times_and_the_batch_has_nearly_all_that_is_idle(profile: str, rate: float) -> None:
    hardware = PROFILES[profile]
    alone = play(hardware, Way(name="", lines=0), rate=rate, seconds=SECONDS)
    both = play(hardware, Way(name="", lines=256, share=0.1), rate=rate, seconds=SECONDS)
    batch = play(hardware, Way(name="", lines=256), rate=0.0, seconds=SECONDS)
    assert alone.ttft_s.size > 60
    assert ratio(both, alone, "ttft_s") <= 1.25
    assert ratio(both, alone, "itl_s") <= 1.15
    assert both.tokens_per_s - alone.tokens_per_s >= 0.8 * (batch.tokens_per_s - alone.tokens_per_s)


def test_priority_alone_does_not_keep_them() -> None:
    hardware = PROFILES["h100-llama-8b"]
    alone, both = (play(hardware, Way(name="", lines=lines), rate=6.0, seconds=SECONDS) for lines in (0, 32))
    assert ratio(both, alone, "ttft_s") > 2.0
    assert ratio(both, alone, "itl_s") > 2.0


def test_a_chat_alone_waits_for_the_step_of_its_prompt_and_has_all_its_tokens() -> None:
    found = play(PROFILES["h100-llama-8b"], Way(name="", lines=0), rate=0.2, seconds=200.0)
    assert 0.0066 < np.median(found.ttft_s) < 0.0095  # a step over 16 to 256 tokens
    assert np.median(found.itl_s) == pytest.approx(0.0066, rel=0.05)

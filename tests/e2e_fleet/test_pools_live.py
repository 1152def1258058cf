"""With pools, answers to long prompts move to the other pool, and no client notices: simulated accelerators in real processes."""

import pytest

from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import fleet
from tests.e2e_fleet.streams import Answer, play
from tests.e2e_fleet.test_apart import CHATS, folded, long_prompts, moves, moving_kv

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def test_answers_to_long_prompts_move_and_all_are_the_same(
    configure: Configure, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with fleet(moving_kv(configure, 8060, pools={}), tmp_path_factory.mktemp("pools")) as pooled:
        undisturbed = folded(play(pooled.url, CHATS))
        assert moves(pooled, "serve_app_hand_overs_asked_total", "cause").get("role", 0) == 0
        long: list[Answer] = []
        prompts = long_prompts(3)
        assert folded(play(pooled.url, CHATS, lambda: long.extend(play(pooled.url, prompts)))) == undisturbed
        assert len(folded(long)) == len(prompts)
        asked = moves(pooled, "serve_app_hand_overs_asked_total", "cause")
        assert asked["role"] > 0 == asked.get("balance", 0)
        assert moves(pooled, "serve_app_hand_overs_total", "result").get("read", 0) > 0
        assert moves(pooled, "serve_app_routed_total", "reason").get("prompt", 0) > 0

"""Long prompts beside short ones on a simulated engine in virtual time: steps that keep the ITL target beside fixed ones."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.loaded_fleet import LoadedFleet
from benchmarks.steps import KEPT, TARGET_S, Cores, is_good, mixed
from serve_app.checkpoints import make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECONDS, TAIL_S = 10.0, 4.0


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cores]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "HF_HUB_OFFLINE": "1"}.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        cores = Cores(make_tiny_llama(tmp_path_factory.mktemp("steps") / "tiny-llama"))
        yield cores
        cores.shutdown()


def played(cores: Cores, side: str, itl_s: float | None) -> tuple[int, float]:
    """Return the number of good answers, and the share of gaps within the target."""
    fleet = LoadedFleet([cores.of(side, itl_s)], seed=1, costs=cores.costs)
    fleet.run(mixed(16.0), SECONDS, warmup_s=5.0)
    counted: list[Any] = [asked for asked in fleet.counted() if asked.at < fleet.monotonic() - TAIL_S]
    gaps = [gap for asked in fleet.counted() for gap in asked.gaps]
    return sum(is_good(asked, TARGET_S) for asked in counted), sum(gap <= TARGET_S for gap in gaps) / len(gaps)


def test_more_answers_are_good_than_with_fixed_steps_and_gaps_keep_the_target(cores: Cores) -> None:
    good, kept = played(cores, KEPT, TARGET_S)
    fixed, late = played(cores, "fixed 2048", None)
    assert good >= 1.2 * max(1, fixed)
    assert kept >= 0.99 > late

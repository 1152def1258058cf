"""Two prompts have equal hashes just where vLLM would share their blocks."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from serve_app.core.prefix_index import NO_PREFIX, tokens_at
from serve_app.core.prompt_hashes import hash_points
from serve_app.ingress.fleet.intake import prefix_of

BLOCK = 2
CACHE = SimpleNamespace(enable_prefix_caching=True, block_size=BLOCK)

images = st.lists(st.tuples(st.integers(0, 9), st.sampled_from("xy")), max_size=2, unique_by=lambda image: image[0])
prompts = st.builds(
    lambda ids, salt, lora, images, long: engine_request(ids + long * [7] * 150, salt=salt, lora=lora, images=sorted(images)),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.sampled_from([None, None, None, "s"]),
    st.sampled_from([None, None, None, ("l", "/p"), ("l", "/q")]),
    images,
    st.sampled_from([0, 0, 1]),
)


def engine_request(
    ids: list[int] | None, *, salt: str | None = None, lora: tuple[str, str] | None = None, images: Any = (), **more: Any
) -> Any:
    """An image takes one token of the prompt."""
    features = [
        MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=at, length=1))
        for at, name in images
        if ids is not None and at < len(ids)
    ]
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=ids,
        mm_features=features or None,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None if lora is None else LoRARequest(lora[0], 1, lora[1]),
        cache_salt=salt,
        data_parallel_rank=None,
        **more,
    )


def hashes_of_vllm(request: Any) -> list[bytes]:
    """Of its blocks that end at one of our points."""
    init_none_hash(sha256)
    blocks = list(Request.from_engine_core_request(request, get_request_block_hasher(BLOCK, sha256)).block_hashes)
    ends = [tokens_at(point, BLOCK) // BLOCK for point in range(len(blocks))]
    return [blocks[end - 1] for end in ends if end <= len(blocks)]


@settings(deadline=None)
@given(prompts, prompts)
def test_hashes_are_equal_just_where_vllms_are(one: Any, other: Any) -> None:
    ours = [prefix_of(request, CACHE).hashes for request in (one, other)]
    theirs = [hashes_of_vllm(request) for request in (one, other)]
    assert [len(hashes) for hashes in ours] == [len(hashes) for hashes in theirs]
    assert [a == b for a, b in zip(*ours, strict=False)] == [a == b for a, b in zip(*theirs, strict=False)]


def test_another_process_has_the_same_hashes() -> None:
    asked = engine_request(list(range(40)), salt="s", session_id="mine")
    code = (
        "from types import SimpleNamespace as S; from serve_app.ingress.fleet.intake import prefix_of\n"
        "asked = S(session_id='mine', prompt_token_ids=list(range(40)), prompt_embeds=None, lora_request=None, cache_salt='s',\n"
        "          mm_features=None)\n"
        f"print(prefix_of(asked, S(enable_prefix_caching=True, block_size={BLOCK})))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == str(prefix_of(asked, CACHE))


def test_without_a_prefix_cache_or_token_ids_only_the_session_is_left() -> None:
    off = SimpleNamespace(enable_prefix_caching=False, block_size=BLOCK)
    unknown = SimpleNamespace(enable_prefix_caching=True, block_size=None)
    for asked, cache in (
        (engine_request([1, 2, 3]), off),
        (engine_request([1, 2, 3]), unknown),
        (engine_request(None), CACHE),
    ):
        assert prefix_of(asked, cache) == NO_PREFIX
    with_session = prefix_of(engine_request([1, 2, 3], session_id="\ud800"), off)
    assert not with_session.hashes
    assert with_session.session is not None


def test_a_prompt_of_100_000_tokens_has_few_points() -> None:
    assert len(hash_points(range(100_000), 16)) == 209

"""An image of a chat becomes tensors in the ingress, and the engine gets them, also an engine with a newer vLLM."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from tests.contracts.tables import VERSIONS
from tests.doubles.fake_engine import VLLM_VERSION
from tests.doubles.fleet import MODEL, in_loop
from tests.doubles.tiny_blip2 import IMAGE_TOKENS, SIZE, make_tiny_blip2
from tests.ingress.serving import serving


@pytest.mark.parametrize("version", sorted({VLLM_VERSION, VERSIONS[1]}))
@in_loop
async def test_an_image_reaches_the_engine_as_tensors(version: str, tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(picture, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    async with serving(make_tiny_blip2(tmp_path / "blip2"), adapters=(), vllm_version=version) as (http, engine, _):
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        (asked,) = engine.added
    assert asked.mm_features is not None
    (feature,) = asked.mm_features
    assert (feature.modality, feature.mm_position.length) == ("image", IMAGE_TOKENS)
    assert feature.data is not None
    assert feature.data["pixel_values"].data.shape == (3, SIZE, SIZE)

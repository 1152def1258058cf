"""An image of a chat becomes tensors in the ingress, and the engine gets them, also an engine with a newer vLLM."""

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import Tokenizer

from serve_app.checkpoints.tiny_tokenizer import write_tokenizer
from tests.contracts.tables import VERSIONS
from tests.doubles.fleet import in_loop
from tests.ingress.serving import serving

IMAGE = "<image>"
SIZE, PATCH = 28, 14
NUM_TOKENS = (SIZE // PATCH) ** 2
"""Tokens of an image, which has a patch for each."""


def make_llava(folder: Path) -> Path:
    """Make a checkpoint of a tiny LLaVA without weights. Its template is the text of the messages, images included."""
    folder.mkdir()
    write_tokenizer(folder, vocab_size=1024, max_tokens=512, with_template=False, wrap=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([IMAGE])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "image_size": SIZE, "patch_size": PATCH, "projection_dim": 32, **sizes}
    text = {"model_type": "llama", "vocab_size": 1088, "max_position_embeddings": 512, **sizes}
    of_processor = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    files = {
        "config.json": {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": tokenizer.token_to_id(IMAGE),
            "vision_config": vision,
            "text_config": text,
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": SIZE},
            "crop_size": {"height": SIZE, "width": SIZE},
        },
        "processor_config.json": {"processor_class": "LlavaProcessor", **of_processor},
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("version", VERSIONS)
@in_loop
async def test_an_image_reaches_the_engine_as_tensors(version: str, tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(picture, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    async with serving(make_llava(tmp_path / "llava"), adapters=(), vllm_version=version) as (http, engine, _):
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        (asked,) = engine.added
    (feature,) = asked.mm_features
    assert (feature.modality, feature.mm_position.length) == ("image", NUM_TOKENS)
    assert feature.data["pixel_values"].data.shape == (3, SIZE, SIZE)

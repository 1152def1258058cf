"""This module makes a tiny BLIP-2, a model of text and images whose code needs no torchvision, as a checkpoint without weights."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from serve_app.checkpoints.tiny_tokenizer import write_tokenizer

SIZE = 28
"""Width and height of what the model sees of an image, in pixels."""
IMAGE_TOKENS = 4
"""Tokens of an image, which stand before the text."""


def make_tiny_blip2(folder: Path) -> Path:
    """Write the checkpoint into a new folder. Its chat template is the text of the messages."""
    folder.mkdir()
    write_tokenizer(folder, vocab_size=1024, max_tokens=512, with_template=False, wrap=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    layers = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 1088, "max_position_embeddings": 512, "ffn_dim": 64, "word_embed_proj_dim": 32, **layers}
    files = {
        "config.json": {
            "architectures": ["Blip2ForConditionalGeneration"],
            "model_type": "blip-2",
            "image_token_index": tokenizer.token_to_id("<image>"),
            "num_query_tokens": IMAGE_TOKENS,
            "vision_config": {
                "model_type": "blip_2_vision_model",
                "image_size": SIZE,
                "patch_size": 14,
                "intermediate_size": 64,
                **layers,
            },
            "qformer_config": {"model_type": "blip_2_qformer", "encoder_hidden_size": 32, "intermediate_size": 64, **layers},
            "text_config": {"model_type": "opt", **text},
        },
        "preprocessor_config.json": {"image_processor_type": "BlipImageProcessor", "size": {"height": SIZE, "width": SIZE}},
        "processor_config.json": {"processor_class": "Blip2Processor", "num_query_tokens": IMAGE_TOKENS},
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    return folder

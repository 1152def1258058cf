"""This script prints what vLLM makes of an image, as JSON on the last line: ``python -m tests.cuda.media_tensors CHECKPOINT``.

``architecture``, ``hash`` of the image, ``length`` of its place in the prompt, and ``tensors``: name -> type, shape and values.
"""

import json
import sys

import numpy as np
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import ProcessorInputs, TimingContext


def main(checkpoint: str) -> None:
    config = ModelConfig(model=checkpoint, dtype="bfloat16")
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    smooth = np.add.outer(np.arange(30), np.arange(40))[..., None] * (1, 2, 3)
    items = processor.info.parse_mm_data({"image": [Image.fromarray(smooth.astype(np.uint8))]})
    made = processor.apply(ProcessorInputs([5, 6], items), TimingContext(enabled=False))
    (image,) = made["mm_kwargs"]["image"]
    assert image is not None
    told = {
        "architecture": config.architecture,
        "hash": made["mm_hashes"]["image"][0],
        "length": made["mm_placeholders"]["image"][0].length,
        "tensors": {
            name: [str(e.data.dtype), type(e.field).__name__, list(e.data.shape), e.data.flatten().tolist()]
            for name, e in image.items()
        },
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])

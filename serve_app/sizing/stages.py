"""This module divides a model into pipeline stages as vLLM does. Pure; `tests/contracts/test_vllm_stages.py` compares both."""

from collections.abc import Iterator
from dataclasses import replace

from serve_app.sizing.architecture import Architecture


def stages_of(shape: Architecture, num: int) -> list[Architecture]:
    """Return the shapes of ``num`` stages: consecutive layers, the embeddings on the first, the output layer on the last."""
    ranges = _ranges(shape.num_layers, num)
    return [
        replace(shape, layers=shape.layers[layers.start : layers.stop], is_first=n == 0, is_last=n == num - 1)
        for n, layers in enumerate(ranges)
    ]


def _ranges(num_layers: int, num: int) -> Iterator[range]:
    """Yield the layers of each stage. What the division leaves goes to the stages before the last, from the back to the front."""
    each, left = divmod(num_layers, num)
    start = 0
    for n in range(num):
        stop = start + each + (num - 1 - left <= n < num - 1)
        yield range(start, stop)
        start = stop

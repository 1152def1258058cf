"""This module makes a process with vLLM in it start faster than vLLM's own start."""

import contextlib
import gc
import os
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Import vLLM inside: its modules are no garbage, and looking for some is a quarter of the CPU time of their import."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settle() -> None:
    """Call once all is built and requests may come: what is there is no garbage, and vLLM's environment changes no more.

    Sets TOKENIZERS_PARALLELISM for this process and its children, unless it is set.

    A collection that looks at all of vLLM stops an ingress for 0.7 s. New objects are looked at when there are 100,000 of them, not 700:
    a burst of 256 requests makes some 50,000 that live as long as the requests do, and are looked at in vain.
    """
    from vllm.envs import enable_envs_cache

    # A batch of prompts is some 2 ms of one thread. The tokenizers' own threads, one a core, take turns looking for work, and for longer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    enable_envs_cache()  # else each request asks the environment 14 times


def inspect_models_here() -> None:
    """Let vLLM look at a model's class in this process, where it would start another one that imports all of vLLM again.

    vLLM starts that process where the answer is not in its cache folder, as in every new pod. Do not call this in an engine core on a
    GPU: looking at a model may initialize CUDA, which would take GPU memory here beside what the workers take.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()

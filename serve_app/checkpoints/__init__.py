"""The checkpoints room makes model checkpoints without a model hub: the embedded default, and tiny random ones for tests."""

from serve_app.checkpoints.embedded import EMBEDDED, fetch_embedded, problem_with, resolve_model
from serve_app.checkpoints.tiny import KINDS, make_tiny_adapter, make_tiny_embedding, make_tiny_llama, make_tiny_opt
from serve_app.errors import CheckpointError

__all__ = [
    "EMBEDDED",
    "KINDS",
    "CheckpointError",
    "fetch_embedded",
    "make_tiny_adapter",
    "make_tiny_embedding",
    "make_tiny_llama",
    "make_tiny_opt",
    "problem_with",
    "resolve_model",
]

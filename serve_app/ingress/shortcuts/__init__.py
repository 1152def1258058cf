"""Shortcuts make the common request cheaper. With `ingress.shortcuts: false` this folder may be missing: every answer stays right.

`install` is the only door. `direct` calls vLLM's handlers without the web framework around them, `rendering` tokenizes without the layer
of Transformers, `streaming` writes the middle of a stream without a task for each token, and `gathering` joins writes. `token_cache` and
`thread_batches` serve `rendering`, and `prompt_end` serves `streaming`.
"""

from fastapi import FastAPI
from vllm.renderers.chat_utils import load_chat_template

from serve_app.ingress.front_end.front_end import FrontEnd, Shortcuts
from serve_app.ingress.shortcuts.direct import direct_routes
from serve_app.ingress.shortcuts.gathering import Gathering
from serve_app.ingress.shortcuts.rendering import render_directly
from serve_app.ingress.shortcuts.streaming import Streams, repeated_paths


def install(front: FrontEnd) -> None:
    """Install all shortcuts in a model's front end, before its first request."""
    render_directly(front.engine.renderer, load_chat_template(front.args.chat_template))
    front.client.use(Streams)

    def shortcuts_of(app: FastAPI) -> Shortcuts:
        return Shortcuts(direct_routes(app, front.args), repeated_paths(app, front.args), Gathering.of)

    front.take(shortcuts_of)

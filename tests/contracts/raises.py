"""This module counts the ``raise`` and ``assert`` statements of vLLM's code between the engine core's input and a step's output.

`python -m tests.contracts.raises` writes the counts to raises.txt; where the CUDA image's newer vLLM is installed, what differs to
raises-newer.txt. Run it after an upgrade of vLLM, when every new statement was read: one that the values of a request can reach ends the
engine, so it needs a row in `REACHED` and a limit in serve_app/core/request_limits.py.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import vllm

from tests.contracts.tables import IS_NEWER

PATTERNS = (
    "v1/core/**/*.py",
    "v1/engine/core.py",
    "v1/pool/**/*.py",
    "v1/request.py",
    "v1/sample/**/*.py",
    "v1/structured_output/*.py",
    "v1/worker/*.py",
    "v1/worker/cpu/*.py",
    "v1/worker/gpu/**/*.py",
)
RECORD = Path(__file__).with_name("raises.txt")
CHANGES = Path(__file__).with_name("raises-newer.txt")
"""Rows of the newer vLLM that differ from `RECORD`; 0 for a function that is gone."""

_IN_GRAMMAR = "runs in the front end's validation or in a compiler thread, where it ends one request"
_FRONT_END = "vLLM's front end refuses the value"
_LATE = "`late_interaction_params` is refused"
REACHED: dict[str, str] = {
    "v1/engine/core.py EngineCore.add_request": "`pooling_params.task` is checked in PipedEngineCore.preprocess_attempt",
    "v1/pool/late_interaction_runner.py LateInteractionRunner.postprocess_pooler_output": _LATE,
    "v1/pool/late_interaction_runner.py LateInteractionRunner._parse_late_interaction_meta": _LATE,
    "v1/request.py Request.__init__": "the front end sets `max_tokens`, and one of both kinds of parameters",
    "v1/sample/ops/bad_words.py _apply_bad_words_single_batch": "two slices of the same length",
    "v1/structured_output/backend_lm_format_enforcer.py LMFormatEnforcerBackend.compile_grammar": _IN_GRAMMAR,
    "v1/structured_output/backend_outlines.py OutlinesBackend.compile_grammar": _IN_GRAMMAR,
    "v1/structured_output/backend_xgrammar.py XgrammarBackend.compile_grammar": _IN_GRAMMAR,
    "v1/structured_output/request.py get_structured_output_key": _IN_GRAMMAR,
    "v1/worker/gpu/mm/encoder_runner.py EncoderRunner.gather_mm_embeddings": "the scheduler computes the media first",
    "v1/worker/gpu/model_states/prompt_embeds.py PromptEmbedsState.apply": _FRONT_END,
    "v1/worker/gpu/sample/bad_words.py BadWordsState.add_request": "`bad_words` is limited",
    "v1/worker/gpu/sample/logit_bias.py LogitBiasState.add_request": (
        "`allowed_token_ids`, `logit_bias` and `stop_token_ids` are limited"
    ),
    "v1/worker/gpu/sample/logprob.py LogprobTokenIdsState.add_request": _FRONT_END,
    "v1/worker/gpu/sample/prompt_logprob.py PromptLogprobsWorker.compute_prompt_logprobs": "`prompt_logprobs` of a begun prompt",
    "v1/worker/gpu/states.py RequestState.add_request": "the scheduler runs at most max_num_seqs requests",
    "v1/worker/gpu_input_batch.py InputBatch.add_request": "the front end sets one of both kinds of parameters",
}
"""Functions with a statement that values of a request can reach, and what prevents that the statement ends the engine."""


def counts() -> Counter[str]:
    """Return ``file function`` -> number of statements, in the installed vLLM."""
    root = Path(vllm.__path__[0])
    found: Counter[str] = Counter()
    for path in sorted(path for pattern in PATTERNS for path in root.glob(pattern)):
        for function in _functions(ast.parse(path.read_text()), ""):
            found[f"{path.relative_to(root)} {function}".rstrip()] += 1
    return found


def _functions(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the qualified name of the function around each statement, "" for the module itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.Assert):
            yield name
        inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _functions(child, f"{name}.{child.name}".lstrip(".") if inner else name)  # type: ignore[attr-defined]


def recorded() -> Counter[str]:
    found = _rows(RECORD)
    if IS_NEWER:
        found.update(_rows(CHANGES))
    return Counter({name: count for name, count in found.items() if count})


def _rows(file: Path) -> dict[str, int]:
    rows = (line.split(" ", 1) for line in file.read_text().splitlines())
    return {name: int(count) for count, name in rows}


def _write() -> None:
    now, older = counts(), _rows(RECORD) if IS_NEWER else {}
    changed = {name: now[name] for name in sorted(now.keys() | older.keys()) if now[name] != older.get(name, 0)}
    (CHANGES if IS_NEWER else RECORD).write_text("".join(f"{count} {name}\n" for name, count in changed.items()))


if __name__ == "__main__":
    _write()

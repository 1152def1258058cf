"""This module says why the front end of a model did not start, above all when the model's processor of media failed.

vLLM runs the processor on an example while it builds its front end. Its errors name neither the model nor a key of our configuration, and
some hide the error that they were raised from.
"""

import traceback
from collections.abc import Sequence

from serve_app.errors import FrontEndStartFailed
from serve_app.host.foreign_errors import IN_CUDA_IMAGE, in_one_line, packages_lacking_by

_MAX_CAUSE = 400
"""Characters: Transformers lists all the model types that it knows."""
_FILES = "processor_config.json, preprocessor_config.json and what they name must be complete in the checkpoint"
_OWN_CODE = "code of the checkpoint's own needs engine_args.trust_remote_code: true"
_TEXT_ALONE = "engine_args.language_model_only: true serves text alone"


def start_failure(model: str, exc: BaseException) -> FrontEndStartFailed:
    """Return the failure of the model's front end that ``exc`` ended: what failed, the first cause, and what to do about it."""
    lacking = packages_lacking_by(exc)
    if not _is_from_processor(exc):
        return FrontEndStartFailed(model, in_one_line(exc), f"{_packages(lacking)}: {way_to_get(lacking)}" if lacking else "")
    cause = in_one_line(_first_cause(exc))
    shown = cause if len(cause) <= _MAX_CAUSE else f"{cause[:_MAX_CAUSE]}..."
    reason = f"its processor of images, sound or video failed: {shown}"
    if lacking:
        return FrontEndStartFailed(model, reason, f"{_packages(lacking)}: {way_to_get(lacking)}. {_TEXT_ALONE}")
    own_code = f"; {_OWN_CODE}" if "trust_remote_code" in str(exc) else ""
    return FrontEndStartFailed(model, reason, f"{_FILES}{own_code}; {_TEXT_ALONE}")


def way_to_get(packages: Sequence[str]) -> str:
    """Return what an operator does about Python packages that an ingress lacks."""
    return "run the CUDA image in all pods" if IN_CUDA_IMAGE.intersection(packages) else "install it"


def _packages(lacking: Sequence[str]) -> str:
    return f"this Python lacks {' and '.join(lacking)}"


def _is_from_processor(exc: BaseException) -> bool:
    """Return whether the error was raised in vLLM's processing of media."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(exc.__traceback__))
    return any(name.startswith("vllm.multimodal.") for name in names)


def _first_cause(exc: BaseException) -> BaseException:
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return exc

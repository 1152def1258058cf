"""This module reads other libraries' exceptions: their text in one line, and the packages that an import has not found.

Most are vLLM's, whose configuration is checked by pydantic.
"""

import re

from pydantic import ValidationError

IN_CUDA_IMAGE = frozenset({"torchvision", "torchaudio", "torchcodec"})
"""Packages that the CUDA image has and the CPU image lacks."""
_LACKING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'|requires the (\w+) library")
"""Python's words, and Transformers'."""
_VALIDATORS_WORD = "Value error, "


def in_one_line(exc: BaseException) -> str:
    """Return the text of ``exc`` without line breaks: only the sentences of pydantic's errors, and the type and text of other errors.

    Values are left out of pydantic's errors, because they may be whole configurations, and so are links to pydantic's documentation.
    """
    if isinstance(exc, ValidationError):
        details = exc.errors(include_url=False, include_context=False, include_input=False)
        said = "; ".join(_sentence(".".join(map(str, d["loc"])), d["msg"].removeprefix(_VALIDATORS_WORD)) for d in details)
    else:
        # The text of a KeyError is its argument in quotes.
        said = f"{type(exc).__name__}: {exc.args[0] if isinstance(exc, KeyError) and exc.args else exc}"
    return " ".join(said.split())


def lacking_packages(said: str) -> list[str]:
    """Return the packages that an import has not found, by its error's type and text, or by a log with such errors."""
    return list(dict.fromkeys(module or library.lower() for module, library in _LACKING.findall(said)))


def packages_lacking_by(exc: BaseException | None) -> list[str]:
    """Return the packages that an import has not found, by the first ImportError that says so among ``exc`` and its causes."""
    while exc is not None:
        if isinstance(exc, ImportError) and (found := lacking_packages(f"{type(exc).__name__}: {exc}")):
            return found
        exc = exc.__cause__ or exc.__context__
    return []


def _sentence(key: str, said: str) -> str:
    return f"{key}: {said}" if key else said

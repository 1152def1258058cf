"""`in_one_line` shortens another library's exception. Most are vLLM's, whose configuration is checked by pydantic."""

from pydantic import ValidationError

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


def _sentence(key: str, said: str) -> str:
    return f"{key}: {said}" if key else said

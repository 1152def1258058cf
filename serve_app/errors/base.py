"""`ServingError` is the root of the error tree."""

import copyreg
from typing import Any, ClassVar


class ServingError(Exception):
    """The base of all errors that this package raises on purpose."""

    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "serving_error"
    retry_after_s: float | None = None
    """Seconds after which the same request may succeed, for the header Retry-After. None: no such promise."""

    def __str__(self) -> str:
        return self.code

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception pickles `args`, which lacks values that were passed by keyword: the copy could not be built.
        return copyreg.__newobj__, (type(self),), dict(vars(self))  # type: ignore[attr-defined]

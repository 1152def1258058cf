"""One HTTP request's verdict. vLLM returns its streaming response before it asks the engine, so a refusal would come after a 200.

The outer app puts one ``Admission`` per HTTP request into a context variable, ``HeldAnswer`` holds the status line back
until the first byte of the body; the fleet client writes an error here when it ends a request before that.
"""

from contextvars import ContextVar

from serve_app.errors import ServingError


class Admission:
    """All engine requests of one HTTP request (prompt lists, n>1, steps of a beam search) share it."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: ServingError | None = None


current: ContextVar[Admission | None] = ContextVar("admission", default=None)

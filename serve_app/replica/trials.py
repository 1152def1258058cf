"""`Trials` is the line of suspects: over all links of a replica, one suspect at a time is in the engine, until it has had a new token.

No IO of its own. A crash says something of one suspect only if no other suspect is in the engine. An attempt that is aborted during its
trial may still be in a step that ends the engine. So it keeps its place until the engine answers a question that was sent after the abort.
"""

from collections.abc import Callable, Container, Iterable
from typing import Generic, TypeVar

from serve_app.links.protocol.messages import AddSuspect

L = TypeVar("L")

_ASKED = ""
"""Stands for an aborted attempt on trial while the engine's answer is awaited. No attempt has this id."""


class Trials(Generic[L]):
    """Suspects in the order of their arrival, each with its link.

    Args:
        begin: Reports to the link that this suspect begins, and gives it to the engine.
        ask: Asks the engine a question; ``answered`` is called at the answer.
    """

    def __init__(self, begin: Callable[[L, AddSuspect], None], ask: Callable[[], None]) -> None:
        self._begin = begin
        self._ask = ask
        self._line: dict[str, tuple[L, AddSuspect]] = {}
        self._on_trial: str | None = None

    def add(self, link: L, suspect: AddSuspect) -> None:
        self._line[suspect.attempt_id] = (link, suspect)
        self._begin_next()

    def let_go(self, attempt_ids: Container[str]) -> None:
        """Let attempts pass that have had a new token or ended in the engine: the engine survived them."""
        if self._on_trial is not None and self._on_trial in attempt_ids:
            self._on_trial = None
            self._begin_next()

    def withdraw(self, attempt_ids: Iterable[str]) -> None:
        """Remove attempts that were aborted; their abort has been sent to the engine."""
        for attempt_id in attempt_ids:
            self._line.pop(attempt_id, None)
            if attempt_id == self._on_trial:
                self._on_trial = _ASKED
                self._ask()

    def answered(self) -> None:
        """End the trial of an aborted attempt: the engine has processed all messages before the question."""
        self._on_trial = None
        self._begin_next()

    def _begin_next(self) -> None:
        if self._on_trial is None and self._line:
            self._on_trial = next(iter(self._line))
            self._begin(*self._line.pop(self._on_trial))

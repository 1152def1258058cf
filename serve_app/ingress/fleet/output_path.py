"""An output path brings the outputs of engines to vLLM's front end.

`OutputPath` gives vLLM every output unchanged. `shortcuts.streaming` has another path, which writes the middle of a stream itself.
"""

from collections.abc import Callable, Sequence
from typing import Any


class OutputPath:
    """The path of one model.

    Args:
        give: Gives a frame (vLLM's ``EngineCoreOutputs``) to vLLM, after all earlier frames.
        output_processor: vLLM's output processor, which has the state of each request.
    """

    def __init__(self, give: Callable[[Any], None], output_processor: Any) -> None:
        self._give = give
        self._processor = output_processor

    def prepare(self, request: Any) -> None:
        """Prepare vLLM's state of a new ``EngineCoreRequest``, before its first output."""

    def arrived(self, request_id: str) -> None:
        """Note that the fleet has accepted the request, which is an engine request of the current HTTP request."""

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""

    def take(self, outputs: Sequence[Any], now: float) -> list[Any]:
        """Take the outputs of a frame, and return the outputs that vLLM gets.

        Args:
            outputs: vLLM's ``EngineCoreOutput``.
            now: Monotonic time of the frame, in seconds.
        """
        return list(outputs)

    def write(self) -> None:
        """Write the outputs that vLLM did not get, now or soon."""

    def write_all(self) -> None:
        """Write the waiting outputs of all streams now."""

    def write_now(self, request_id: str) -> None:
        """Write the waiting outputs of this request now, because it has failed."""

    def take_stats(self) -> Any:
        """Return vLLM's ``IterationStats`` of the tokens since the last call that vLLM did not get; None if there are none."""
        return None

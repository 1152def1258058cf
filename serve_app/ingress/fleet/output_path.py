"""An output path brings the outputs of engines to vLLM's front end.

`OutputPath` gives vLLM every output as it came. `shortcuts.streaming` has another, which writes the middle of a stream itself.
"""

from collections.abc import Callable, Sequence
from typing import Any


class OutputPath:
    """The path of one model.

    Args:
        give: Gives a frame (vLLM's ``EngineCoreOutputs``) to vLLM, after those that it was given before.
        output_processor: vLLM's, which has the state of each request.
    """

    def __init__(self, give: Callable[[Any], None], output_processor: Any) -> None:
        self._give = give
        self._processor = output_processor

    def prepare(self, request: Any) -> None:
        """Prepare vLLM's state of a new ``EngineCoreRequest``, before its first output."""

    def arrived(self, request_id: str) -> None:
        """Note that the fleet has the request, an engine request of the present HTTP request."""

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""

    def take(self, outputs: Sequence[Any], now: float) -> list[Any]:
        """Return those of a frame's outputs that vLLM gets.

        Args:
            outputs: vLLM's ``EngineCoreOutput``.
            now: Monotonic time of the frame, in seconds.
        """
        return list(outputs)

    def write(self) -> None:
        """Write what was taken, now or soon."""

    def write_all(self) -> None:
        """Write now what was taken, of all streams."""

    def write_now(self, request_id: str) -> None:
        """Write now what was taken of this request, which has failed."""

    def take_stats(self) -> Any:
        """Return vLLM's ``IterationStats`` of the tokens that vLLM did not get since the last call; None where there are none."""
        return None

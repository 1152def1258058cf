"""`Tally` counts for the autoscaler what one ingress sees of one model. Pure; `FleetState` counts."""

from dataclasses import dataclass
from typing import Any

from serve_app.core.events import RequestArrived
from serve_app.core.request import RequestState


@dataclass(slots=True)
class Tally:
    """What one ingress has seen of one model since its start; ``FleetState`` counts. Tokens and requests.

    Lines of batches (background requests) have counters of their own, because they have a deadline in place of an SLO. Only in
    ``output_tokens``, ``prefilled_tokens`` and ``cached_tokens``, which tell what engine steps cost, they count like all others.
    """

    requests: int = 0
    """Engine requests that arrived, refused ones included: demand does not shrink because it is turned away."""
    prompt_tokens: int = 0
    """Of those requests."""
    rejected: int = 0
    """Of ``requests``, how many were refused because the queue was full or no replica came in time."""
    prefilled_tokens: int = 0
    """Prompt tokens that engines computed for requests whose first output has come: without those of ``cached_tokens``."""
    cached_tokens: int = 0
    """Prompt tokens of those requests that an engine had in its prefix cache: they were no work."""
    output_tokens: int = 0
    finished: int = 0
    """Requests whose answer ended, by itself or because its client left in its midst."""
    finished_tokens: int = 0
    """Output tokens of those."""
    finished_tokens_squared: int = 0
    """Sum of the squares of their output tokens: it tells how much the lengths of answers differ."""
    first_tokens: int = 0
    late_first_tokens: int = 0
    """First tokens that came later after the arrival than the SLO allows."""
    lines: int = 0
    """Lines of batches whose prompts engines have read."""
    line_prompt_tokens: int = 0
    """Tokens of these prompts that engines computed: the prefix cache had the others."""
    line_output_tokens: int = 0
    lines_finished: int = 0
    line_finished_tokens: int = 0
    """Output tokens of the lines that have ended."""

    def arrival(self, event: RequestArrived) -> None:
        """Count a request that is not held back."""
        if not event.background:
            self.requests += 1
            self.prompt_tokens += event.prompt_tokens

    def output(self, request: RequestState, num_tokens: int) -> None:
        """Count output tokens of a request."""
        self.output_tokens += num_tokens
        if request.background:
            self.line_output_tokens += num_tokens

    def first_token(self, request: RequestState, output: Any, *, late: bool) -> None:
        """Count the first token of a request. ``output``: the ``EngineOutput`` that has it, which also tells of cached tokens."""
        stats = output.prefill_stats
        cached = 0 if stats is None else min(request.prompt_tokens, stats.num_cached_tokens)
        self.cached_tokens += cached
        self._prefilled(request, request.prompt_tokens - cached)
        if not request.background:
            self.first_tokens += 1
            self.late_first_tokens += late

    def answer(self, request: RequestState) -> None:
        """Count an answer that has ended."""
        if request.background:
            self.lines_finished += 1
            self.line_finished_tokens += len(request.emitted_ids)
        else:
            self.finished += 1
            self.finished_tokens += len(request.emitted_ids)
            self.finished_tokens_squared += len(request.emitted_ids) ** 2
        if not request.emitted_ids:  # pooling: its one output is its first
            self._prefilled(request, request.prompt_tokens)

    def _prefilled(self, request: RequestState, num_tokens: int) -> None:
        self.prefilled_tokens += num_tokens
        if request.background:
            self.lines += 1
            self.line_prompt_tokens += num_tokens

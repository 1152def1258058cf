"""`Tally` counts for the autoscaler what one ingress sees of one model. Pure; `FleetState` counts."""

from dataclasses import dataclass
from typing import Any

from serve_app.core.apart import Apart
from serve_app.core.events import RequestArrived
from serve_app.core.fair_tags import priority_of_tag
from serve_app.core.request import RequestState


@dataclass(slots=True)
class Tally:
    """Counters of one ingress for one model since the ingress started: tokens and requests. ``FleetState`` counts.

    Lines of batches (background requests) have counters of their own, because they have a deadline in place of an SLO. Only in
    ``output_tokens``, ``prefilled_tokens`` and ``cached_tokens``, from which the cost of engine steps is learnt, they count like others.
    """

    requests: int = 0
    """Engine requests that arrived, refused ones included: demand does not shrink because it is turned away."""
    prompt_tokens: int = 0
    """Prompt tokens of ``requests``."""
    rejected: int = 0
    """How many of ``requests`` were refused because the queue was full or no replica came in time."""
    prefilled_tokens: int = 0
    """Prompt tokens that engines computed for requests whose first output has come, without ``cached_tokens``."""
    cached_tokens: int = 0
    """Prompt tokens of the same requests that an engine had in its prefix cache: they were no work."""
    long_prompts: int = 0
    """Of the requests of ``prefilled_tokens``, those whose tokens the pool for long prompts should compute; 0 without pools."""
    long_prompt_tokens: int = 0
    """Tokens of ``prefilled_tokens`` of these requests."""
    output_tokens: int = 0
    finished: int = 0
    """Requests whose answer ended, by itself or because its client left before the end."""
    finished_tokens: int = 0
    """Output tokens of ``finished``."""
    finished_tokens_squared: int = 0
    """Sum over ``finished`` of the squared number of output tokens: the variance of the lengths follows from it."""
    first_tokens: int = 0
    """Of interactive requests."""
    late_first_tokens: int = 0
    """First tokens of interactive requests that came later after their arrival than the SLO allows."""
    lines: int = 0
    """Lines of batches whose prompts engines have read."""
    line_prompt_tokens: int = 0
    """Tokens of these prompts that engines computed; the prefix cache had the others."""
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

    def first_token(self, request: RequestState, output: Any, *, late: bool, apart: Apart | None = None) -> None:
        """Count the first token of a request.

        Args:
            output: The ``EngineOutput`` with it, which also has the number of cached tokens.
            apart: Says whether the computed tokens are the work of a pool of its own.
        """
        stats = output.prefill_stats
        cached = 0 if stats is None else min(request.prompt_tokens, stats.num_cached_tokens)
        self.cached_tokens += cached
        self._prefilled(request, computed := request.prompt_tokens - cached)
        if apart is not None and apart.is_of_pool(computed):
            self.long_prompts += 1
            self.long_prompt_tokens += computed
        if not request.background and priority_of_tag(request.priority) == "interactive":  # others may wait
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

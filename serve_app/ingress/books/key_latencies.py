"""Key latencies are histograms of TTFT, TPOT and E2E for each API key, for as many keys as ``ingress.key_latencies`` allows.

A key has some 30 samples for each model that it asks. Lines of batches are left out, because they wait for free places on purpose.
"""

from serve_app.books import series
from serve_app.ingress.books.shown_names import ShownNames
from serve_app.ingress.exchange.exchange import Exchange

_ttft = series.histogram("key_ttft_seconds", (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0))
_tpot = series.histogram("key_tpot_seconds", (0.01, 0.025, 0.05, 0.1, 0.2, 0.5))
_e2e = series.histogram("key_e2e_seconds", (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0))


class KeyLatencies:
    """The series of all keys. The first ``max_keys`` keys that come get series of their own; the others share one. 0: no series."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys, self._names = max_keys, ShownNames(max_keys)

    def note(self, exchange: Exchange, key: str, outcome: str) -> None:
        """Observe a request with this key that has ended. A request without a token has no latencies."""
        first = exchange.requests.first
        if self._max_keys == 0 or exchange.background or first is None or (first_at := first.trail.first_token_at) is None:
            return
        labels = (self._names.shown(key), exchange.model)
        _ttft.labels(*labels).observe(first_at - first.arrived_at)
        if outcome != "complete":
            return
        _e2e.labels(*labels).observe(exchange.ended_at - first.arrived_at)
        if (num_tokens := len(first.emitted_ids)) > 1:
            _tpot.labels(*labels).observe((first.trail.last_token_at - first_at) / (num_tokens - 1))

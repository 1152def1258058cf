"""The window holds a run's requests as arrays of due times, outcomes and latencies, as `loadtest.judge.metrics` defines them per row."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from loadtest.judge.columns import Bools, Ints, count_states
from loadtest.judge.gaps import Gaps, Pieces, Sorted, Weights, weighed
from loadtest.judge.metrics import WITHIN, Records
from loadtest.judge.series import InMemory, Series
from loadtest.judge.stats import QUANTILES, Floats
from loadtest.plan.slo import Limit
from loadtest.quantiles import rank


@dataclass(frozen=True)
class Bounds:
    """One metric of a window. ``has`` marks the requests that have the metric; the other arrays are theirs, in due order."""

    has: Bools
    low: Floats
    high: Floats
    left: Bools
    """Whether the load generator cancelled the request before the metric was known: it took at least ``low``, and did not fail."""


def last_positions(ids: Ints, wanted: Ints) -> Ints:
    """Return the last position of each wanted id in ``ids``; -1 if it is not there."""
    if not ids.size:
        return np.full(wanted.size, -1)
    order = np.argsort(ids, kind="stable")
    at = np.searchsorted(ids[order], wanted, side="right") - 1
    found: Ints = np.where((at >= 0) & (ids[order[at]] == wanted), order[at], -1)
    return found


@dataclass(frozen=True)
class Window:
    """Some of a run's requests, in the order of their due times."""

    records: Records
    request: Ints
    """Positions in ``records.requests``."""
    row: Ints
    """Positions in ``records.columns``; -1 if there is no row."""
    due_s: Floats

    @classmethod
    def of(cls, records: Records) -> "Window":
        """Return all requests that have a due time; in a closed loop, the requests for which a client became free."""
        requests, rows = records.requests, records.columns
        row = last_positions(rows.id, requests.id)
        due_s = requests.due_s.copy()
        closed = np.isnan(due_s) & (row >= 0)
        due_s[closed] = rows.due_s[row[closed]]
        index = np.argsort(due_s, kind="stable")
        index = index[~np.isnan(due_s[index])]
        return cls(records, index, row[index], due_s[index])

    def between(self, low_s: float, high_s: float) -> "Window":
        """Return the requests due in [low_s, high_s)."""
        first, end = np.searchsorted(self.due_s, [low_s, high_s], side="left").tolist()
        return Window(self.records, self.request[first:end], self.row[first:end], self.due_s[first:end])

    def where(self, mask: Bools) -> "Window":
        """Return the requests that the mask selects."""
        return Window(self.records, self.request[mask], self.row[mask], self.due_s[mask])

    def __len__(self) -> int:
        return self.due_s.size

    @property
    def ids(self) -> Ints:
        return self.records.requests.id[self.request]

    @cached_property
    def rows(self) -> Ints:
        """Return the positions of the existing rows."""
        return self.row[self.row >= 0]

    @property
    def states(self) -> dict[str, int]:
        """Return the number of requests by final state; ``unaccounted`` requests have no row."""
        counts = count_states(self.records.columns, self.rows)
        missing = len(self) - self.rows.size
        return dict(counts + Counter({"unaccounted": missing}) if missing else counts)

    @cached_property
    def has_gaps(self) -> Bools:
        """Return which requests are streams of several tokens."""
        requests = self.records.requests
        streams = np.array([self.records.streams.get(name, True) for name in requests.classes], dtype=bool)
        stream = streams[requests.cls[self.request]] if streams.size else np.zeros(len(self), dtype=bool)
        found: Bools = stream & (requests.output_tokens[self.request] > 1)
        return found

    def bounds(self, metric: str) -> Bounds:
        """As `loadtest.judge.metrics.bounds_s`, for each request; not for ``itl``, of which a request has many values."""
        rows, there = self.records.columns, self.row >= 0
        low, high = np.full(len(self), np.inf), np.full(len(self), np.inf)
        has = self.has_gaps.copy() if metric in WITHIN else np.ones(len(self), dtype=bool)
        left = np.zeros(len(self), dtype=bool)
        at = np.flatnonzero(there)
        at = at[rows.is_sent[self.row[at]]]
        index = self.row[at]
        sent, due = rows.sent_s[index], rows.due_s[index]
        begin = sent if self.records.closed or metric.startswith("send_") else due
        if metric == "lag":
            low[at] = high[at] = sent - due
        else:
            value = self._measured(metric, index, begin)
            ok, cancelled, timeout = (rows.is_state(state)[index] for state in ("ok", "cancelled", "timeout"))
            low[at[ok]] = high[at[ok]] = value[ok]
            has[at[ok & np.isnan(value)]] = False
            if metric.endswith("ttft"):
                first, end = rows.first_s[index], np.where(np.isnan(rows.end_s[index]), begin, rows.end_s[index])
                known = cancelled & ~np.isnan(first)
                low[at[cancelled]] = (end - begin)[cancelled]
                low[at[known]] = high[at[known]] = (first - begin)[known]
                left[at[cancelled & ~known]] = True
            else:
                has[at[cancelled]] = False
            if metric not in WITHIN:
                watched = timeout & ~np.isnan(rows.end_s[index])
                low[at[watched]] = (rows.end_s[index] - begin)[watched]
        low, high = np.round(low[has], 9), np.round(high[has], 9)
        return Bounds(has, low, high, left[has])

    def _measured(self, metric: str, index: Ints, begin: Floats) -> Floats:
        """Return the metric of rows that are ok; NaN if a row does not have it."""
        rows = self.records.columns
        if metric.endswith("ttft"):
            return np.asarray(rows.seen_s[index] - begin)
        if metric.endswith("e2e"):
            return np.asarray(rows.end_s[index] - begin)
        if metric == "max_itl":
            return np.where(rows.num_gaps[index] > 0, rows.max_gap_us[index] / 1e6, np.nan)
        later = rows.num_output_tokens[index] - 1
        spans = rows.last_s[index] - rows.first_s[index]
        return np.where(later > 0, spans / np.maximum(later, 1), np.nan)

    @cached_property
    def gaps(self) -> Gaps:
        """Return all gaps between tokens. A failed request has an infinite gap for each token that it did not deliver, at least one."""
        limits = [limit for limit in self.records.scenario.slo.limits if limit.metric == "itl"]
        quantiles = sorted({*QUANTILES, *(limit.quantile for limit in limits)})
        return Gaps(self._pieces(), quantiles, [limit.limit_s for limit in limits])

    def sorted_gaps(self) -> Sorted:
        """Return the gaps of `gaps` in rising order, which takes one pass over the rows; `gaps` takes two."""
        return Sorted.of(self._pieces()())

    def _pieces(self) -> Pieces:
        """Return a function that reads the gaps. It must not refer to the window, which refers to it by `gaps`.

        Such a cycle would keep all records in memory until the garbage collector runs.
        """
        chunks, weights = self.records.chunks, self._weights
        return lambda: weighed(chunks(), weights)

    @cached_property
    def _weights(self) -> Weights:
        rows, seen = self.records.columns, np.zeros(len(self), dtype=np.int64)
        there = self.row >= 0
        seen[there] = rows.num_gaps[self.row[there]]
        complete = np.zeros(len(self), dtype=bool)
        complete[there] = rows.is_state("ok", "cancelled")[self.row[there]]
        owed = np.where(self.has_gaps & ~complete, np.maximum(1, self._owed_tokens - 1 - seen), 0)
        weights = Weights(np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows) + 1, np.int64))
        weights.counted[self.row[there & self.has_gaps]] = True
        weights.owed[self.row[there]] = owed[there]
        np.add.at(weights.before, np.searchsorted(rows.due_s, self.due_s[~there]), owed[~there])
        return weights

    @property
    def _owed_tokens(self) -> Ints:
        """As `loadtest.judge.metrics.Records.owed_tokens`."""
        requests = self.records.requests
        owed = requests.output_tokens[self.request].copy()
        for number, name in enumerate(requests.classes):
            mean = self.records.mean_tokens.get(name)
            if mean is not None:
                which = requests.cls[self.request] == number
                owed[which] = np.minimum(owed[which], mean)
        return owed

    def series(self, metric: str) -> Series:
        """Return the latencies of all requests that have the metric, or of all gaps."""
        if metric == "itl":
            return self.gaps
        bounds = self.bounds(metric)
        return InMemory(bounds.low, bounds.high, left=bounds.left)

    def share_inside(self, limit: Limit) -> float:
        """Return the share of the requests (itl: of the recorded gaps) that are known to be inside the limit; 1 if there are none."""
        if limit.metric == "itl":
            rows, index = self.records.columns, self.row[self.has_gaps & (self.row >= 0)]
            num, num_inside = rows.num_gaps[index].sum(), rows.gaps_within[limit.limit_s][index].sum()
        else:
            high = self.bounds(limit.metric).high
            num, num_inside = high.size, (high <= limit.limit_s).sum()
        return float(num_inside / num) if num else 1.0

    def good(self, limits: Sequence[Limit]) -> Bools:
        """As `loadtest.judge.metrics.is_good`, for each request."""
        rows, there = self.records.columns, self.row >= 0
        good = np.zeros(len(self), dtype=bool)
        good[there] = rows.is_state("ok")[self.row[there]]
        for limit in limits:
            if limit.metric == "itl":
                good[there] &= self._keeps_itl(limit)[there]
            else:
                bounds = self.bounds(limit.metric)
                good[bounds.has] &= bounds.high <= limit.limit_s
        return good

    def _keeps_itl(self, limit: Limit) -> Bools:
        """Return which requests keep the limit: the limit's quantile of their own gaps is inside, or they have no gaps."""
        rows = self.records.columns
        num = rows.num_gaps[self.row]
        ranks = np.array([rank(n, limit.quantile) for n in range(int(num.max(initial=0)) + 1)])
        kept: Bools = (num == 0) | ~self.has_gaps | (rows.gaps_within[limit.limit_s][self.row] >= ranks[num])
        return kept

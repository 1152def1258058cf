"""One HTTP request adds to the series at its end, and the event loop's lag is measured."""

import asyncio
import time
from typing import Any

from prometheus_client import REGISTRY

from serve_app.books.series import TABLE
from serve_app.core.fair_tags import FIRST_TAG
from serve_app.core.request import RequestState, Resume
from serve_app.core.tenants import Priority, Tenant
from serve_app.ingress.books.key_latencies import KeyLatencies
from serve_app.ingress.books.request_metrics import begin_at_zero, count_request
from serve_app.ingress.books.shown_names import OTHERS, CallerNames, ShownNames
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.outcomes import WORDS, Ending
from serve_app.ingress.http.loop_lag import LATE_LOOKS, PERIOD_S, LoopLag
from tests.ingress.tenants import caller

NAMES = CallerNames(ShownNames(9))


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"serve_app_{name}", labels)


def exchange_of(model: str, key: str | None = None, *, arrived_at: float = 0.0, started_at: float | None = None) -> Exchange:
    exchange = Exchange("/v1/completions", None if key is None else caller(Tenant("team"), key))
    exchange.model = model
    first = RequestState("r", 5, 5, Resume.CONTINUE)
    exchange.requests.add(first, "answer")
    first.arrived_at = arrived_at
    first.trail.starts = [] if started_at is None else [started_at]
    return exchange


def test_every_outcome_is_there_at_zero_before_the_first_request() -> None:
    begin_at_zero(["quiet"])
    assert [value("requests_total", model="quiet", outcome=word) for word in WORDS] == [0.0] * len(WORDS)
    assert value("request_errors_total", model="quiet", reason="no_replica") == 0.0


def test_a_refused_request_is_counted_by_its_reason_and_its_key() -> None:
    count_request(exchange_of("m1", "abcdef"), Ending("rejected", 503, "queue_full"), KeyLatencies(0), NAMES)
    assert value("requests_total", model="m1", outcome="rejected") == 1.0
    assert value("request_errors_total", model="m1", reason="queue_full") == 1.0
    assert value("key_requests_total", tenant="team", key="abcdef", model="m1", outcome="rejected") == 1.0
    assert value("queue_seconds_count", model="m1") is None


def test_no_more_keys_than_are_allowed_have_series_of_their_own() -> None:
    names, ended = CallerNames(ShownNames(2), max_keys=2), Ending("complete", 200, "")
    for tenant, key in (("a", "1"), ("b", "2"), ("a", "3"), ("b", "4"), ("b", "4"), ("c", "5"), ("a", "1")):
        exchange = Exchange("/v1/completions", caller(Tenant(tenant), key))
        exchange.model = "many"
        count_request(exchange, ended, KeyLatencies(0), names)
    found = [s for metric in REGISTRY.collect() for s in metric.samples if s.name == "serve_app_key_requests_total"]
    counted = {(s.labels["tenant"], s.labels["key"]): s.value for s in found if s.labels["model"] == "many"}
    assert counted == {("a", "1"): 2.0, ("b", "2"): 1.0, ("a", OTHERS): 1.0, ("b", OTHERS): 2.0, (OTHERS, OTHERS): 1.0}


def test_an_answer_is_no_error_and_shows_how_long_it_waited() -> None:
    count_request(exchange_of("m2", arrived_at=10.0, started_at=12.0), Ending("complete", 200, ""), KeyLatencies(0), NAMES)
    count_request(
        exchange_of("m2", arrived_at=10.0, started_at=10.0), Ending("aborted", 200, "client_gone"), KeyLatencies(0), NAMES
    )
    errors = [s for metric in REGISTRY.collect() for s in metric.samples if s.name == "serve_app_request_errors_total"]
    assert [s for s in errors if s.labels["model"] == "m2"] == []
    assert value("queue_seconds_sum", model="m2") == 2.0
    assert [value("queue_seconds_bucket", model="m2", le=le) for le in ("0.001", "1.0", "2.5", "+Inf")] == [1.0, 1.0, 2.0, 2.0]


def test_the_time_to_the_first_token_is_shown_by_the_priority_of_the_request() -> None:
    begin_at_zero(["m6"])
    ended: list[tuple[Priority, float | None]] = [
        ("interactive", 12.0),
        ("batch", 40.0),
        ("background", 90.0),
        ("interactive", None),
    ]
    for priority, first_at in ended:
        exchange = exchange_of("m6", arrived_at=10.0)
        assert exchange.requests.first is not None
        exchange.requests.first.priority = FIRST_TAG[priority] + 7
        exchange.requests.first.trail.first_token_at = first_at
        count_request(exchange, Ending("complete", 200, ""), KeyLatencies(0), NAMES)
    counted = {
        p: (value("ttft_seconds_count", model="m6", priority=p), value("ttft_seconds_sum", model="m6", priority=p))
        for p in FIRST_TAG
    }
    assert counted == {"interactive": (1.0, 2.0), "batch": (1.0, 30.0), "background": (1.0, 80.0)}


def test_the_tasks_of_the_loop_are_counted_when_asked() -> None:
    async def count_tasks() -> None:
        loop = asyncio.get_running_loop()
        others: list[asyncio.Task[Any]] = [loop.create_task(LoopLag(2.0).watch()), loop.create_task(asyncio.Event().wait())]
        await asyncio.sleep(0)
        assert value("tasks") == 3.0
        for task in others:
            task.cancel()

    asyncio.run(count_tasks())


def answered(model: str, *, background: bool = False) -> Exchange:
    """Return a request of the second 10 with 5 tokens, the first at 12 and the last at 14, that ended at 15."""
    exchange = Exchange("/v1/completions", background=background)
    exchange.model = model
    first = RequestState("r", 5, 5, Resume.CONTINUE)
    exchange.requests.add(first, "answer")
    first.arrived_at, first.emitted_ids = 10.0, [1, 2, 3, 4, 5]
    exchange.ended_at = 15.0
    first.trail.first_token_at, first.trail.last_token_at = 12.0, 14.0
    return exchange


def latencies_of(key: str, model: str) -> list[tuple[float | None, float | None]]:
    """Return number and sum of TTFT, TPOT and E2E."""
    names = [f"key_{what}_seconds" for what in ("ttft", "tpot", "e2e")]
    return [(value(f"{name}_count", key=key, model=model), value(f"{name}_sum", key=key, model=model)) for name in names]


def test_latencies_are_shown_by_key_and_an_answer_that_broke_off_has_only_its_first_token() -> None:
    latencies = KeyLatencies(1)
    latencies.note(answered("m3"), "aa", "complete")
    latencies.note(answered("m3"), "aa", "aborted")
    assert latencies_of("aa", "m3") == [(2.0, 4.0), (1.0, 0.5), (1.0, 5.0)]


def test_keys_beyond_the_allowed_number_share_one_name() -> None:
    latencies = KeyLatencies(2)
    for key in ("aa", "bb", "cc", "dd", "aa"):
        latencies.note(answered("m4"), key, "complete")
    assert [latencies_of(key, "m4")[2][0] for key in ("aa", "bb", "cc", "dd", "others")] == [2.0, 1.0, None, None, 2.0]


def test_lines_of_batches_and_a_limit_of_zero_show_no_latencies() -> None:
    KeyLatencies(2).note(answered("m5", background=True), "aa", "complete")
    KeyLatencies(0).note(answered("m5"), "aa", "complete")
    assert latencies_of("aa", "m5") == [(None, None)] * 3


def test_a_loop_that_stands_still_is_late_by_that_long() -> None:
    async def stand_still() -> None:
        watch = asyncio.create_task(LoopLag(2.0).watch())
        await asyncio.sleep(0)  # the watch has begun to wait
        time.sleep(PERIOD_S + 0.3)  # noqa: ASYNC251  # nothing else may run meanwhile
        await asyncio.sleep(0.01)
        watch.cancel()

    def late() -> float:
        found: Any = [value("event_loop_lag_seconds_count"), value("event_loop_lag_seconds_bucket", le="0.25")]
        return float((found[0] or 0.0) - (found[1] or 0.0))

    before = late()
    asyncio.run(stand_still())
    assert late() == before + 1


def test_a_loop_is_overloaded_after_several_late_measurements_until_one_is_within_half_of_the_limit() -> None:
    lag = LoopLag(limit_s=1.0)

    def look(late_s: float) -> bool:
        lag.note(late_s)
        return lag.is_overloaded

    assert [look(late_s) for late_s in (9.0, 0.9, *[1.1] * LATE_LOOKS)] == [False] * (LATE_LOOKS + 1) + [True]
    assert [look(late_s) for late_s in (0.6, 1.1, 0.5, 1.1)] == [True, True, False, False]


def test_names_and_labels_follow_the_conventions_of_prometheus() -> None:
    assert len({series.name for series in TABLE}) == len(TABLE)
    for series in TABLE:
        assert series.text.endswith("."), series.name
        assert not series.name.endswith(("_total", "_ms", "_milliseconds")), series.name
        assert series.kind != "histogram" or series.name.endswith("_seconds"), series.name

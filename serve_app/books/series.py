"""This table lists every Prometheus series of serve-app: its kind, its labels, and its meaning.

The functions below make the collectors, so a series that is not in the table cannot be made. Times are in seconds, sizes in bytes.
Counters are listed without the suffix ``_total`` that Prometheus shows. Every label has few values: models and replicas of one release,
tenants and API keys of one file, and fixed words. docs/monitoring.md shows the table (`python -m tools.monitoring` renews it).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

Kind = Literal["counter", "gauge", "histogram"]


class Series(NamedTuple):
    """One row of the table. ``name`` is without the prefix ``serve_app_``."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str

    @property
    def shown(self) -> str:
        """The name as Prometheus shows it; a histogram's series append ``_bucket``, ``_sum`` and ``_count``."""
        return f"serve_app_{self.name}" + ("_total" if self.kind == "counter" else "")


_MODEL, _REPLICA = ("model",), ("model", "replica")

TABLE = (
    Series("requests", "counter", ("model", "outcome"), "HTTP requests to a route of models by outcome, each request once."),
    Series(
        "request_errors",
        "counter",
        ("model", "reason"),
        "Refused and failed requests by reason: the code of docs/differences.md, or http_STATUS from vLLM.",
    ),
    Series(
        "key_requests",
        "counter",
        ("tenant", "key", "model", "outcome"),
        "HTTP requests by tenant and API key. With ingress.api_keys_file, both labels are the first 12 hex digits of the key's SHA-256. "
        "Beyond the first 1,000 keys of an ingress: `others`.",
    ),
    Series(
        "tenant_tokens",
        "counter",
        ("tenant", "model", "kind"),
        "Tokens by tenant and kind: prompt, cached (the part of prompt that a prefix cache had), output. An ingress names the first 200 "
        "tenants that come; all further ones are `others`.",
    ),
    Series(
        "tenant_gpu_seconds",
        "counter",
        ("tenant", "model"),
        "GPU-seconds by tenant, from the step costs that replicas measured (docs/ledger.md). Tenants are named as above.",
    ),
    Series(
        "tenant_refusals",
        "counter",
        ("tenant", "reason"),
        "Requests that were refused with 429 or 503, by reason: the name of the quota; for those that would start too late, first_token_s "
        "(the tenant's limit) or refuse_after_s (the model's); else the error's code, such as queue_full. Tenants are named as above.",
    ),
    Series(
        "tenant_longest_wait_seconds",
        "gauge",
        ("tenant", "model"),
        "Age of the tenant's oldest request at this ingress without a first token, if the tenant is interactive. A tenant without such a "
        "request has no sample. Tenants are named as above.",
    ),
    Series(
        "tenant_wait_limit_seconds",
        "gauge",
        ("tenant", "model"),
        "How long such requests of the tenant may wait: replicas.refuse_after_s of the model, or the tenant's first_token_s if it is more.",
    ),
    Series(
        "key_ttft_seconds",
        "histogram",
        ("key", "model"),
        "By API key: time to first token of every answer that had one. The three latency series by key need ingress.key_latencies.",
    ),
    Series(
        "key_tpot_seconds",
        "histogram",
        ("key", "model"),
        "By API key: the mean gap between two tokens in the first choice of a whole answer.",
    ),
    Series(
        "key_e2e_seconds",
        "histogram",
        ("key", "model"),
        "By API key: time from the arrival of an HTTP request's first engine request to the end of its whole answer.",
    ),
    Series(
        "ttft_seconds",
        "histogram",
        ("model", "priority"),
        "Time to first token of an HTTP request's first answer, from the arrival of the engine request; counted at the end of the HTTP "
        "request. By priority of the tenant: interactive, batch or background. Lines of batches are background, and without API keys "
        "all else is interactive.",
    ),
    Series(
        "queue_seconds", "histogram", _MODEL, "Wait for a replica, from the arrival of an HTTP request's first engine request."
    ),
    Series(
        "engine_requests",
        "counter",
        ("model", "outcome"),
        "Engine requests by terminal outcome: each choice of n, each prompt of a list and each step of a beam search is one.",
    ),
    Series(
        "tenants_file_in_force",
        "gauge",
        (),
        "0 if the changed tenants file, or a part of it, has a mistake, which the log names; else 1.",
    ),
    Series(
        "oidc_issuer_answers",
        "gauge",
        ("issuer",),
        "Whether the issuer of ingress.oidc gave its keys when asked last; if not, the log says why.",
    ),
    Series("waiting_requests", "gauge", _MODEL, "Requests without a replica."),
    Series(
        "low_priority_waiting",
        "gauge",
        ("model", "at"),
        "Requests of this ingress without a first token whose priority is batch or background, lines of batches included. Alerts subtract "
        "them from the waiting requests. At is ingress for those without a replica, and replica for the others.",
    ),
    Series("outstanding_tokens", "gauge", _MODEL, "Tokens that unfinished requests may still take."),
    Series(
        "quarantined_fingerprints",
        "gauge",
        _MODEL,
        "Kinds of requests that are refused because a request of the kind seems to end engines.",
    ),
    Series("resumptions", "counter", _MODEL, "Times a request that lost its replica was queued again."),
    Series("moved", "counter", _MODEL, "Requests moved away from replicas that drained."),
    Series(
        "hand_overs",
        "counter",
        ("model", "result"),
        "Moves for which a replica was asked to keep the KV, by result: read; computed, the target read nothing; late, it "
        "made no token within 10 s; not_kept, the KV was not whole; no_target, the target took no request any more; unanswered; ended, "
        "the answer ended or a replica was lost.",
    ),
    Series(
        "hand_overs_asked",
        "counter",
        ("model", "cause"),
        "The same moves by cause: drain; prompts, a long prompt began, or its first token came; balance, another replica had less to do; "
        "role, the replica computes prompts (pools).",
    ),
    Series("kv_read_tokens", "counter", _MODEL, "Tokens whose KV was read from another replica instead of computed again."),
    Series("kv_read_bytes", "counter", _MODEL, "Bytes of that KV, in all layers and workers."),
    Series("routed", "counter", ("model", "reason"), "Attempts that were given to a replica, by the reason for that replica."),
    Series(
        "expected_prefix_hit_tokens",
        "counter",
        _MODEL,
        "Prompt tokens of routed attempts that were expected in the replica's prefix cache.",
    ),
    Series(
        "resume_gap_seconds",
        "histogram",
        ("model", "way"),
        "Pause of a request that lost its replica: from when the ingress lost the link, or ejected the silent replica, "
        "to the next new token for the client. By the way of resuming: continue, replay, or restart if no token had been sent. "
        "A move off a draining replica counts, too, from the move on.",
    ),
    Series("gpus", "gauge", _MODEL, "GPUs of the replicas that this ingress has links to; their sum over time is GPU-seconds."),
    Series(
        "replica_bound", "gauge", ("model", "bound"), "replicas.min and replicas.max of the configuration; bound is min or max."
    ),
    Series("cold_start_p90_seconds", "gauge", _MODEL, "Seconds that nine of ten measured starts of a replica did not exceed."),
    Series("replica_held", "gauge", _REPLICA, "Unfinished requests of this ingress on the replica."),
    Series("replica_outstanding_tokens", "gauge", _REPLICA, "Tokens that these requests may still take."),
    Series("replica_running", "gauge", _REPLICA, "Requests in the engine's running batch, of all ingresses."),
    Series("replica_waiting", "gauge", _REPLICA, "Requests in the engine's waiting queue, of all ingresses."),
    Series("replica_kv_usage", "gauge", _REPLICA, "Used share of the KV cache blocks, 0..1."),
    Series("replica_draining", "gauge", _REPLICA, "1 while the replica drains and takes no new requests."),
    Series("replica_steps", "counter", _REPLICA, "Steps (forward passes) of the replica's engine."),
    Series(
        "links_lost",
        "counter",
        ("model", "reason"),
        "Links to replicas that ended; unresponsive: the silent replica was ejected.",
    ),
    Series(
        "engines_lost",
        "counter",
        ("model", "reason"),
        "Engines that a replica has lost, by reason; each linked ingress counts all of them.",
    ),
    Series("canary_requests", "counter", ("model", "of"), "Requests for the model `of` that its canary answered."),
    Series("canary_state", "gauge", ("model", "of", "state"), "1 for the canary's present state."),
    Series("event_loop_lag_seconds", "histogram", (), "Delay with which the ingress's event loop woke a task."),
    Series(
        "stalled_clients",
        "counter",
        (),
        "Connections dropped because the client read nothing of its answer for ingress.stalled_client_s.",
    ),
    Series(
        "crowded_connections",
        "counter",
        (),
        "Connections made while nearly no file descriptors were left: probes are answered, requests refused.",
    ),
    Series(
        "traced_requests",
        "counter",
        ("kept",),
        "Requests by the reason for keeping their trace: error, resumed, slow, caller, share; or no. Only with tracing.",
    ),
    Series(
        "spans",
        "counter",
        ("outcome",),
        "Spans by outcome: exported; failed, because the collector did not take them; dropped, because too many waited for it.",
    ),
    Series("ledger_lost", "counter", (), "Lines of the ledger that could not be written."),
    Series(
        "free_disk_bytes",
        "gauge",
        (),
        "Free bytes on the disk of the temporary folder, where Ray keeps its logs and vLLM its sockets.",
    ),
    Series(
        "free_threads",
        "gauge",
        (),
        "Threads and processes that may still be started where the ingress runs, by the limits of its cgroups (pids.max).",
    ),
    Series(
        "tasks",
        "gauge",
        (),
        "Tasks of the ingress's event loop: some for the ingress and its links, and some for each open request.",
    ),
    Series(
        "clock_steps_seconds",
        "gauge",
        (),
        "Seconds by which the machine's time of day was set since the ingress started; times in logs and ledgers are off by as much.",
    ),
    Series(
        "batches",
        "gauge",
        ("status",),
        "Stored batches by status. The ingress that runs them reports it; with shared storage each ingress does.",
    ),
    Series("batch_lines", "counter", ("outcome",), "Lines of batches by outcome."),
    Series(
        "batch_free_bytes",
        "gauge",
        (),
        "Free bytes on the disk of ingress.batch.dir or of the scratch folder; 0 without batches.",
    ),
)

_BY_NAME = {series.name: series for series in TABLE}

WAIT_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper ends of buckets for waits: zero in an idle fleet, and as long as a cold start in a fleet that scales from zero."""

TTFT_BOUNDS_S = (0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
"""Upper ends of buckets for the time to first token. vLLM's histogram has them too, so that both show equal quantiles."""

LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper ends of buckets for the event loop's delay, which every token of every stream waits."""


def row(name: str, kind: Kind) -> Series:
    """Return the row of this name.

    Raises:
        KeyError: The table has no row of this name and kind.
    """
    found = _BY_NAME[name]
    if found.kind != kind:
        raise KeyError(f"{name} is a {found.kind}, not a {kind}")
    return found


def counter(name: str) -> Counter:
    """Make the counter, once in a process."""
    found = row(name, "counter")
    return Counter(f"serve_app_{name}", found.text, found.labels)


def gauge(name: str) -> Gauge:
    """Make the gauge, once in a process."""
    found = row(name, "gauge")
    return Gauge(f"serve_app_{name}", found.text, found.labels)


def histogram(name: str, bounds: Sequence[float]) -> Histogram:
    """Make the histogram, once in a process. ``bounds``: upper ends of buckets, rising, without infinity."""
    found = row(name, "histogram")
    return Histogram(f"serve_app_{name}", found.text, found.labels, buckets=bounds)


def counter_family(name: str) -> CounterMetricFamily:
    """Return the counter for one scrape, without samples."""
    found = row(name, "counter")
    return CounterMetricFamily(f"serve_app_{name}", found.text, labels=found.labels)


def gauge_family(name: str) -> GaugeMetricFamily:
    """Return the gauge for one scrape, without samples."""
    found = row(name, "gauge")
    return GaugeMetricFamily(f"serve_app_{name}", found.text, labels=found.labels)


def histogram_family(name: str) -> HistogramMetricFamily:
    """Return the histogram for one scrape, without samples."""
    found = row(name, "histogram")
    return HistogramMetricFamily(f"serve_app_{name}", found.text, labels=found.labels)

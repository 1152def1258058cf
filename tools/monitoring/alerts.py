"""These alerts are on symptoms that no objective covers: no ingress answers, no room is left, something does not come to its end.

Every expression keeps the label ``job``, so that two releases have separate alerts. docs/runbook.md has a section for each alert.
"""

from serve_app.autoscaling.series import PREFIX
from tools.monitoring.gpus import GPU_ALERTS
from tools.monitoring.rule import IN_JOB, Alert
from tools.monitoring.slo import burns


def _interactive(waiting: str, low: str) -> str:
    """Return how many waiting requests are interactive: requests of lower priorities wait by design."""
    return f"sum by (job, model) ({waiting}) - sum by (job, model) (serve_app_low_priority_waiting{{{low}}})"


_WAITING = _interactive(f"serve_app_waiting_requests{{{IN_JOB}}}", f'{IN_JOB},at="ingress"')
_TAKING = f"count by (job, model) (max by (job, model, replica) (serve_app_replica_draining{{{IN_JOB}}}) == 0)"
# This is a few too low: requests of lower priorities that have left an engine's queue are subtracted until their first token.
_QUEUED = _interactive(f"max by (job, model, replica) (serve_app_replica_waiting{{{IN_JOB}}})", f'{IN_JOB},at="replica"')


def _bound(which: str) -> str:
    return f'max by (job, model) (serve_app_replica_bound{{{IN_JOB},bound="{which}"}})'


def _increase(series: str, window: str, labels: str = "", by: str = "job, model", over: str = "sum") -> str:
    selector = f"{IN_JOB},{labels}" if labels else IN_JOB
    return f"{over} by ({by}) (increase({series}{{{selector}}}[{window}]))"


def _of_container(series: str) -> str:
    """Return what Ray's agent in each pod of head, ingress or model reports of its container, without the page cache."""
    return f'max by (job, pod) (ray_node_mem_{series}{{job="${{namespace}}/${{release}}-ray"}})'


_TENANT = "job, tenant, model"


def _longest(series: str) -> str:
    return f"max by ({_TENANT}) ({series}{{{IN_JOB}}})"


def _of_tenants(labels: str) -> str:
    """Return a tenant's requests. What is refused before its body is read has no model, so they are of all models together."""
    return _increase("serve_app_key_requests_total", "30m", labels, "job, tenant")


AVAILABILITY = (
    Alert(
        "ServeAppDown",
        "critical",
        "2m",
        f"sum by (job) (up{{{IN_JOB}}}) == 0 or absent(up{{{IN_JOB}}})",
        "No ingress of ${release} answers Prometheus.",
        model=False,
    ),
    Alert(
        "ServeAppNoReplica",
        "critical",
        "2m",
        # Every ingress that answers has the first series for each model, and the second series only with a replica. Waiting requests would
        # not do: they give up before the alert is due, and an ingress without replicas is unready and gets none. Some models may have no
        # replica: a model with min: 0 without requests, a model that an operator unloaded, of which the autoscaler wants no replica, and a
        # canary, whose model answers in its place.
        f"count by (job, model) (serve_app_waiting_requests{{{IN_JOB}}})"
        f" unless on (job, model) (sum by (job, model) (1 - serve_app_replica_draining{{{IN_JOB}}}) > 0)"
        f" unless on (job, model) serve_app_canary_state{{{IN_JOB}}}"
        f" and on (job, model) ({_bound('min')} > 0)"
        f' unless on (model) (max by (model) (ray_{PREFIX}desired{{job="${{namespace}}/${{release}}-ray"}}) == 0)',
        "No replica of {{ $labels.model }} takes requests, according to all {{ $value }} ingresses.",
        "autoscaling",
    ),
)

CAPACITY = (
    Alert(
        "ServeAppRequestsWait",
        "warning",
        "5m",
        f"{_WAITING} > ${{waiting}}",
        "{{ $value }} interactive requests for {{ $labels.model }} wait for a replica; replicas.max may be too low.",
        "autoscaling",
    ),
    Alert(
        "ServeAppQueueGrows",
        "warning",
        "5m",
        f"deriv(({_WAITING})[10m:30s]) * 600 > 10 and on (job, model) min_over_time(({_WAITING})[10m:30s]) > 0",
        "The queue of {{ $labels.model }} grew by {{ $value | humanize }} interactive requests in 10 minutes, and was never empty.",
        "autoscaling",
    ),
    Alert(
        "ServeAppAtMaxReplicas",
        "warning",
        "10m",
        f"{_TAKING} >= {_bound('max')} and on (job, model) ({_WAITING} + {_QUEUED}) > 0",
        "All {{ $value }} replicas that {{ $labels.model }} may have are running, and interactive requests still wait.",
        "autoscaling",
    ),
    Alert(
        "ServeAppRequestsAreRejected",
        "warning",
        "0m",
        _increase(
            "serve_app_request_errors_total",
            "10m",
            'reason=~"no_replica|queue_full|cannot_start_in_time|too_many_connections|ingress_overloaded"',
            "job, model, reason",
        )
        + " >= 10",
        "{{ $value | humanize }} requests for {{ $labels.model }} were rejected in 10 minutes: {{ $labels.reason }}.",
        "overview",
    ),
    Alert(
        "ServeAppCacheIsFull",
        "warning",
        "10m",
        f"min by (job, model) (serve_app_replica_kv_usage{{{IN_JOB}}}) > 0.95",
        "Every replica of {{ $labels.model }} has used over 95 % of its KV cache for 10 minutes; engines preempt requests.",
        "replica",
    ),
    Alert(
        "ServeAppDiskIsFull",
        "warning",
        "5m",
        f"min by (job, instance) (serve_app_free_disk_bytes{{{IN_JOB}}}) < ${{free_bytes}}",
        "{{ $value | humanize1024 }}B are free below the temporary folder of the ingress {{ $labels.instance }}.",
        model=False,
    ),
    Alert(
        "ServeAppBatchFolderIsFull",
        "warning",
        "5m",
        f"min by (job) (serve_app_batch_free_bytes{{{IN_JOB}}} > 0) < ${{free_bytes}}",
        "{{ $value | humanize1024 }}B are free in the folder of batches.",
        "batch",
        model=False,
    ),
    Alert(
        "ServeAppMemoryIsFull",
        "warning",
        "10m",
        # 8 GiB: a model's pod that keeps 100 GiB of KV is above 80 % by design. Its limit (124 GiB with one GPU) leaves it 15 GiB or more.
        f"{_of_container('used')} / {_of_container('total')} > 0.8"
        f" and {_of_container('total')} - {_of_container('used')} < 8 * 1024 ^ 3",
        "The pod {{ $labels.pod }} has used {{ $value | humanizePercentage }} of its memory, and over 80 % for 10 minutes.",
        model=False,
    ),
)

STUCK = (
    Alert(
        "ServeAppReplicasAreLost",
        "warning",
        "0m",
        f"{_increase('serve_app_resumptions_total', '15m')} > 0",
        "Streams of {{ $labels.model }} lost their replica and continued elsewhere, {{ $value | humanize }} times in 15 minutes.",
        "replica",
    ),
    Alert(
        "ServeAppEnginesAreLost",
        "warning",
        "0m",
        _increase("serve_app_engines_lost_total", "30m", by="job, model, reason", over="max") + " >= 2",
        "{{ $value | humanize }} engines of {{ $labels.model }} were lost in 30 minutes: {{ $labels.reason }}.",
        "replica",
    ),
    Alert(
        "ServeAppReplicasAreEjected",
        "warning",
        "0m",
        _increase("serve_app_links_lost_total", "30m", 'reason="unresponsive"', over="max") + " >= 3",
        "An ingress ejected silent replicas of {{ $labels.model }} {{ $value | humanize }} times in 30 minutes.",
        "replica",
    ),
    Alert(
        "ServeAppDrainDoesNotEnd",
        "warning",
        "${drain_limit_s}s",
        f"max by (job, model, replica) (serve_app_replica_draining{{{IN_JOB}}}) == 1",
        "The replica {{ $labels.replica }} of {{ $labels.model }} has drained for more than ${drain_limit_s} s.",
        "replica",
    ),
    Alert(
        "ServeAppEventLoopLags",
        "warning",
        "5m",
        f"histogram_quantile(0.9, sum by (job, instance, le) (rate(serve_app_event_loop_lag_seconds_bucket{{{IN_JOB}}}[5m]))) > 0.1",
        "The event loop of the ingress {{ $labels.instance }} is late by {{ $value | humanizeDuration }} or more, one time in ten.",
        "loadtest",
        model=False,
    ),
    Alert(
        "ServeAppRequestsAreQuarantined",
        "warning",
        "0m",
        _increase("serve_app_requests_total", "15m", 'outcome="quarantined"') + " > 0",
        "{{ $value | humanize }} requests for {{ $labels.model }} were refused: requests like them ran when two engines were lost.",
        "replica",
    ),
    Alert(
        "ServeAppCanaryIsBad",
        "warning",
        "0m",
        f'max by (job, model, of) (serve_app_canary_state{{{IN_JOB},state="bad"}}) > 0',
        "The canary {{ $labels.model }} did worse than {{ $labels.of }}, which answers all requests again.",
        "model",
    ),
    Alert(
        "ServeAppBatchStandsStill",
        "warning",
        "30m",
        # Each of the ingresses that share a database reports all its batches.
        f'max by (job) (serve_app_batches{{{IN_JOB},status="in_progress"}}) > 0'
        f" unless on (job) ({_increase('serve_app_batch_lines_total', '30m', by='job')} > 0)",
        "{{ $value }} batches are in progress, and none of their lines was answered in 30 minutes.",
        "batch",
        model=False,
    ),
    Alert(
        "ServeAppLedgerLosesLines",
        "warning",
        "0m",
        f"{_increase('serve_app_ledger_lost_total', '15m', by='job, instance')} > 0",
        "The ingress {{ $labels.instance }} could not write {{ $value | humanize }} lines of its ledger in 15 minutes.",
        model=False,
    ),
)

_REFUSED, _ASKED = _of_tenants('outcome=~"rejected|over_quota"'), _of_tenants('outcome!="held_back"')

TENANTS = (
    Alert(
        "ServeAppTenantIsStarved",
        "warning",
        "5m",
        # A model refuses who would wait longer than the limit, by an estimate that may be too low by a quarter when all tenants wait.
        # Twice the limit is reached only by requests that others pass again and again, or that wait for a first replica.
        f"{_longest('serve_app_tenant_longest_wait_seconds')} > 2 * {_longest('serve_app_tenant_wait_limit_seconds')}",
        "The oldest request of {{ $labels.tenant }} for {{ $labels.model }} has waited for {{ $value | humanizeDuration }}, "
        "over twice its limit.",
        "tenants",
    ),
    Alert(
        "ServeAppTenantIsRefused",
        "warning",
        "30m",
        f"{_REFUSED} / {_ASKED} > 0.5 and {_REFUSED} >= 20",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.tenant }} are refused, for an hour.",
        "tenants",
        model=False,
    ),
)

ALERTS = (*AVAILABILITY, *burns(), *CAPACITY, *STUCK, *TENANTS, *GPU_ALERTS)

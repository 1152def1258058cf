"""This dashboard is for a person on call who was woken: is anyone hurt, who, since when, what has changed."""

from tools.monitoring.panels import JOB, MODEL, RATE, VLLM, Board, Panel, Row, rate
from tools.monitoring.shared import ITL, LOOP_LAG, LOST, OUTCOMES, QUEUE, REPLICAS, TTFT
from tools.monitoring.slo import BAD, COUNTED, SLOS

_ERRORS = f"sum by (model) (rate(serve_app_requests_total{{{MODEL},{BAD}}}[{RATE}]))"
_COUNTED = f"sum by (model) (rate(serve_app_requests_total{{{MODEL},{COUNTED}}}[{RATE}]))"

_ANY_JOB = 'job=~"$namespace/$release-(ingress|ray)"'
"""Selects the release's ingresses and its other pods, whose job the alerts of GPUs have."""


def _stat(title: str, shown: dict[str, str], unit: str, text: str, limits: tuple[float | str, ...]) -> Panel:
    return Panel(title, shown, unit, text, kind="stat", limits=limits, width=4, height=4)


def _worst(series: str, q: float, model: str = "model", selector: str = MODEL) -> str:
    return f"max(histogram_quantile({q}, sum by (le, {model}) (rate({series}_bucket{{{selector}}}[5m]))))"


OVERVIEW = Board(
    "overview",
    "overview",
    (
        Row(
            "Is anyone hurt?",
            (
                _stat(
                    "Alerts that fire",
                    {"": f'count(ALERTS{{alertname=~"ServeApp.*",alertstate="firing",{_ANY_JOB}}}) or vector(0)'},
                    "short",
                    "Alerts of this release. Their names and summaries are in Alertmanager and in Prometheus, at /alerts.",
                    (1, 1),
                ),
                _stat(
                    "Ingresses that answer",
                    {"": f"sum(up{{{JOB}}})"},
                    "short",
                    "Of the ingresses that Prometheus scrapes.",
                    (2, 1),
                ),
                _stat(
                    "Requests that fail",
                    {"": f"max({_ERRORS.replace(RATE, '5m')} / {_COUNTED.replace(RATE, '5m')})"},
                    "percentunit",
                    "Share of the worst model's requests that failed or were rejected in 5 minutes.",
                    (0.005, 0.01),
                ),
                _stat(
                    "First token, p95",
                    {"": _worst("serve_app_ttft_seconds", 0.95, selector=f'{MODEL},priority="interactive"')},
                    "s",
                    "Of interactive requests: the worst model over 5 minutes. Red begins at the objective's limit.",
                    ("${ttft_s}", "${ttft_s}"),
                ),
                _stat(
                    "Between tokens, p99",
                    {"": _worst("vllm:inter_token_latency_seconds", 0.99, "model_name", VLLM)},
                    "s",
                    "The worst model over 5 minutes. Red begins at the objective's limit.",
                    ("${itl_s}", "${itl_s}"),
                ),
                _stat(
                    "Requests that wait",
                    {"": f"sum(serve_app_waiting_requests{{{MODEL}}})"},
                    "short",
                    "Requests without a replica, at all ingresses.",
                    (1, "${waiting}"),
                ),
            ),
        ),
        Row(
            "Who?",
            (
                OUTCOMES,
                Panel(
                    "Errors by reason",
                    {"{{model}} {{reason}}": rate("serve_app_request_errors_total", "model, reason") + " > 0"},
                    "reqps",
                    "Why requests were refused or failed; the codes are in docs/differences.md.",
                    quiet=True,
                ),
                Panel(
                    "Errors by API key",
                    {
                        "{{tenant}} {{key}} {{model}} {{outcome}}": "topk(10, "
                        + rate("serve_app_key_requests_total", "tenant, key, model, outcome", f'{MODEL},outcome!="complete"')
                        + " > 0)"
                    },
                    "reqps",
                    "The ten keys with the most errors, by tenant and id of the key.",
                    quiet=True,
                ),
                TTFT,
                ITL,
                QUEUE,
            ),
        ),
        Row(
            "Since when?",
            tuple(
                Panel(
                    f"Burn rate of the error budget: {slo.name}",
                    {
                        f"{{{{model}}}} {window}": f"{slo.recorded(window)}{{{MODEL}}} / (1 - {slo.objective})"
                        for window in ("5m", "1h", "6h", "3d")
                    },
                    "short",
                    "At 1, the budget of 30 days lasts 30 days. 14.4 for an hour pages the person on call.",
                    limits=(1, 14.4),
                )
                for slo in SLOS
            ),
        ),
        Row(
            "What has changed?",
            (
                REPLICAS,
                LOST,
                Panel(
                    "Age of the ingresses",
                    {"{{instance}}": f"time() - max by (instance) (process_start_time_seconds{{{JOB}}})"},
                    "s",
                    "A line that falls to zero shows a new process: an update, or an ingress that died.",
                ),
                Panel(
                    "Canaries",
                    {"{{model}} of {{of}} is {{state}}": f"max by (model, of, state) (serve_app_canary_state{{{MODEL}}}) == 1"},
                    "short",
                    "The present state of each canary.",
                    quiet=True,
                ),
                LOOP_LAG,
                Panel(
                    "Room on disks",
                    {
                        "temporary folder of {{instance}}": f"min by (instance) (serve_app_free_disk_bytes{{{JOB}}})",
                        "batches": f"min(serve_app_batch_free_bytes{{{JOB}}} > 0)",
                    },
                    "bytes",
                    "On a full disk, Ray writes no logs and batches make no progress.",
                    limits=("${free_bytes}", "${free_bytes}"),
                    quiet=True,
                ),
            ),
        ),
    ),
)

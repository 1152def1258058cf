"""The dashboards. Each begins with the question of somebody who was woken: is anyone hurt, who, since when, what has changed."""

import json
import re

from tools.monitoring.facts import UID
from tools.monitoring.panels import JOB, MODEL, RATE, VLLM, Board, Panel, Row, increase, quantiles, rate
from tools.monitoring.slo import BAD, COUNTED, SLOS

_ERRORS = f"sum by (model) (rate(serve_app_requests_total{{{MODEL},{BAD}}}[{RATE}]))"
_COUNTED = f"sum by (model) (rate(serve_app_requests_total{{{MODEL},{COUNTED}}}[{RATE}]))"
_READY = f"count by (model) (max by (model, replica) (serve_app_replica_draining{{{MODEL}}}) == 0)"
_DRAINING = f"sum by (model) (max by (model, replica) (serve_app_replica_draining{{{MODEL}}}))"
_BY_REPLICA = "max by (model, replica) (%s{" + MODEL + "})"
_REPLICA = "{{model}} {{replica}}"


def _bound(which: str) -> str:
    return f'max by (model) (serve_app_replica_bound{{{MODEL},bound="{which}"}})'


def _latency(title: str, series: str, text: str, width: int = 8) -> Panel:
    return Panel(title, quantiles(f"vllm:{series}", "model_name", VLLM), "s", text, width=width)


TTFT = _latency(
    "Time to first token", "time_to_first_token_seconds", "From the arrival at the ingress to the first token, queue included."
)
ITL = _latency("Time between tokens", "inter_token_latency_seconds", "Every gap between two tokens of an answer.")
E2E = _latency("Whole answer", "e2e_request_latency_seconds", "From the arrival at the ingress to the last token.")
QUEUE = Panel(
    "Wait for a replica",
    quantiles("serve_app_queue_seconds", "model", MODEL, (0.5, 0.95)),
    "s",
    "In the ingress's queue. Zero while replicas have room; the wait inside an engine is in the dashboard of the model.",
)
OUTCOMES = Panel(
    "Requests by outcome",
    {"{{model}} {{outcome}}": rate("serve_app_requests_total", "model, outcome") + " > 0"},
    "reqps",
    "HTTP requests, each counted once at its end. docs/monitoring.md has the outcomes.",
)
REPLICAS = Panel(
    "Replicas",
    {"{{model}} ready": _READY, "{{model}} draining": _DRAINING, "{{model}} min": _bound("min"), "{{model}} max": _bound("max")},
    "short",
    "As the ingresses see them, with the bounds of the configuration.",
)
WAITING = Panel(
    "Requests without a replica",
    {"{{model}}": f"sum by (model) (serve_app_waiting_requests{{{MODEL}}})"},
    "short",
    "The queues of all ingresses.",
    limits=("${waiting}", "${waiting}"),
)
LOOP_LAG = Panel(
    "Event loop of the ingresses",
    quantiles("serve_app_event_loop_lag_seconds", "instance", JOB, (0.5, 0.9, 0.99)),
    "s",
    "How late a task wakes up. Every token of every stream of the ingress waits that long.",
    limits=(0.05, 0.1),
)
LOST = Panel(
    "Engines, links and streams that were lost",
    {
        "engine of {{model}}: {{reason}}": increase("serve_app_engines_lost_total", "model, reason", over="max") + " > 0",
        "link of {{model}}: {{reason}}": increase("serve_app_links_lost_total", "model, reason", over="max") + " > 0",
        "stream of {{model}} went on": increase("serve_app_resumptions_total", "model") + " > 0",
    },
    "short",
    "Engines and links are counted by every ingress, so the largest count is shown.",
    quiet=True,
)
TOKENS = Panel(
    "Tokens",
    {
        "{{model_name}} prompt": rate("vllm:prompt_tokens_total", "model_name", VLLM),
        "{{model_name}} answer": rate("vllm:generation_tokens_total", "model_name", VLLM),
    },
    "cps",
    "Tokens per second of all replicas.",
)
KV = Panel(
    "KV cache used",
    {_REPLICA: _BY_REPLICA % "serve_app_replica_kv_usage"},
    "percentunit",
    "Near 1, engines preempt requests and compute them again.",
    limits=(0.9, 0.95),
)
STEP = Panel(
    "Time of an engine step",
    {_REPLICA: f"1 / (max by (model, replica) (rate(serve_app_replica_steps_total{{{MODEL}}}[{RATE}])) > 0)"},
    "s",
    "Seconds per step, pauses included: under load the time between two tokens, in an idle engine nothing of meaning.",
)


def _stat(
    title: str, shown: dict[str, str], unit: str, text: str, limits: tuple[float | str, ...], *, quiet: bool = False
) -> Panel:
    return Panel(title, shown, unit, text, kind="stat", limits=limits, quiet=quiet, width=4, height=4)


def _worst(series: str, q: float) -> str:
    return f"max(histogram_quantile({q}, sum by (le, model_name) (rate(vllm:{series}_bucket{{{VLLM}}}[5m]))))"


OVERVIEW = Board(
    "overview",
    "overview",
    (
        Row(
            "Is anyone hurt?",
            (
                _stat(
                    "Alerts that fire",
                    {"": f'count(ALERTS{{alertname=~"ServeApp.*",alertstate="firing",{JOB}}}) or vector(0)'},
                    "short",
                    "Of this release. Their names and summaries are in Alertmanager and in Prometheus, at /alerts.",
                    (1, 1),
                ),
                _stat("Ingresses that answer", {"": f"sum(up{{{JOB}}})"}, "short", "Of those that Prometheus knows.", (2, 1)),
                _stat(
                    "Requests that fail",
                    {"": f"max({_ERRORS.replace(RATE, '5m')} / {_COUNTED.replace(RATE, '5m')})"},
                    "percentunit",
                    "Share that failed or was rejected in 5 minutes, of the worst model.",
                    (0.005, 0.01),
                ),
                _stat(
                    "First token, p95",
                    {"": _worst("time_to_first_token_seconds", 0.95)},
                    "s",
                    "Of 5 minutes and the worst model. Red is the objective's limit.",
                    ("${ttft_s}", "${ttft_s}"),
                ),
                _stat(
                    "Between tokens, p99",
                    {"": _worst("inter_token_latency_seconds", 0.99)},
                    "s",
                    "Of 5 minutes and the worst model. Red is the objective's limit.",
                    ("${itl_s}", "${itl_s}"),
                ),
                _stat(
                    "Requests that wait",
                    {"": f"sum(serve_app_waiting_requests{{{MODEL}}})"},
                    "short",
                    "Without a replica, at all ingresses.",
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
                        "{{key}} {{model}} {{outcome}}": "topk(10, "
                        + rate("serve_app_key_requests_total", "key, model, outcome", f'{MODEL},outcome!="complete"')
                        + " > 0)"
                    },
                    "reqps",
                    "The ten keys with the most. A key is shown by the first 12 hex digits of its SHA-256.",
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
                    "1 uses up the budget of 30 days in 30 days. 14.4 for an hour pages somebody.",
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
                    "A line that falls to zero is a new process: an update, or an ingress that died.",
                ),
                Panel(
                    "Canaries",
                    {"{{model}} of {{of}} is {{state}}": f"max by (model, of, state) (serve_app_canary_state{{{MODEL}}}) == 1"},
                    "short",
                    "The state that each canary is in.",
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
                    "A full disk stops Ray's logs and the lines of batches.",
                    limits=("${free_bytes}", "${free_bytes}"),
                    quiet=True,
                ),
            ),
        ),
    ),
)

MODEL_BOARD = Board(
    "model",
    "model",
    (
        Row("What do its users feel?", (TTFT, ITL, E2E, OUTCOMES, TOKENS, QUEUE)),
        Row(
            "Where does the time go?",
            (
                _latency(
                    "Wait inside an engine",
                    "request_queue_time_seconds",
                    "In the engine's own queue: its batch or its KV cache is full. vLLM's smallest bucket ends at 0.3 s.",
                ),
                _latency(
                    "Prefill",
                    "request_prefill_time_seconds",
                    "From the first step of a request to its first token. vLLM's smallest bucket ends at 0.3 s.",
                ),
                _latency("Decode", "request_decode_time_seconds", "From the first token to the last."),
                _latency("Time per output token", "request_time_per_output_token_seconds", "Mean gap of one answer."),
                Panel(
                    "Preemptions",
                    {"{{model_name}}": rate("vllm:num_preemptions_total", "model_name", VLLM)},
                    "ops",
                    "Requests that an engine has put back because its KV cache was full. They are computed again.",
                ),
                Panel(
                    "Gap of streams that went on elsewhere",
                    quantiles("serve_app_resume_gap_seconds", "model, way", MODEL, (0.5, 0.99)),
                    "s",
                    "How long a client saw nothing when its replica was lost.",
                    quiet=True,
                ),
            ),
        ),
        Row(
            "What is asked?",
            (
                Panel(
                    "Tokens of a prompt",
                    quantiles("vllm:request_prompt_tokens", "model_name", VLLM, (0.5, 0.95)),
                    "short",
                    "Long prompts make late first tokens.",
                ),
                Panel(
                    "Tokens of an answer",
                    quantiles("vllm:request_generation_tokens", "model_name", VLLM, (0.5, 0.95)),
                    "short",
                    "Long answers hold places of the batch and the KV cache.",
                ),
                Panel(
                    "Prompt tokens that were cached",
                    {
                        "{{model_name}} found by engines": rate("vllm:prefix_cache_hits_total", "model_name", VLLM)
                        + " / "
                        + rate("vllm:prefix_cache_queries_total", "model_name", VLLM),
                    },
                    "percentunit",
                    "Share of the prompt tokens that an engine had in its prefix cache.",
                ),
                Panel(
                    "Why requests went where they did",
                    {"{{model}} {{reason}}": rate("serve_app_routed_total", "model, reason")},
                    "reqps",
                    "docs/routing.md has the reasons.",
                ),
            ),
        ),
    ),
)

REPLICA = Board(
    "replica",
    "replicas",
    (
        Row(
            "Which replica is unlike the others?",
            (
                Panel(
                    "Running requests", {_REPLICA: _BY_REPLICA % "serve_app_replica_running"}, "short", "In the engine's batch."
                ),
                Panel(
                    "Requests in the engine's queue",
                    {_REPLICA: _BY_REPLICA % "serve_app_replica_waiting"},
                    "short",
                    "Of all ingresses.",
                ),
                KV,
                STEP,
                Panel(
                    "Tokens that are left to compute",
                    {_REPLICA: f"sum by (model, replica) (serve_app_replica_outstanding_tokens{{{MODEL}}})"},
                    "short",
                    "What routing by load looks at.",
                ),
                Panel(
                    "Requests held",
                    {_REPLICA: f"sum by (model, replica) (serve_app_replica_held{{{MODEL}}})"},
                    "short",
                    "Unfinished ones, of all ingresses.",
                ),
            ),
        ),
        Row(
            "Which replica goes, and why?",
            (
                Panel(
                    "Draining",
                    {_REPLICA: _BY_REPLICA % "serve_app_replica_draining"},
                    "bool",
                    "It takes nothing new, and what it has moves or ends.",
                ),
                LOST,
                Panel(
                    "Streams that were moved or went on",
                    {
                        "{{model}} moved from a drain": rate("serve_app_moved_total", "model"),
                        "{{model}} went on after a loss": rate("serve_app_resumptions_total", "model"),
                    },
                    "ops",
                    "Neither is an error for a client.",
                ),
            ),
        ),
    ),
)

AUTOSCALING = Board(
    "autoscaling",
    "autoscaling",
    (
        Row("Are there enough replicas?", (REPLICAS, WAITING, QUEUE)),
        Row(
            "What do they have to do?",
            (
                Panel(
                    "Requests of a replica",
                    {
                        "{{model}} running": f"avg by (model) ({_BY_REPLICA % 'serve_app_replica_running'})",
                        "{{model}} queued": f"avg by (model) ({_BY_REPLICA % 'serve_app_replica_waiting'})",
                    },
                    "short",
                    "Mean over the model's replicas.",
                ),
                Panel(
                    "Tokens that are left to compute",
                    {"{{model}}": f"sum by (model) (serve_app_outstanding_tokens{{{MODEL}}})"},
                    "short",
                    "Prompt and answer tokens of all unfinished requests.",
                ),
                TOKENS,
                KV,
                TTFT,
                Panel(
                    "Cold start, p90",
                    {"{{model}}": f"max by (model) (serve_app_cold_start_p90_seconds{{{MODEL}}})"},
                    "s",
                    "From the wish for a replica until it takes requests. It is Retry-After while there is no replica.",
                    quiet=True,
                ),
            ),
        ),
    ),
)

LOADTEST = Board(
    "loadtest",
    "load test",
    (
        Row("What comes, and what goes out?", (OUTCOMES, TOKENS, WAITING)),
        Row("How late?", (TTFT, ITL, E2E)),
        Row(
            "What is at its limit?",
            (
                LOOP_LAG,
                Panel(
                    "CPU of the ingresses",
                    {"{{instance}}": rate("process_cpu_seconds_total", "instance", JOB)},
                    "percentunit",
                    "1 is a whole core. An ingress uses little more than one.",
                    limits=(0.8, 0.95),
                ),
                Panel(
                    "Memory of the ingresses",
                    {"{{instance}}": f"max by (instance) (process_resident_memory_bytes{{{JOB}}})"},
                    "bytes",
                    "Resident.",
                ),
                Panel(
                    "Open files of the ingresses",
                    {
                        "{{instance}}": f"max by (instance) (process_open_fds{{{JOB}}})",
                        "{{instance}} limit": f"max by (instance) (process_max_fds{{{JOB}}})",
                    },
                    "short",
                    "Every connection is one.",
                ),
                STEP,
                KV,
                Panel(
                    "Clients that read nothing, connections beyond the limit",
                    {
                        "stalled": rate("serve_app_stalled_clients_total", "instance", JOB),
                        "crowded": rate("serve_app_crowded_connections_total", "instance", JOB),
                    },
                    "ops",
                    "Stalled: the load generator does not read fast enough. Crowded: the ingress has no more file descriptors.",
                ),
            ),
        ),
    ),
)

BATCH = Board(
    "batch",
    "batches",
    (
        Row(
            "Do batches go on?",
            (
                Panel(
                    "Batches",
                    {"{{status}}": f"sum by (status) (serve_app_batches{{{JOB}}})"},
                    "short",
                    "Those that are kept.",
                    quiet=True,
                ),
                Panel(
                    "Lines",
                    {"{{outcome}}": rate("serve_app_batch_lines_total", "outcome", JOB)},
                    "ops",
                    "By what became of them.",
                    quiet=True,
                ),
                Panel(
                    "Lines that found no free place",
                    {"{{model}}": rate("serve_app_requests_total", "model", f'{JOB},model!="",outcome="held_back"')},
                    "reqps",
                    "Chats have all places. The lines come again.",
                ),
                Panel(
                    "Room for batches",
                    {"": f"min(serve_app_batch_free_bytes{{{JOB}}})"},
                    "bytes",
                    "On the disk of ingress.batch.dir.",
                ),
            ),
        ),
        Row("Do chats suffer?", (TTFT, ITL, QUEUE)),
    ),
)

BOARDS = (OVERVIEW, MODEL_BOARD, REPLICA, AUTOSCALING, LOADTEST, BATCH)


def board_file(board: Board) -> str:
    """Return the text of a dashboard's file, which is JSON once it is filled: facts that are numbers stand there without quotes.

    The chart puts a hash of the release behind the first part of the uid.
    """
    return re.sub(r'"value": "(\$\{\w+\})"', r'"value": \1', json.dumps(board.made(UID), indent=1)) + "\n"

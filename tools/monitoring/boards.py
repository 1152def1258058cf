"""These are the dashboards. Each begins with a question."""

import json
import re

from tools.monitoring.decisions import DECISIONS
from tools.monitoring.facts import UID
from tools.monitoring.gpus import GPUS
from tools.monitoring.overview import OVERVIEW
from tools.monitoring.panels import JOB, MODEL, RATE, VLLM, Board, Panel, Row, quantiles, rate
from tools.monitoring.shared import (
    BY_REPLICA,
    E2E,
    ITL,
    KV,
    LOOP_LAG,
    LOST,
    OUTCOMES,
    QUEUE,
    REPLICA_NAME,
    REPLICAS,
    STEP,
    TOKENS,
    TTFT,
    WAITING,
    latency,
)
from tools.monitoring.tenants import TENANTS

MODEL_BOARD = Board(
    "model",
    "model",
    (
        Row("What do its users feel?", (TTFT, ITL, E2E, OUTCOMES, TOKENS, QUEUE)),
        Row(
            "Where does the time go?",
            (
                latency(
                    "Wait inside an engine",
                    "request_queue_time_seconds",
                    "In the engine's own queue: its batch or its KV cache is full. vLLM's smallest bucket ends at 0.3 s.",
                ),
                latency(
                    "Prefill",
                    "request_prefill_time_seconds",
                    "From the first step of a request to its first token. vLLM's smallest bucket ends at 0.3 s.",
                ),
                latency("Decode", "request_decode_time_seconds", "From the first token to the last."),
                latency("Time per output token", "request_time_per_output_token_seconds", "Mean gap of one answer."),
                Panel(
                    "Preemptions",
                    {"{{model_name}}": rate("vllm:num_preemptions_total", "model_name", VLLM)},
                    "ops",
                    "Requests that engines interrupted: KV was full, or a tenant within its share needed the place. They continue.",
                ),
                Panel(
                    "Gap of streams that continued elsewhere",
                    quantiles("serve_app_resume_gap_seconds", "model, way", MODEL, (0.5, 0.99)),
                    "s",
                    "How long a client saw nothing when its replica was lost.",
                    quiet=True,
                ),
            ),
        ),
        Row(
            "Which client waits? (needs ingress.key_latencies)",
            tuple(
                Panel(
                    title,
                    {
                        "{{key}}": f"topk(10, histogram_quantile(0.95, sum by (key, le) (rate({series}_bucket{{{MODEL}}}[{RATE}]))))"
                    },
                    "s",
                    f"{text} 95 % are below the line; the ten keys with the highest lines.",
                    quiet=True,
                )
                for title, series, text in (
                    ("Time to first token by API key", "serve_app_key_ttft_seconds", "Of answers that had a first token."),
                    ("Time per output token by API key", "serve_app_key_tpot_seconds", "Mean gap of one answer."),
                    ("Whole answer by API key", "serve_app_key_e2e_seconds", "Long answers take longer."),
                )
            ),
        ),
        Row(
            "What do requests ask for?",
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
                    "Cached prompt tokens by where they were",
                    {"{{model_name}} {{source}}": rate("vllm:prompt_tokens_cached_by_source_total", "model_name, source", VLLM)},
                    "short",
                    "Per second: in the GPU's memory (device), in the node's (host, kv.offload_gib), or at another replica (p2p).",
                ),
                Panel(
                    "Requests by the reason for their replica",
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
            "Which replica differs from the others?",
            (
                Panel(
                    "Running requests",
                    {REPLICA_NAME: BY_REPLICA % "serve_app_replica_running"},
                    "short",
                    "In the engine's batch.",
                ),
                Panel(
                    "Requests in the engine's queue",
                    {REPLICA_NAME: BY_REPLICA % "serve_app_replica_waiting"},
                    "short",
                    "Of all ingresses.",
                ),
                KV,
                STEP,
                Panel(
                    "Tokens that are left to compute",
                    {REPLICA_NAME: f"sum by (model, replica) (serve_app_replica_outstanding_tokens{{{MODEL}}})"},
                    "short",
                    "The load that routing by load compares.",
                ),
                Panel(
                    "Requests held",
                    {REPLICA_NAME: f"sum by (model, replica) (serve_app_replica_held{{{MODEL}}})"},
                    "short",
                    "Unfinished requests of all ingresses.",
                ),
            ),
        ),
        Row(
            "Which replica leaves, and why?",
            (
                Panel(
                    "Draining",
                    {REPLICA_NAME: BY_REPLICA % "serve_app_replica_draining"},
                    "bool",
                    "1 while the replica drains: it takes no new requests, and its requests move or end.",
                ),
                LOST,
                Panel(
                    "Streams that were moved or resumed",
                    {
                        "{{model}} moved from a drain": rate("serve_app_moved_total", "model"),
                        "{{model}} resumed after a loss": rate("serve_app_resumptions_total", "model"),
                    },
                    "ops",
                    "Neither is an error for a client.",
                ),
                Panel(
                    "KV read from other replicas",
                    {"{{model}}": rate("serve_app_kv_read_bytes_total", "model")},
                    "Bps",
                    "Streams that move take their KV along where a read is shorter than the prefill.",
                ),
            ),
        ),
        GPUS,
    ),
)

AUTOSCALING = Board(
    "autoscaling",
    "autoscaling",
    (
        Row("Are there enough replicas?", (REPLICAS, WAITING, QUEUE)),
        DECISIONS,
        Row(
            "How much work do they have?",
            (
                Panel(
                    "Requests of a replica",
                    {
                        "{{model}} running": f"avg by (model) ({BY_REPLICA % 'serve_app_replica_running'})",
                        "{{model}} queued": f"avg by (model) ({BY_REPLICA % 'serve_app_replica_waiting'})",
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
                    "GPUs in use",
                    {"{{model}}": f"max by (model) (serve_app_gpus{{{MODEL}}})"},
                    "short",
                    "GPUs of linked replicas, including draining ones. The mean over a day times 24 is GPU-hours.",
                ),
                Panel(
                    "Cold start, p90",
                    {"{{model}}": f"max by (model) (serve_app_cold_start_p90_seconds{{{MODEL}}})"},
                    "s",
                    "From the order of a replica until it takes requests. It is Retry-After while there is no replica.",
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
        Row("How much comes in and goes out?", (OUTCOMES, TOKENS, WAITING)),
        Row("How late?", (TTFT, ITL, E2E)),
        Row(
            "What is at its limit?",
            (
                LOOP_LAG,
                Panel(
                    "CPU of the ingresses",
                    {"{{instance}}": rate("process_cpu_seconds_total", "instance", JOB)},
                    "percentunit",
                    "1 is a whole core. An ingress uses little more than one core.",
                    limits=(0.8, 0.95),
                ),
                Panel(
                    "Memory of the ingresses",
                    {"{{instance}}": f"max by (instance) (process_resident_memory_bytes{{{JOB}}})"},
                    "bytes",
                    "Resident memory.",
                ),
                Panel(
                    "Open files of the ingresses",
                    {
                        "{{instance}}": f"max by (instance) (process_open_fds{{{JOB}}})",
                        "{{instance}} limit": f"max by (instance) (process_max_fds{{{JOB}}})",
                    },
                    "short",
                    "Every connection is an open file.",
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
            "Do batches make progress?",
            (
                Panel(
                    "Batches",
                    {"{{status}}": f"max by (status) (serve_app_batches{{{JOB}}})"},
                    "short",
                    "Stored batches by status.",
                    quiet=True,
                ),
                Panel(
                    "Lines",
                    {"{{outcome}}": rate("serve_app_batch_lines_total", "outcome", JOB)},
                    "ops",
                    "Lines by outcome.",
                    quiet=True,
                ),
                Panel(
                    "Lines that found no free place",
                    {"{{model}}": rate("serve_app_requests_total", "model", f'{JOB},model!="",outcome="held_back"')},
                    "reqps",
                    "Chats have all places. The lines are tried again.",
                ),
                Panel(
                    "Room for batches",
                    {"": f"min(serve_app_batch_free_bytes{{{JOB}}})"},
                    "bytes",
                    "Free bytes on the disk of ingress.batch.dir.",
                ),
            ),
        ),
        Row("Do chats suffer?", (TTFT, ITL, QUEUE)),
    ),
)

BOARDS = (OVERVIEW, MODEL_BOARD, REPLICA, AUTOSCALING, LOADTEST, BATCH, TENANTS)


def board_file(board: Board) -> str:
    """Return the text of a dashboard's file. It is JSON once facts are filled in: facts that are numbers have no quotes.

    The chart appends a hash of the release to the first part of the uid.
    """
    return re.sub(r'"value": "(\$\{\w+\})"', r'"value": \1', json.dumps(board.made(UID), indent=1)) + "\n"

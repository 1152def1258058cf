"""These panels are on several dashboards."""

from tools.monitoring.panels import JOB, MODEL, RATE, VLLM, Panel, increase, quantiles, rate

_READY = f"count by (model) (max by (model, replica) (serve_app_replica_draining{{{MODEL}}}) == 0)"
_DRAINING = f"sum by (model) (max by (model, replica) (serve_app_replica_draining{{{MODEL}}}))"
BY_REPLICA = "max by (model, replica) (%s{" + MODEL + "})"
REPLICA_NAME = "{{model}} {{replica}}"


def _bound(which: str) -> str:
    return f'max by (model) (serve_app_replica_bound{{{MODEL},bound="{which}"}})'


def latency(title: str, series: str, text: str, width: int = 8) -> Panel:
    return Panel(title, quantiles(f"vllm:{series}", "model_name", VLLM), "s", text, width=width)


TTFT = latency(
    "Time to first token",
    "time_to_first_token_seconds",
    "From the arrival at the ingress to the first token, including the queue. Of all requests; the objective leaves lower priorities out.",
)
ITL = latency("Time between tokens", "inter_token_latency_seconds", "Every gap between two tokens of an answer.")
E2E = latency("Whole answer", "e2e_request_latency_seconds", "From the arrival at the ingress to the last token.")
QUEUE = Panel(
    "Wait for a replica",
    quantiles("serve_app_queue_seconds", "model", MODEL, (0.5, 0.95)),
    "s",
    "In the ingress's queue. Zero while replicas have room; the model's dashboard shows the wait inside an engine.",
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
    "Replicas that the ingresses see, with the bounds of the configuration.",
)
WAITING = Panel(
    "Requests without a replica",
    {"{{model}}": f"sum by (model) (serve_app_waiting_requests{{{MODEL}}})"},
    "short",
    "The queues of all ingresses. Alerts leave out requests of lower priorities.",
    limits=("${waiting}", "${waiting}"),
)
LOOP_LAG = Panel(
    "Event loop of the ingresses",
    quantiles("serve_app_event_loop_lag_seconds", "instance", JOB, (0.5, 0.9, 0.99)),
    "s",
    "How late a task wakes up. Every token of every stream of the ingress waits for as long.",
    limits=(0.05, 0.1),
)
LOST = Panel(
    "Engines, links and streams that were lost",
    {
        "engine of {{model}}: {{reason}}": increase("serve_app_engines_lost_total", "model, reason", over="max") + " > 0",
        "link of {{model}}: {{reason}}": increase("serve_app_links_lost_total", "model, reason", over="max") + " > 0",
        "stream of {{model}} resumed": increase("serve_app_resumptions_total", "model") + " > 0",
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
    {REPLICA_NAME: BY_REPLICA % "serve_app_replica_kv_usage"},
    "percentunit",
    "Near 1, engines preempt requests, and compute them again later.",
    limits=(0.9, 0.95),
)
STEP = Panel(
    "Time of an engine step",
    {REPLICA_NAME: f"1 / (max by (model, replica) (rate(serve_app_replica_steps_total{{{MODEL}}}[{RATE}])) > 0)"},
    "s",
    "Seconds per step, including pauses: under load the time between two tokens; without meaning in an idle engine.",
)

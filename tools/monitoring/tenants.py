"""This dashboard shows which tenant uses how much of the GPUs, who waits and who is refused.

Its panels are empty where no API keys are required.
"""

from tools.monitoring.panels import JOB, MODEL, Board, Panel, Row, rate

_NAME = "{{tenant}}"


def _tokens(kind: str) -> str:
    return rate("serve_app_tenant_tokens_total", "tenant", f'{MODEL},kind="{kind}"')


def _panel(title: str, shown: dict[str, str], unit: str, text: str, *, width: int = 8) -> Panel:
    return Panel(title, shown, unit, text, quiet=True, width=width)


TENANTS = Board(
    "tenants",
    "tenants",
    (
        Row(
            "Who uses the GPUs?",
            (
                _panel(
                    "GPUs by tenant",
                    {_NAME: f"topk(20, {rate('serve_app_tenant_gpu_seconds_total', 'tenant')})"},
                    "short",
                    "GPU-seconds per second: 1 is a GPU that works for this tenant all the time. A replica without GPUs counts as one. "
                    "By the step costs that replicas measured, counted when a request ends. The 20 tenants with the most.",
                    width=16,
                ),
                _panel(
                    "GPUs by model: at work, and there",
                    {
                        "{{model}} at work": rate("serve_app_tenant_gpu_seconds_total", "model"),
                        "{{model}} there": f"max by (model) (serve_app_gpus{{{MODEL}}})",
                    },
                    "short",
                    "What no tenant pays for is the difference: room for peaks, replicas that start, and requests without a key.",
                ),
                _panel(
                    "GPUs by tenant and model",
                    {"{{tenant}} {{model}}": f"topk(20, {rate('serve_app_tenant_gpu_seconds_total', 'tenant, model')})"},
                    "short",
                    "The 20 pairs with the most.",
                ),
            ),
        ),
        Row(
            "With what?",
            (
                _panel(
                    "Prompt tokens that were computed",
                    {_NAME: f"topk(20, {_tokens('prompt')} - {_tokens('cached')})"},
                    "short",
                    "Per second, without those that a prefix cache had.",
                ),
                _panel("Output tokens", {_NAME: f"topk(20, {_tokens('output')})"}, "short", "Per second."),
                _panel(
                    "Prompt tokens that were cached",
                    {_NAME: f"{_tokens('cached')} / {_tokens('prompt')}"},
                    "percentunit",
                    "Share of the prompt tokens. A tenant far below the others may put what changes at the beginning of its prompts.",
                ),
            ),
        ),
        Row(
            "Who waits?",
            (
                _panel(
                    "Longest wait for a first token",
                    {
                        "{{tenant}} {{model}}": f"topk(20, max by (tenant, model) (serve_app_tenant_longest_wait_seconds{{{MODEL}}}))"
                    },
                    "s",
                    "Age of the oldest request of an interactive tenant without a first token. The 20 longest.",
                    width=12,
                ),
                _panel(
                    "Longest wait by its limit",
                    {
                        "{{tenant}} {{model}}": f"topk(20, max by (tenant, model) (serve_app_tenant_longest_wait_seconds{{{MODEL}}})"
                        f" / max by (tenant, model) (serve_app_tenant_wait_limit_seconds{{{MODEL}}}))"
                    },
                    "percentunit",
                    "The limit is the model's refuse_after_s, or the tenant's first_token_s if that is more. An alert fires above 200 %.",
                    width=12,
                ),
            ),
        ),
        Row(
            "Whose requests do not succeed?",
            (
                _panel(
                    "Requests by tenant",
                    {_NAME: f"topk(20, {rate('serve_app_key_requests_total', 'tenant')})"},
                    "reqps",
                    "All outcomes.",
                ),
                _panel(
                    "Requests that were refused or failed",
                    {
                        "{{tenant}} {{outcome}}": "topk(20, "
                        + rate("serve_app_key_requests_total", "tenant, outcome", f'{MODEL},outcome!~"complete|aborted"')
                        + " > 0)"
                    },
                    "reqps",
                    "By outcome; the overview has them by key.",
                ),
                _panel(
                    "Why requests were refused",
                    {"{{tenant}} {{reason}}": f"topk(20, {rate('serve_app_tenant_refusals_total', 'tenant, reason', JOB)} > 0)"},
                    "reqps",
                    "With 429, by the quota that had no room, or with 503: first_token_s and refuse_after_s are limits of the wait.",
                ),
            ),
        ),
    ),
)

"""This benchmark measures tokens per minute of serve-app and of LiteLLM's proxy: the same limits, clients and simulated accelerators.

    python -m benchmarks.quotas_litellm [--setups litellm-1 litellm-3 serve-app-1 serve-app-3] [--seconds 150] [--port 8095]

``make bench-tenants-litellm`` makes LiteLLM's virtual environment and runs all setups, one after another. Each starts a fleet with two
simulated accelerators. serve-app's own tenants have keys with limits at one or three ingresses. LiteLLM's one or three proxies, the three
with a Redis, stand before a fleet without keys. LiteLLM's virtual keys need a database; here the keys come from its documented custom
authentication, which applies limits without one. The phases of a setup:

1. idle, to know the CPU time without requests;
2. a key whose limit is never reached: the CPU time of an admitted request, and the lengths of all answers, which the simulated
   accelerator draws from the prompt alone;
3. five keys with a limit each, at once: 1.3 and 3 times the limit, streamed or whole, and a key that sends one request, pauses, then sends
   three times the limit.

The tokens of a prompt count when it is sent, those of an answer evenly between then and its end. All processes share the machine.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.processes import cpu_by_role, fleet, server
from benchmarks.quota_load import at_times, authorization, client, config_of, exact, most_in_a_minute
from benchmarks.tenant_fleet import key_of
from tests.doubles.fleet import MODEL

LIMIT = 12_000
"""Tokens per minute of each key."""
OPEN, NO_LIMIT = "open", 100_000_000
PROMPTS = 64
WORDS = (10, 90)
"""Bounds of a prompt's length in words."""
MAX_TOKENS, EOS = 96, 0.03
"""The bound that requests give, and the probability that a token ends the answer: answers have 31 tokens in the mean."""
IDLE_S, OPEN_S, OPEN_RATE = 10.0, 20.0, 10.0
PAUSE_S = 40.0
_PROXY_S = 240.0
_MASTER_KEY = "sk-of-the-benchmark-0123456789abcdef0123456789abcdef"
_AUTHENTICATION = """
from litellm.proxy._types import UserAPIKeyAuth

LIMITS = {limits!r}


async def authenticate(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, tpm_limit=LIMITS[api_key], rpm_limit={requests!r})
"""


@dataclass(frozen=True)
class Setup:
    """What keeps the limits: serve-app's ingresses, or proxies of LiteLLM before one ingress without keys."""

    ingresses: int = 1
    proxies: int = 0
    reserves: bool = True
    """Whether LiteLLM reserves tokens before the answer, as it does by default. If not, its keys also have a limit of requests, which
    is never reached: issue #24677 was seen so."""


SETUPS = {
    "litellm-1": Setup(proxies=1),
    "litellm-3": Setup(proxies=3),
    "litellm-3-unreserved": Setup(proxies=3, reserves=False),
    "serve-app-1": Setup(ingresses=1),
    "serve-app-3": Setup(ingresses=3),
}


@dataclass(frozen=True)
class Key:
    """A key and the demand of its clients: ``times`` the limit, after one request and a pause if ``pause_s``."""

    name: str
    times: float
    streams: Sequence[bool]
    """Whether answers stream, in turn."""
    pause_s: float = 0.0

    def schedule(self, mean_tokens: float, seconds: float) -> list[float]:
        """Return when requests are sent, in seconds from the begin, for requests of this mean size."""
        rate = self.times * LIMIT / 60 / mean_tokens
        steady = [self.pause_s + i / rate for i in range(int((seconds - self.pause_s) * rate))]
        return [0.0, *steady] if self.pause_s else steady


KEYS = (
    Key("13-whole", 1.3, [False]),
    Key("13-stream", 1.3, [True]),
    Key("30-whole", 3.0, [False]),
    Key("30-stream", 3.0, [True]),
    Key("after-pause", 3.0, [False, True], pause_s=PAUSE_S),
)


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it. The times are of the monotonic clock; the tokens are 0 if it was refused."""

    prompt: int
    sent_at: float
    ended_at: float
    status: str
    prompt_tokens: int = 0
    answer_tokens: int = 0
    error: str = ""

    def amounts(self) -> list[tuple[float, int]]:
        """Return when its tokens count."""
        step_s = (self.ended_at - self.sent_at) / max(1, self.answer_tokens)
        return [(self.sent_at, self.prompt_tokens), *((self.sent_at + i * step_s, 1) for i in range(1, self.answer_tokens + 1))]


@dataclass
class Gateway:
    """A running setup: where requests go, and the processes that serve them."""

    urls: list[str]
    """Requests take them in turn."""
    fleet: psutil.Process
    proxies: list[psutil.Process] = field(default_factory=list)
    redis: psutil.Process | None = None

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds so far by role; those of the fleet keep their roles."""
        own = {"litellm": sum(sum(cpu_by_role(process).values()) for process in self.proxies)} if self.proxies else {}
        redis = {"redis": sum(cpu_by_role(self.redis).values())} if self.redis is not None else {}
        return {**cpu_by_role(self.fleet), **own, **redis}


def text(prompt: int) -> str:
    """Return a prompt: " the" is one token of the tiny model and 4 characters, which LiteLLM estimates as one token."""
    return " the" * random.Random(prompt).randint(*WORDS) + f" {prompt}"


async def ask(http: httpx.AsyncClient, url: str, key: str, prompt: int, *, streams: bool) -> Answer:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": text(prompt)}], "max_tokens": MAX_TOKENS}
    if streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    sent_at = time.monotonic()
    try:
        answer = await http.post(f"{url}/v1/chat/completions", json=body, headers=authorization(key))
    except httpx.HTTPError as exc:
        return Answer(prompt, sent_at, time.monotonic(), type(exc).__name__, error=str(exc))
    ended_at, status = time.monotonic(), str(answer.status_code)
    if answer.status_code != 200:
        return Answer(prompt, sent_at, ended_at, status, error=answer.text[:400])
    usage = usage_of(answer.text) if streams else answer.json().get("usage")
    if not usage:
        return Answer(prompt, sent_at, ended_at, "no usage", error=answer.text[-400:])
    return Answer(prompt, sent_at, ended_at, status, usage["prompt_tokens"], usage["completion_tokens"])


def usage_of(events: str) -> dict[str, int] | None:
    """Return the last usage in the events of a stream."""
    found: dict[str, int] | None = None
    for line in events.splitlines():
        if line.startswith("data: {"):
            found = json.loads(line[6:]).get("usage") or found
    return found


async def send(urls: Sequence[str], key: str, times: Sequence[float], streams: Sequence[bool]) -> list[Answer]:
    """Send requests with prompts in a random order that each setup repeats; return the answers in the order of sending."""
    order = random.Random(key)
    prompts = [order.randrange(PROMPTS) for _ in times] if key != OPEN else [i % PROMPTS for i in range(len(times))]
    answers: dict[int, Answer] = {}
    async with client() as http:

        async def one(i: int) -> None:
            answers[i] = await ask(http, urls[i % len(urls)], key, prompts[i], streams=streams[i % len(streams)])

        await at_times(times, one)
    return [answers[i] for i in range(len(times))]


async def play(gateway: Gateway, seconds: float) -> dict[str, Any]:
    """Run the phases; return their figures."""
    start = gateway.cpu_s()
    await asyncio.sleep(IDLE_S)
    idle = {role: (at - start.get(role, 0.0)) / IDLE_S for role, at in gateway.cpu_s().items()}
    warm = [i / OPEN_RATE for i in range(PROMPTS)]
    await send(gateway.urls, OPEN, warm, [False, True])
    opened, cpu_of_open = await metered(gateway, idle, OPEN_S, [(OPEN, [i / OPEN_RATE for i in range(int(OPEN_S * OPEN_RATE))])])
    answers = opened[OPEN]
    if bad := [answer for answer in answers if answer.status != "200"]:
        raise RuntimeError(f"the key without a limit got {bad[0]}")
    sizes = {answer.prompt: answer.prompt_tokens + answer.answer_tokens for answer in answers}
    mean = sum(sizes.values()) / len(sizes)
    by_key, cpu = await metered(gateway, idle, seconds, [(key.name, key.schedule(mean, seconds)) for key in KEYS])
    every = [answer for answers in by_key.values() for answer in answers]
    return {
        "limit": LIMIT,
        "seconds": seconds,
        "mean_tokens": mean,
        "keys": {name: figures(answers, sizes) for name, answers in by_key.items()},
        "other_counts": sum(a.status == "200" and a.prompt_tokens + a.answer_tokens != sizes[a.prompt] for a in every),
        "idle_cpu_ms_per_s": {role: 1e3 * rate for role, rate in idle.items()},
        "admitted_cpu_ms": {role: 1e3 * used / len(answers) for role, used in cpu_of_open.items()},
        "limited_cpu_ms": {role: 1e3 * used / len(every) for role, used in cpu.items()},
        "errors": sorted({a.error for a in every if a.status != "200"}, key=len)[:3],
    }


async def metered(
    gateway: Gateway, idle: Mapping[str, float], seconds: float, demands: Sequence[tuple[str, list[float]]]
) -> tuple[dict[str, list[Answer]], dict[str, float]]:
    """Send the demands of these keys at once; return the answers of each, and the CPU seconds by role above those of idle processes."""
    streams = {key.name: key.streams for key in KEYS} | {OPEN: [False, True]}
    before, began_at = gateway.cpu_s(), time.monotonic()
    answers = await asyncio.gather(*(send(gateway.urls, key, times, streams[key]) for key, times in demands))
    elapsed_s = time.monotonic() - began_at
    used = {role: at - before.get(role, 0.0) - idle.get(role, 0.0) * elapsed_s for role, at in gateway.cpu_s().items()}
    return {key: given for (key, _), given in zip(demands, answers, strict=True)}, used


def figures(answers: Sequence[Answer], sizes: Mapping[int, int]) -> dict[str, Any]:
    """Return what a key got. The exact count knows the length of each answer when the request comes."""
    amounts = [amount for answer in answers for amount in answer.amounts()]
    return {
        "answers": dict(Counter(answer.status for answer in answers)),
        "most_in_60_s": most_in_a_minute(amounts),
        "total": sum(amount for _, amount in amounts),
        "total_of_an_exact_count": exact([(answer.sent_at, sizes[answer.prompt]) for answer in answers], LIMIT),
    }


@contextlib.contextmanager
def started(setup: Setup, port: int, litellm: Path, folder: Path) -> Iterator[Gateway]:
    """Run a setup for the block. It listens on up to 21 ports from ``port``."""
    limits = {**{key.name: LIMIT for key in KEYS}, OPEN: NO_LIMIT}
    tenants = {} if setup.proxies else {name: {"tokens_per_minute": limit} for name, limit in limits.items()}
    config = config_of(folder, port, ingresses=setup.ingresses, limits=tenants, simulated={"eos_probability": EOS})
    with contextlib.ExitStack() as stack:
        url, root = stack.enter_context(fleet(config, folder))
        if not setup.proxies:
            yield Gateway([url], root)
            return
        redis = stack.enter_context(redis_server(port + 20, folder)) if setup.proxies > 1 else None
        file = litellm_config(setup, folder, url, limits, port + 20)
        ports = [port + 1 + i for i in range(setup.proxies)]
        proxies = [stack.enter_context(proxy(setup, litellm, file, each, folder)) for each in ports]
        yield Gateway([f"http://127.0.0.1:{each}" for each in ports], root, proxies, redis)


def litellm_config(setup: Setup, folder: Path, upstream: str, limits: Mapping[str, int], redis_port: int) -> Path:
    """Write LiteLLM's configuration; return its path. Redis shares counters alone: ``default_off`` caches no answer."""
    by_key = {key_of(name): limit for name, limit in limits.items()}
    requests = None if setup.reserves else NO_LIMIT
    (folder / "keys.py").write_text(_AUTHENTICATION.format(limits=by_key, requests=requests))
    target = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{upstream}/v1", "api_key": "none"}
    config: dict[str, Any] = {
        "model_list": [{"model_name": MODEL, "litellm_params": target}],
        "general_settings": {"custom_auth": "keys.authenticate"},
    }
    if setup.proxies > 1:
        cache = {"type": "redis", "host": "127.0.0.1", "port": redis_port, "mode": "default_off"}
        config["litellm_settings"] = {"cache": True, "cache_params": cache}
    path = folder / "litellm.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def proxy(
    setup: Setup, litellm: Path, config: Path, port: int, folder: Path
) -> contextlib.AbstractContextManager[psutil.Process]:
    """Run one proxy for the block, with the log level that LiteLLM's documentation gives for production."""
    command = [str(litellm.absolute()), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": _MASTER_KEY, "LITELLM_LOG": "ERROR"}
    local["LITELLM_TPM_TOKEN_RESERVATION_ENABLED"] = str(setup.reserves).lower()
    url = f"http://127.0.0.1:{port}/health/liveliness"
    return server(command, url, log=folder / f"litellm-{port}.log", environment=local, start_s=_PROXY_S)


@contextlib.contextmanager
def redis_server(port: int, folder: Path) -> Iterator[psutil.Process]:
    """Run a Redis for the block that keeps nothing on disk."""
    command = [
        "redis-server",
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(folder),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(10)


def versions(litellm: Path) -> dict[str, str]:
    import vllm

    ask_pip = [
        str(litellm.absolute().parent / "python"),
        "-c",
        "from importlib.metadata import version; print(version('litellm'))",
    ]
    redis = [shutil.which("redis-server") or "false", "--version"]
    return {
        "litellm": subprocess.run(ask_pip, check=True, capture_output=True, text=True).stdout.strip(),
        "redis": subprocess.run(redis, check=False, capture_output=True, text=True).stdout.split(" sha")[0],
        "python": platform.python_version(),
        "vllm": vllm.__version__,
    }


def table(report: Mapping[str, Any]) -> str:
    """Return the Markdown tables of a report."""
    rows = [
        "| setup | key | admitted | refused | other | most in 60 s | of the limit | of an exact count |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for setup, found in report["setups"].items():
        for name, key in found["keys"].items():
            counts = Counter(key["answers"])
            admitted, refused = counts.pop("200", 0), counts.pop("429", 0)
            excess = key["most_in_60_s"] / found["limit"] - 1
            part = key["total"] / key["total_of_an_exact_count"]
            rows.append(
                f"| {setup} | {name} | {admitted} | {refused} | {sum(counts.values())} | {key['most_in_60_s']} "
                f"| {100 * excess:+.1f} % | {100 * part:.1f} % |"
            )
    rows += [
        "",
        "| setup | ms of CPU per admitted request | per request of the keys with a limit | idle, ms per s |",
        "|---|---|---|---|",
    ]
    for setup, found in report["setups"].items():
        cells = [shown(found[name]) for name in ("admitted_cpu_ms", "limited_cpu_ms", "idle_cpu_ms_per_s")]
        rows.append(f"| {setup} | {' | '.join(cells)} |")
    return "\n".join(rows)


def shown(cpu: Mapping[str, float]) -> str:
    return ", ".join(f"{role} {value:.1f}" for role, value in sorted(cpu.items()) if value >= 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=[name for name, setup in SETUPS.items() if setup.reserves])
    parser.add_argument("--seconds", type=float, default=150.0, help="of the phase with limits")
    parser.add_argument("--port", type=int, default=8095, help="the first of 21 ports")
    parser.add_argument("--litellm", type=Path, default=Path(".venv-litellm/bin/litellm"))
    parser.add_argument("--out", type=Path, default=Path("results/quotas-litellm.json"), help="other setups in this file stay")
    arguments = parser.parse_args()
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"setups": {}}
    report["versions"] = versions(arguments.litellm)
    for setup in arguments.setups:
        with (
            tempfile.TemporaryDirectory() as name,
            started(SETUPS[setup], arguments.port, arguments.litellm, Path(name)) as gateway,
        ):
            print(f"{setup} is up", flush=True)
            report["setups"][setup] = asyncio.run(play(gateway, arguments.seconds))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1))
    print(report["versions"])
    print(table(report))


if __name__ == "__main__":
    main()

"""The bill of a running fleet is what vLLM counts of the engines' answers, and about the time in which the engines were busy.

vLLM counts tokens in the ingress. `tests/ingress/test_billed_tokens.py` compares the bill with a fake engine's own count.
"""

import csv
import hashlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml

from tests.chaos.records import ledger_lines
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, scrape

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PORT = 8043
KEYS = {"red": "sk-red", "blue": "sk-blue"}
NUM_EACH = 40
NUM_CHOICES = 5


@pytest.fixture(scope="module")
def billed(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("billed")
    config = configure(
        PORT,
        replicas={"min": 1, "max": 1},
        timeouts={"drain_s": 5.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
    )
    tenants = {
        name: {"keys": [{"id": f"{name}-1", "sha256": hashlib.sha256(key.encode()).hexdigest()}]} for name, key in KEYS.items()
    }
    (root / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    config["ingress"] |= {"ledger": {"dir": str(root / "ledger")}, "tenants_file": str(root / "tenants.yaml")}
    with fleet(config, root) as running:
        yield running


def ask(one: Fleet, tenant: str, number: int) -> tuple[int, int]:
    """Return prompt and output tokens of an answer, as its usage has them. Every second prompt of a tenant begins like all of them."""
    words = "the quick brown fox jumps over " * (30 if number % 2 else 2 + number % 7)
    body = {"model": MODEL, "prompt": words, "max_tokens": 5 + number % 20, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{one.url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEYS[tenant]}"}, timeout=120)
    assert answer.status_code == 200, answer.text
    found = answer.json()["usage"]
    return found["prompt_tokens"], found["completion_tokens"]


def test_the_sum_over_all_tenants_is_what_vllm_counts_of_the_engines_answers(billed: Fleet) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = {name: [pool.submit(ask, billed, name, number) for number in range(NUM_EACH)] for name in KEYS}
        answers = {name: [each.result() for each in tenant] for name, tenant in asked.items()}
    folder = Path(billed.config["ingress"]["ledger"]["dir"])
    wait_until(lambda: len(ledger_lines(folder)) >= len(KEYS) * NUM_EACH, limit_s=60.0, what="the ledger's lines")
    result = billed.command("tenants", "usage", str(folder), "--csv", "--by", "tenant")
    assert result.returncode == 0, result.stderr
    bill = {row["tenant"]: row for row in csv.DictReader(result.stdout.splitlines())}
    assert {name: (int(bill[name]["prompt_tokens"]), int(bill[name]["output_tokens"])) for name in KEYS} == {
        name: (sum(prompt for prompt, _ in each), sum(output for _, output in each)) for name, each in answers.items()
    }
    series = scrape(billed.url)

    def counted_by_vllm(name: str) -> float:
        return sum(value for (series_name, _), value in series.items() if series_name == f"vllm:{name}_total")

    for kind, counted in (
        ("prompt", counted_by_vllm("prompt_tokens")),
        ("output", counted_by_vllm("generation_tokens")),
        ("cached", counted_by_vllm("prefix_cache_hits")),
    ):
        total = sum(int(row[f"{kind}_tokens"]) for row in bill.values())
        assert counted > 0
        assert total == pytest.approx(counted, rel=0.01), kind
        labels = [(("kind", kind), ("model", MODEL), ("tenant", name)) for name in sorted(KEYS)]
        assert sum(series["serve_app_tenant_tokens_total", each] for each in labels) == total
    assert billed.command("ledger", "verify", str(folder)).returncode == 0


def test_gpu_seconds_are_about_the_time_in_which_the_engine_was_busy(billed: Fleet) -> None:
    folder = Path(billed.config["ingress"]["ledger"]["dir"])
    lines = ledger_lines(folder)
    assert all(line.gpu_s is not None and line.gpu_s > 0 for line in lines)
    begin, end = min(line.time for line in lines), max(line.time + line.total_s for line in lines)
    paid_s = sum(line.gpu_s or 0.0 for line in lines)
    # Eight clients keep the engine busy all the time. The costs were measured on a busy machine, and short prompts cost less than measured.
    assert 0.5 < paid_s / (end - begin) < 1.5


def test_choices_and_streams_that_clients_leave_are_billed_what_vllm_counts_of_the_engines_answers(billed: Fleet) -> None:
    """The engine reads the prompt for each choice, and the bill has it once."""
    folder = Path(billed.config["ingress"]["ledger"]["dir"])
    before, num_before = scrape(billed.url), len(ledger_lines(folder))
    body = {"model": MODEL, "prompt": "the quick brown fox " * 20, "temperature": 0.5, "ignore_eos": True, "n": 2}
    with httpx.Client(base_url=billed.url, headers={"authorization": f"Bearer {KEYS['red']}"}, timeout=120) as red:
        for number in range(NUM_CHOICES):
            assert red.post("/v1/completions", json={**body, "max_tokens": 10 + number}).status_code == 200
            with red.stream("POST", "/v1/completions", json={**body, "max_tokens": 500, "stream": True}) as stream:
                assert len(list(itertools.islice(stream.iter_raw(), 5 + number))) == 5 + number
    num_asked = 2 * NUM_CHOICES
    wait_until(lambda: len(ledger_lines(folder)) >= num_before + num_asked, limit_s=60.0, what="the ledger's lines")
    lines, series = ledger_lines(folder)[num_before:], scrape(billed.url)
    assert sorted(line.outcome for line in lines) == ["aborted"] * NUM_CHOICES + ["complete"] * NUM_CHOICES

    def counted_by_vllm(name: str) -> float:
        return sum(value - before.get(of, 0.0) for of, value in series.items() if of[0] == f"vllm:{name}_total")

    assert all(0 < line.output_tokens < 1000 for line in lines)
    assert sum(line.output_tokens for line in lines) == pytest.approx(counted_by_vllm("generation_tokens"), rel=0.01)
    assert 2 * sum(line.prompt_tokens for line in lines) == pytest.approx(counted_by_vllm("prompt_tokens"), rel=0.01)

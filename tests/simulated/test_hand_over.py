"""vLLM's scheduler ends requests at a hand-over with whole KV, or without; a real NIXL connector keeps the blocks."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.core.hand_over import HANDED_OVER
from serve_app.replica.kv_params import CAME_AT
from tests.simulated.engine_traffic import Traffic

pytestmark = pytest.mark.engine

BLOCK = 16
LEASE_S = 30


class Source:
    """An engine that hands requests over."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.scheduler = traffic.scheduler
        self.ended: dict[str, Any] = {}
        update = self.scheduler.update_from_output

        def noting(*args: Any) -> Any:
            outputs = update(*args)
            self._note(output for frame in outputs.values() for output in frame.outputs)
            return outputs

        self.scheduler.update_from_output = noting

    def hand_over(self, *names: str) -> None:
        self._note(output for outputs in self.scheduler.hand_over(names).values() for output in outputs)

    def _note(self, outputs: Iterable[Any]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                assert output.request_id not in self.ended
                self.ended[output.request_id] = output

    def params(self, name: str) -> dict[str, Any] | None:
        """Return where the KV is of a request that was handed over."""
        output = self.ended[name]
        assert output.stop_reason == HANDED_OVER
        assert output.new_token_ids == []
        params: dict[str, Any] | None = output.kv_transfer_params
        return params

    def tokens(self, name: str) -> int:
        return len(self.traffic.answers[name])

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def report(self, **finished: set[str]) -> None:
        """Report what the workers have sent or received."""
        from vllm.v1.outputs import KVConnectorOutput

        self.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(**finished))


@pytest.fixture
def make_source(make_traffic: Callable[..., Traffic]) -> Callable[..., Source]:
    """Return a function that makes an engine whose scheduler has vLLM's connector; its simulated workers move no KV."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

    from serve_app.replica.hand_over import handing_over

    def make(**engine_args: Any) -> Source:
        traffic = make_traffic(scheduler_of=handing_over, **engine_args)
        scheduler = traffic.scheduler
        extra = {"kv_lease_duration": LEASE_S}
        config = scheduler.vllm_config
        config.kv_transfer_config = KVTransferConfig("NixlConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        scheduler.connector = NixlPullConnector(config, KVConnectorRole.SCHEDULER, scheduler.kv_cache_config)
        scheduler.recompute_kv_load_failures = True
        scheduler.requires_kv_delivery = scheduler.connector.requires_kv_delivery
        return Source(traffic)

    return make


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_running_request_ends_with_the_kv_of_all_its_tokens_but_the_last(
    make_source: Callable[..., Source], is_async: bool, is_bounded: bool
) -> None:
    source = make_source(is_async=is_async, is_bounded=is_bounded)
    free = source.free_blocks()
    source.traffic.add("r", prompt=20, answer=50)
    while source.tokens("r") < 5:
        source.traffic.step()
    source.hand_over("r", "unknown")
    params = source.params("r")
    assert params is not None
    assert (params["do_remote_prefill"], params["remote_request_id"]) == (True, "r")
    assert (params["remote_num_tokens"], [len(blocks) for blocks in params["remote_block_ids"]]) == (24, [2])
    assert free - source.free_blocks() == 2
    source.traffic.step(3)  # a step that was under way adds nothing
    assert source.tokens("r") == 5
    assert source.scheduler.running == []
    source.report(finished_sending={"r"})
    assert source.free_blocks() == free
    assert not source.scheduler.requests


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_stepped", [False, True])
def test_kv_that_no_one_reads_is_freed_early_and_the_workers_later_report_means_nothing(
    make_source: Callable[..., Source], is_async: bool, is_stepped: bool
) -> None:
    source = make_source(is_async=is_async)
    free = source.free_blocks()
    for name in ("r", "s", "runs"):
        source.traffic.add(name, prompt=20, answer=50)
    while source.tokens("runs") < 5:
        source.traffic.step()
    source.hand_over("r", "s")
    if is_stepped:
        source.traffic.step(3)
    source.scheduler.free_kv(["r", "runs", "unknown"])
    source.scheduler.free_kv(["r"])
    assert source.scheduler.requests.keys() == {"s", "runs"}
    source.traffic.step(3)
    source.report(finished_sending={"r", "s"})
    assert source.scheduler.requests.keys() == {"runs"}
    source.traffic.finish()
    assert source.free_blocks() == free
    assert source.tokens("runs") == 50
    assert not source.scheduler._freed


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("prompt", "waits"), [(13, 0), (14, 0), (15, 2), (16, 1), (17, 0)])
def test_a_request_whose_last_token_begins_or_fills_a_block_ends_after_a_later_step(
    make_source: Callable[..., Source], prompt: int, waits: int, is_async: bool
) -> None:
    source = make_source(is_async=is_async)
    source.traffic.add("r", prompt=prompt, answer=20)
    while source.tokens("r") < 1:
        source.traffic.step()
    source.hand_over("r")
    while "r" not in source.ended:
        source.traffic.step()
    params = source.params("r")
    assert source.tokens("r") == 1 + waits
    assert params is not None
    total = prompt + 1 + waits
    assert (params["remote_num_tokens"], len(params["remote_block_ids"][0])) == (total - 1, -(-total // BLOCK))


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_without_an_answer_end_at_once_without_kv(make_source: Callable[..., Source], is_async: bool) -> None:
    source = make_source(is_async=is_async, max_num_seqs=2, max_num_batched_tokens=64)
    free = source.free_blocks()
    source.traffic.add("short", prompt=10, answer=50)
    while source.tokens("short") < 2:
        source.traffic.step()
    source.traffic.add("long", prompt=200, answer=5)
    source.traffic.step()
    source.traffic.add("queued", prompt=10, answer=5)
    source.hand_over("long", "queued")
    assert source.params("long") is source.params("queued") is None
    assert source.scheduler.requests.keys() == {"short"}
    source.traffic.finish()
    assert source.tokens("short") == 50
    assert source.free_blocks() == free


def test_under_async_scheduling_the_end_of_a_prompt_that_is_under_way_is_no_whole_kv(make_source: Callable[..., Source]) -> None:
    source = make_source(is_async=True)
    source.traffic.add("r", prompt=20, answer=5)
    source.traffic.step()
    request = source.scheduler.requests["r"]
    assert (request.num_computed_tokens, request.num_output_placeholders) == (20, 1)
    source.hand_over("r")
    assert source.params("r") is None


def test_a_preempted_request_ends_without_kv(make_source: Callable[..., Source]) -> None:
    source = make_source()
    source.traffic.add("r", prompt=20, answer=50)
    source.traffic.step(4)
    request = source.scheduler.requests["r"]
    source.scheduler._preempt(request, 0.0)
    source.hand_over("r")
    assert source.params("r") is None
    assert not source.scheduler.requests


def test_a_request_that_ends_by_itself_or_is_aborted_first_ends_as_ever(make_source: Callable[..., Source]) -> None:
    source = make_source()
    for name, prompt in (("last", 14), ("aborted", 14)):
        source.traffic.add(name, prompt=prompt, answer=2 if name == "last" else 9)
    source.traffic.step()
    source.traffic.step()
    assert source.ended["last"].stop_reason is None
    source.hand_over("last", "aborted")
    source.traffic.core.abort_requests(["aborted"])
    source.traffic.step(3)
    assert source.ended.keys() == {"last"}
    assert not source.scheduler._leaving


def test_an_engine_whose_blocks_do_not_correspond_keeps_no_kv(
    make_source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source()
    assert source.scheduler.keeps_kv()
    monkeypatch.setattr(source.scheduler.vllm_config.parallel_config, "decode_context_parallel_size", 2)
    assert not source.scheduler.keeps_kv()
    source.traffic.add("r", prompt=20, answer=50)
    source.traffic.step(4)
    source.hand_over("r")
    assert source.params("r") is None
    monkeypatch.undo()
    source.scheduler.connector = None
    assert not source.scheduler.keeps_kv()


@pytest.mark.parametrize(("waited_s", "is_late"), [(LEASE_S / 2 - 1.0, False), (LEASE_S / 2 + 1.0, True)])
def test_kv_that_was_read_after_half_of_the_lease_is_computed_again(
    make_source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch, waited_s: float, is_late: bool
) -> None:
    from serve_app.replica import hand_over

    target = make_source()
    monkeypatch.setattr(hand_over, "time", SimpleNamespace(monotonic=lambda: 100.0 + waited_s))
    target.traffic.add("r", prompt=40, answer=3)
    request = target.scheduler.requests["r"]
    request.kv_transfer_params = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "source",
        "remote_request_id": "r@0",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        CAME_AT: 100.0,
    }
    target.traffic.step()
    assert target.traffic.steps == [{}]
    target.report(finished_recving={"r"})
    target.traffic.step()
    assert target.traffic.steps[1:] == [{"r": 40 if is_late else 1}]
    target.traffic.finish()
    assert target.tokens("r") == 3

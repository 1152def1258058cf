"""The simulated connector answers vLLM's scheduler as the NIXL connector does; no engine is started here."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from serve_app.replica.kv_params import params_of
from serve_app.simulated.kv_transfers import Read
from serve_app.simulated.profiles import PROFILES

BLOCKS = [7, 8, 9]


class FakeTransfers:
    """Notes what it is to keep."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, int]] = []

    def keep(self, request_id: str, num_blocks: int) -> None:
        self.kept.append((request_id, num_blocks))


@pytest.fixture
def transfers() -> FakeTransfers:
    return FakeTransfers()


@pytest.fixture
def connector(transfers: FakeTransfers, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.envs import disable_envs_cache

    from serve_app.simulated.connector import SimulatedConnector

    disable_envs_cache()  # an engine of another test in this process may have filled it
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "15600")
    extra = {"kv_lease_duration": 20}
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            "SimulatedConnector", kv_role="kv_both", engine_id="one", kv_connector_extra_config=extra
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    made = SimulatedConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace())
    made.bind(transfers)  # type: ignore[arg-type]
    return made


def request(name: str, status: str = "RUNNING", *, prompt: int = 45, **params: Any) -> Any:
    from vllm.v1.request import RequestStatus

    return SimpleNamespace(
        request_id=name,
        status=RequestStatus[status],
        prompt_token_ids=[1] * prompt,
        num_computed_tokens=44,
        kv_transfer_params=params or None,
    )


def from_elsewhere(name: str) -> Any:
    """Return a request that comes with KV of another engine."""
    coming = request(name)
    coming.kv_transfer_params = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "two",
        "remote_request_id": f"{name}@0",
        "remote_host": "10.0.0.2",
        "remote_port": 15601,
    }
    return coming


def blocks(*ids: int) -> Any:
    return SimpleNamespace(get_unhashed_block_ids=lambda: list(ids))


def test_the_time_of_the_lease_is_the_configured_one(connector: Any) -> None:
    assert (connector.engine_id, connector.lease_s) == ("one", 20.0)


def test_a_request_that_is_handed_over_keeps_its_blocks_and_another_replica_takes_its_params(
    connector: Any, transfers: FakeTransfers
) -> None:
    leaving = request("r", "FINISHED_LENGTH_CAPPED", do_remote_decode=True, do_remote_prefill=False)
    connector.update_state_after_alloc(leaving, None, 0)  # as `HandingOver` does
    stays, params = connector.request_finished_all_groups(leaving, (BLOCKS,))
    assert (stays, transfers.kept) == (True, [("r", 3)])
    taken = params_of(msgspec.msgpack.encode(params), 45, 16, 1.0)
    assert (taken["remote_block_ids"], taken["remote_engine_id"]) == ([BLOCKS], "one")
    assert (taken["remote_host"], taken["remote_port"]) == ("10.0.0.1", 15600)
    assert connector.build_connector_meta(None).reads == []


@pytest.mark.parametrize(
    ("status", "params", "block_ids"),
    [
        ("FINISHED_STOPPED", {}, BLOCKS),
        ("FINISHED_ABORTED", {"do_remote_decode": True}, BLOCKS),
        ("FINISHED_STOPPED", {"do_remote_decode": True}, []),
        ("FINISHED_STOPPED", {"do_remote_prefill": False}, BLOCKS),
    ],
)
def test_other_requests_free_their_blocks(
    status: str, params: dict[str, Any], block_ids: list[int], connector: Any, transfers: FakeTransfers
) -> None:
    assert connector.request_finished(request("r", status, **params), block_ids) == (False, None)
    assert (transfers.kept, connector.build_connector_meta(None).reads) == ([], [])


def test_a_request_from_elsewhere_is_read_once_beside_the_steps(connector: Any) -> None:
    coming = from_elsewhere("r")
    assert connector.get_num_new_matched_tokens(coming, 16) == (29, True)
    connector.update_state_after_alloc(coming, blocks(8, 9), 29)
    assert connector.build_connector_meta(None).reads == [Read("r", (8, 9), "10.0.0.2", 15601, "two", "r@0")]
    assert connector.get_num_new_matched_tokens(coming, 0) == (0, False)  # after a failure
    connector.update_state_after_alloc(coming, blocks(7, 8, 9), 0)
    assert connector.build_connector_meta(None).reads == []


def test_what_needs_no_read_frees_the_source(connector: Any) -> None:
    cached, aborted = from_elsewhere("cached"), from_elsewhere("aborted")
    assert connector.get_num_new_matched_tokens(cached, 45) == (0, False)
    connector.update_state_after_alloc(cached, blocks(9), 0)
    assert connector.request_finished(aborted, []) == (False, None)
    reads = connector.build_connector_meta(None).reads
    assert [(read.remote_id, read.block_ids) for read in reads] == [("cached@0", ()), ("aborted@0", ())]


def test_a_client_of_ours_never_reads(connector: Any) -> None:
    assert connector.get_num_new_matched_tokens(request("r"), 0) == (0, False)


def test_engines_of_one_model_have_one_hash_before_there_is_a_scheduler() -> None:
    from vllm.config import KVTransferConfig

    from serve_app.simulated.executor import SimulatedExecutor

    def digest(profile: str) -> str:
        executor = object.__new__(SimulatedExecutor)
        executor.vllm_config = SimpleNamespace(kv_transfer_config=KVTransferConfig("SimulatedConnector", kv_role="kv_both"))
        executor.profile = PROFILES[profile]
        ((metadata,),) = (worker.values() for worker in executor.get_kv_connector_handshake_metadata())
        return str(metadata.compatibility_hash)

    assert digest("h100-llama-8b") == digest("a10g-llama-8b") != digest("a10g-llama-7b")

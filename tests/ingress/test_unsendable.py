"""A request that cannot be put on the wire ends alone, by an error of its client, and no other request is lost."""

from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.serial_utils import MsgpackEncoder

from serve_app import vllm_versions
from serve_app.core.fleet_report import outstanding_tokens
from serve_app.errors import BadRequest, NotSupported, RequestTooLarge, SendFailed
from serve_app.ingress.fleet.intake import Intake
from serve_app.ingress.http.error_answers import FleetError
from tests.doubles.fake_engine import VLLM_VERSION, FakeEngine
from tests.doubles.fake_front_end import ARCHITECTURE
from tests.doubles.fleet import Fleet, fleet, in_loop, settings, until
from tests.ingress.helpers import error_of

PROMPT = [1, 2, 3]
SURROGATE = "\ud800"
HUGE = 10**30
UNENCODABLE: dict[str, dict[str, Any]] = {
    "stop": {"stop": [SURROGATE]},
    "bad_words": {"bad_words": [SURROGATE]},
    "stop_token_ids": {"stop_token_ids": [HUGE]},
    "thinking_token_budget": {"thinking_token_budget": HUGE},
    "vllm_xargs": {"extra_args": {"a": SURROGATE}},
    "response_format": {"structured_outputs": StructuredOutputsParams(json={"type": "integer", "maximum": HUGE})},
    "session_id": {"beside": {"session_id": SURROGATE}},
    "chat_template_kwargs": {"beside": {"reasoning_parser_kwargs": {"chat_template_kwargs": {"a": HUGE}}}},
}
"""What a client calls it -> what vLLM makes of it: sampling parameters, or fields ``beside`` them. vLLM's validation passes them,
its encoder does not."""


async def assert_serves(f: Fleet, request_id: str) -> None:
    """Assert that the replica runs this request, ends it, and holds nothing more of this ingress's."""
    await until(lambda: f.running("a") == [f"{request_id}@0"])
    f.replicas["a"].engine.step(8)
    await until(lambda: not f.client.fleet.requests)
    assert outstanding_tokens(f.client.fleet) == 0
    await until(lambda: not f.front.request_states)


@pytest.mark.parametrize("param", UNENCODABLE)
@in_loop
async def test_a_value_that_cannot_be_encoded_is_refused_by_its_name_and_leaves_nothing(param: str) -> None:
    async with fleet(settings(protocol={"credit": 1})) as f:
        await f.join("a")
        bad = await f.front.add("bad", PROMPT, **UNENCODABLE[param])
        refusal = error_of(bad)
        assert isinstance(refusal, BadRequest)
        assert (refusal.http_status, refusal.param) == (400, param)
        assert f.client.fleet.outcomes == {"failed": 1}
        await f.front.add("r", PROMPT)
        await assert_serves(f, "r")


def image() -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", "x", PlaceholderRange(offset=0, length=1))


def let_speak(monkeypatch: pytest.MonkeyPatch, *architectures: str) -> None:
    """Let an ingress speak to an engine with vLLM 9.9.9, and send it media of these architectures."""
    monkeypatch.setattr(vllm_versions, "_OLDER_INGRESS", {(VLLM_VERSION, "9.9.9"): frozenset(architectures)})


@pytest.mark.parametrize("waits", [False, True])
@in_loop
async def test_an_engine_of_another_vllm_version_gets_no_media_that_it_processes_otherwise(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_speak(monkeypatch, "Other")
    async with fleet() as f:
        if not waits:
            await f.join("a", engine=FakeEngine(version="9.9.9"))
        stream = await f.front.add("image", PROMPT, beside={"mm_features": [image()]})
        await f.front.add("text", PROMPT)
        if waits:
            await f.join("a", engine=FakeEngine(version="9.9.9"))
        await until(lambda: f.running("a") == ["text@0"])
        refusal = error_of(stream)
        assert isinstance(refusal, NotSupported)
        assert refusal.http_status == 400
        assert str(refusal) == (
            f"media (images, sound, video) for {ARCHITECTURE} is not supported; the ingress has vLLM {VLLM_VERSION}, the engine 9.9.9, "
            "and they may process media of this architecture differently: ask the operator to run the CUDA image in all pods"
        )
        assert f.client.fleet.outcomes == {"failed": 1}


@in_loop
async def test_an_engine_of_another_vllm_version_gets_media_that_it_processes_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    let_speak(monkeypatch, "Other", ARCHITECTURE)
    async with fleet() as f:
        await f.join("a", engine=FakeEngine(version="9.9.9"))
        await f.front.add("image", PROMPT, beside={"mm_features": [image()]})
        await assert_serves(f, "image")


@in_loop
async def test_media_go_to_an_engine_of_the_ingress_s_version_and_do_not_resume_at_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_speak(monkeypatch)
    async with fleet() as f:
        await f.join("a")
        stream = await f.front.add("image", PROMPT, beside={"mm_features": [image()]})
        await until(lambda: f.running("a") == ["image@0"])
        await f.join("b", engine=FakeEngine(version="9.9.9"))
        f.replicas["a"].stop_listening()
        await until(lambda: stream.error is not None)
        assert isinstance(error_of(stream), NotSupported)
        assert f.running("b") == []


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@in_loop
async def test_a_value_that_is_too_deep_to_be_read_is_refused_and_leaves_nothing() -> None:
    async with fleet() as f:
        await f.join("a")
        with pytest.raises(FleetError) as refusal:
            await f.front.add("bad", PROMPT, extra_args={"a": nested(5000)})
        assert isinstance(refusal.value.error, BadRequest)
        assert refusal.value.error.param == "vllm_xargs"
        assert (f.front.request_states, f.client.fleet.requests) == ({}, {})
        await f.front.add("r", PROMPT)
        await assert_serves(f, "r")


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (RecursionError("maximum recursion depth exceeded"), "request: has values that are nested too deeply"),
        (KeyError("a"), "request r could not be sent to a replica: KeyError: 'a'"),
    ],
)
@in_loop
async def test_a_request_that_cannot_be_read_is_refused_and_leaves_nothing(
    raised: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(Intake, "arrival", fail)
    async with fleet() as f:
        with pytest.raises(FleetError) as refusal:
            await f.front.add("r", PROMPT)
        assert str(refusal.value.error) == told
        assert (f.front.request_states, f.client.fleet.requests) == ({}, {})


@in_loop
async def test_bad_requests_that_waited_for_a_link_end_and_those_around_them_start() -> None:
    async with fleet() as f:
        await f.front.add("first", PROMPT)
        bad = [await f.front.add(f"bad{i}", PROMPT, **params) for i, params in enumerate(UNENCODABLE.values())]
        await f.front.add("last", PROMPT)
        await f.join("a")
        await until(lambda: f.running("a") == ["first@0", "last@0"])
        assert {type(error_of(b)) for b in bad} == {BadRequest}
        assert f.client.fleet.outcomes == {"failed": len(bad)}


@in_loop
async def test_a_freed_place_passes_over_a_thousand_bad_requests_to_the_good_one_behind_them() -> None:
    async with fleet(settings(protocol={"credit": 1}, ingress={"max_waiting_requests": 2000})) as f:
        await f.join("a")
        first = await f.front.add("first", PROMPT, max_tokens=1)
        await until(lambda: f.running("a") == ["first@0"])
        for i in range(1000):
            await f.front.add(f"bad{i}", PROMPT, stop=[SURROGATE])
        await f.front.add("last", PROMPT)
        f.replicas["a"].engine.step()
        await until(lambda: first.finished)
        await assert_serves(f, "last")


@in_loop
async def test_an_instruction_that_fails_by_a_fault_of_ours_costs_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MsgpackEncoder, obj: Any) -> Any:
        if getattr(obj, "request_id", "") == "r0@0":
            raise KeyError("a bug")
        return encode(self, obj)

    async with fleet() as f:
        streams = [await f.front.add(f"r{i}", PROMPT) for i in range(2)]
        encode = MsgpackEncoder.encode
        monkeypatch.setattr(MsgpackEncoder, "encode", refuse)
        await f.join("a")
        await until(lambda: f.running("a") == ["r1@0"])
        assert isinstance(error_of(streams[0]), SendFailed)


@in_loop
async def test_a_failure_that_cannot_be_delivered_does_not_stop_the_start_of_the_next(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(settings(protocol={"credit": 1})) as f:
        await f.front.add("bad", PROMPT, stop=[SURROGATE])
        await f.front.add("r", PROMPT)
        monkeypatch.setattr(f.front, "abort_requests", None)
        await f.join("a")
        await until(lambda: f.running("a") == ["r@0"])
        assert "FailRequest was not carried out" in caplog.text


def large_prompt() -> list[int]:
    return [100_000] * 400_000  # 5 bytes each; the smallest limit of a frame is 1 MiB


@in_loop
async def test_a_request_that_fits_no_frame_ends_alone() -> None:
    async with fleet(settings(protocol={"max_frame_bytes": 1 << 20})) as f:
        await f.join("a")
        await f.front.add("r", PROMPT)
        large = await f.front.add("large", large_prompt())
        assert isinstance(error_of(large), RequestTooLarge)
        await until(lambda: f.running("a") == ["r@0"])
        assert f.client.fleet.outcomes == {"failed": 1}


@in_loop
async def test_siblings_that_waited_and_fit_no_frame_end_together_and_those_behind_them_start() -> None:
    async with fleet(settings(protocol={"max_frame_bytes": 1 << 20})) as f:
        large = [await f.front.add(f"{i}_r", large_prompt(), parent="r") for i in range(2)]
        await f.front.add("next", PROMPT)
        await f.join("a")
        await until(lambda: f.running("a") == ["next@0"])
        assert isinstance(error_of(large[0]), RequestTooLarge)
        assert f.front.request_states.keys() == f.client.fleet.requests.keys() == {"next"}

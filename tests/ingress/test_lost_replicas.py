"""Requests survive the loss of their replica, over real links on the loopback interface; fake engines compute only when a test says so."""

import asyncio
from functools import partial
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackEncoder

from serve_app.errors import EngineDied, ReplicaLost
from tests.doubles.fake_engine import answer
from tests.doubles.fleet import Fleet, fleet, in_loop, settings, until
from tests.ingress.helpers import PROMPT, error_of, is_running


@in_loop
async def test_a_replica_that_dies_in_a_stream_is_followed_by_another_after_prompt_and_emitted() -> None:
    async with fleet() as f:
        await f.join("a", "b")
        stream = await f.front.add("r", PROMPT, max_tokens=6)
        await until(lambda: f.running("a") == ["r@0"])
        f.replicas["a"].engine.step(2)
        await until(lambda: len(stream.token_ids) == 2)
        f.replicas["a"].stop_listening()
        await until(lambda: f.running("b") == ["r@1"])
        (resumed,) = f.replicas["b"].engine.added
        assert resumed.prompt_token_ids == PROMPT + answer(PROMPT, 2)
        assert resumed.sampling_params.max_tokens == 4
        assert (f.replicas["a"].engine.num_emitted, f.replicas["b"].engine.num_emitted) == ({"r@0": 0}, {"r@1": 2})
        f.replicas["b"].engine.step(9)
        await until(lambda: stream.finished)
        assert stream.token_ids == answer(PROMPT, 6)
        assert f.client.fleet.failover.gaps.counts.keys() == {"continue"}
        await until(lambda: f.replicas["a"].engine.aborted == ["r@0"])


@in_loop
async def test_a_loss_is_shown_with_its_cause_until_there_is_a_link_again() -> None:
    async with fleet() as f:
        await f.join("killed", "cut", "drained")
        lost = f.client.links.lost
        await f.replicas["killed"].server.close("engine_dead", str(EngineDied(EngineDied.NO_MESSAGE)))
        await f.replicas["drained"].server.close("drained", "the replica stopped")
        f.replicas["cut"].relay.refuse()
        await until(lambda: not f.client.fleet.replicas)
        assert {each.replica_id: each.cause for each in lost.shown(leased=[], now=0.0)} == {
            "killed": "its engine was killed, or crashed without a message",
            "cut": "the connection to it broke off: its process was killed, or the network failed",
        }
        f.replicas["cut"].relay.accept()
        await until(lambda: "cut" in f.client.fleet.replicas)
        assert [each.replica_id for each in lost.shown(leased=[], now=0.0)] == ["killed"]


@in_loop
async def test_a_request_whose_history_matters_is_replayed_without_a_seam() -> None:
    async with fleet() as f:
        await f.join("a", "b")
        stream = await f.front.add("r", PROMPT, max_tokens=6, frequency_penalty=0.5)
        await until(lambda: f.running("a") == ["r@0"])
        f.replicas["a"].engine.step(2)
        await until(lambda: len(stream.token_ids) == 2)
        f.replicas["a"].stop_listening()
        await until(lambda: f.running("b") == ["r@1"])
        assert f.replicas["b"].engine.added[0].prompt_token_ids == PROMPT
        assert f.replicas["b"].engine.num_emitted == {"r@1": 0}
        for count in (1, 2, 3):
            f.replicas["b"].engine.step(count)
        await until(lambda: stream.finished)
        assert stream.token_ids == answer(PROMPT, 6)


@in_loop
async def test_a_link_that_was_cut_is_dialed_again_and_the_request_continues_there() -> None:
    async with fleet() as f:
        await f.join("a")
        stream = await f.front.add("r", PROMPT, max_tokens=3)
        await until(lambda: f.running("a") == ["r@0"])
        f.replicas["a"].engine.step(1)
        await until(lambda: len(stream.token_ids) == 1)
        f.replicas["a"].relay.cut()
        await until(lambda: f.running("a") == ["r@1"])
        f.replicas["a"].engine.step(2)
        await until(lambda: stream.finished)
        assert stream.token_ids == answer(PROMPT, 3)


@in_loop
async def test_outputs_of_an_old_attempt_that_come_on_a_new_link_reach_no_client() -> None:
    async with fleet() as f:
        await f.join("a")
        stream = await f.front.add("r", PROMPT, max_tokens=3)
        await until(lambda: f.running("a") == ["r@0"])
        engine = f.replicas["a"].engine
        engine.step(1)
        await until(lambda: len(stream.token_ids) == 1)
        f.replicas["a"].relay.cut()
        await until(lambda: f.running("a") == ["r@1"])
        slot, _, _ = engine.running["r@1"]  # a new link gets the lowest free slot, which the old one had
        late = EngineCoreOutputs(outputs=[EngineCoreOutput("r@0", answer(PROMPT, 3)[1:])], timestamp=1.0)
        engine.emit_outputs(slot, [bytes(b) for b in MsgpackEncoder().encode(late)])
        engine.step(2)  # on the same link, so behind the late ones
        await until(lambda: stream.finished)
        assert stream.token_ids == answer(PROMPT, 3)


@in_loop
async def test_a_silent_replica_is_ejected_and_its_request_continues_elsewhere() -> None:
    limits = {"heartbeat_interval_s": 0.02, "heartbeat_timeout_s": 3.0}
    async with fleet(settings(protocol=limits)) as f:
        await f.join("a")
        await f.front.add("r", PROMPT)
        await until(lambda: f.running("a") == ["r@0"])
        await f.join("b")
        heartbeats = asyncio.create_task(f.replicas["b"].server.heartbeats())
        f.replicas["a"].relay.freeze()
        await until(lambda: f.running("b") == ["r@1"])
        heartbeats.cancel()


SMALL_BUFFER = {"max_frame_bytes": 1 << 20, "send_buffer_bytes": 1 << 20}
LARGE_PROMPT = [100_000] * 50_000
"""250 KB on the wire."""


@in_loop
async def test_a_burst_larger_than_the_send_buffer_costs_no_link_and_loses_no_request() -> None:
    async with fleet(settings(protocol=SMALL_BUFFER)) as f:
        await f.join("a")
        streams = [await f.front.add(f"r{n}", LARGE_PROMPT, max_tokens=1) for n in range(64)]
        await until(lambda: len(f.running("a")) == 64)
        await f.join("b")
        await f.replicas["a"].server.close("drained", "the replica stopped")  # all 64 go to b in one turn of the loop
        await until(lambda: len(f.running("b")) == 64 or f.client.fleet.failover.resumptions > 64)
        assert f.client.fleet.failover.resumptions == 64, "b's link held"
        f.replicas["b"].engine.step()
        await until(lambda: all(s.finished for s in streams))


@in_loop
async def test_what_a_full_link_has_no_room_for_is_sent_once_there_is_and_an_aborted_request_never() -> None:
    async with fleet(settings(protocol=SMALL_BUFFER | {"heartbeat_timeout_s": 60.0})) as f:
        ids = await filled(f)
        await f.client.abort_requests_async([ids[-1]])
        f.replicas["a"].relay.thaw()
        await until(lambda: len(f.running("a")) >= len(ids) - 1)
        await f.front.add("last", PROMPT)
        await until(lambda: "last@0" in f.running("a"))
        assert f.running("a") == [f"{i}@0" for i in [*ids[:-1], "last"]]


@in_loop
async def test_what_was_never_sent_to_a_replica_that_broke_off_is_no_suspect() -> None:
    async with fleet(settings(protocol=SMALL_BUFFER | {"heartbeat_timeout_s": 60.0})) as f:
        ids = await filled(f)
        f.replicas["a"].stop_listening()
        await until(lambda: not f.client.fleet.replicas)
        requests = f.client.fleet.requests
        assert [(requests[i].suspect_of, requests[i].trail.ends) for i in (ids[0], ids[-1])] == [
            ("a", ["broke_off"]),
            (None, ["moved"]),
        ]


async def filled(f: Fleet) -> list[str]:
    """Let a replica join that does not read; return the ids of requests that it was given, of which the last are not sent."""
    await f.join("a")
    f.replicas["a"].relay.freeze()
    ids: list[str] = []
    while len(f.client.links["a"].unsent) < 3:
        ids.append(f"r{len(ids)}")
        await f.front.add(ids[-1], LARGE_PROMPT)
        await asyncio.sleep(0)
    return ids


@in_loop
async def test_a_request_given_to_a_replica_after_its_last_word_is_no_suspect() -> None:
    async with fleet(settings(protocol={"credit": 1})) as f:
        await f.join("a")
        await f.front.add("first", PROMPT, max_tokens=1)
        await until(lambda: f.running("a") == ["first@0"])
        await f.front.add("next", PROMPT)
        f.replicas["a"].engine.step()  # no await between the two: the place is free when the link is closed already
        await f.replicas["a"].server.close("engine_dead", "")
        await until(lambda: not f.client.fleet.replicas)
        after = f.client.fleet.requests["next"]
        assert [r.request_id for r in f.replicas["a"].engine.added] == ["first@0"]
        assert (after.trail.ends, after.deaths, after.suspect_of) == (["moved"], 0, None)


@in_loop
async def test_a_stream_outlives_any_number_of_drained_replicas() -> None:
    async with fleet() as f:
        stream = await f.front.add("r", PROMPT, max_tokens=7)
        for attempt in range(6):
            name = f"replica-{attempt}"
            await f.join(name)
            await until(partial(is_running, f, name, f"r@{attempt}"))
            f.replicas[name].engine.step()
            await until(lambda given=attempt + 1: len(stream.token_ids) == given)  # type: ignore[misc]
            await f.replicas[name].server.close("drained", "the replica stopped")
        await f.join("last")
        await until(lambda: f.running("last") == ["r@6"])
        f.replicas["last"].engine.step()
        await until(lambda: stream.finished)
        assert stream.token_ids == answer(PROMPT, 7)
        assert f.client.fleet.outcomes == {"complete": 1}


@in_loop
async def test_an_engines_last_words_go_to_the_log_and_no_client_reads_them(caplog: pytest.LogCaptureFixture) -> None:
    unknown: dict[str, Any] = {"extra_args": {"mine": 1}, "temperature": 1.0}
    async with fleet() as f:
        await f.join("a")
        stream = await f.front.add("r", PROMPT, **unknown)
        await until(lambda: f.running("a") == ["r@0"])
        f.replicas["a"].engine.step()
        await until(lambda: stream.token_ids)
        await f.replicas["a"].server.close("engine_dead", "ValueError: another client's prompt")
        await until(lambda: stream.error)
        told = str(error_of(stream))
        assert told == (
            "the replica was lost while it held request r: its engine died; an answer like this one cannot be continued elsewhere"
        )
        assert (
            'replica a of tiny lost: the peer closed the link (engine_dead): "ValueError: another client\'s prompt"'
            in caplog.text
        )


@in_loop
async def test_what_came_in_one_piece_with_a_goodbye_is_delivered() -> None:
    async with fleet() as f:
        await f.join("a")
        stream = await f.front.add("r", PROMPT, max_tokens=2)
        await until(lambda: f.running("a") == ["r@0"])
        f.replicas["a"].engine.step(2)  # no await between the two: the relay reads both at once
        await f.replicas["a"].server.close("drained", "")
        await until(lambda: stream.finished)
        assert stream.token_ids == answer(PROMPT, 2)
        assert f.client.fleet.outcomes == {"complete": 1}


@in_loop
async def test_a_lost_sibling_that_cannot_resume_ends_the_others_and_no_other_request() -> None:
    unknown: dict[str, Any] = {"extra_args": {"mine": 1}, "temperature": 1.0}
    async with fleet(settings(protocol={"credit": 2})) as f:
        await f.join("a")
        first = await f.front.add("0_r", PROMPT, parent="r", **unknown)
        other = await f.front.add("other", PROMPT)
        await f.front.add("1_r", PROMPT, parent="r", **unknown)
        await f.front.add("next", PROMPT)
        await until(lambda: f.running("a") == ["0_r@0", "other@0"])
        f.replicas["a"].engine.step()
        await until(lambda: len(other.token_ids) == len(first.token_ids) == 1)
        await f.join("b")  # takes "1_r" and "next"; with "a" gone "other" waits for one of them to end
        await until(lambda: f.running("b") == ["1_r@0", "next@0"])
        f.replicas["a"].stop_listening()
        await until(lambda: f.running("b") == ["next@0", "other@1"])
        assert isinstance(error_of(first), ReplicaLost)
        assert f.client.fleet.requests.keys() == {"next", "other"}
        assert f.client.fleet.outcomes == {"failed": 2}


@in_loop
async def test_a_sibling_that_would_start_after_the_failure_does_not() -> None:
    unknown: dict[str, Any] = {"extra_args": {"mine": 1}, "temperature": 1.0}
    async with fleet(settings(protocol={"credit": 1})) as f:
        await f.join("a")
        first = await f.front.add("0_r", PROMPT, parent="r", **unknown)
        await until(lambda: f.running("a") == ["0_r@0"])
        f.replicas["a"].engine.step()
        await until(lambda: len(first.token_ids) == 1)
        await f.join("b")
        await f.front.add("busy", PROMPT, max_tokens=1)
        await f.front.add("1_r", PROMPT, parent="r", **unknown)
        await f.front.add("next", PROMPT)
        await until(lambda: f.running("b") == ["busy@0"])
        f.replicas["b"].server.start_drain(60.0)
        await until(lambda: f.client.fleet.replicas["b"].draining)
        f.replicas["a"].relay.cut()
        # The link comes back, and with it the room for "1_r", which its sibling's failure has ended meanwhile.
        await until(lambda: f.running("a") == ["next@0"])
        assert isinstance(error_of(first), ReplicaLost)
        assert f.client.fleet.requests.keys() == {"busy", "next"}

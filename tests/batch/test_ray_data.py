"""``predict`` runs here on a local Ray of its own, against a small HTTP server that counts the requests."""

import json
import tempfile
from collections.abc import Iterator

import pytest

from serve_app.batch.client import Failure, Limits, Reply
from serve_app.batch.ray_data import _with_outcomes, predict, refuse_columns
from serve_app.errors import BatchError
from tests.batch.service import Service, block_of_the_docs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    # A short path: Ray's sockets are below it, whose paths have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-data-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        yield
        ray.shutdown()


def test_each_row_has_its_answer_or_its_reason_beside_its_own_columns(cluster: None, service: Service) -> None:
    import ray

    service.verdict = lambda prompt: 400 if prompt == "prompt 7" else 503 if service.asked[prompt] < 2 else 200
    dataset = ray.data.from_items([{"id": i, "prompt": f"prompt {i}"} for i in range(100)])
    answered = predict(dataset, service.url, parameters={"max_tokens": 8}, batch_size=16)
    rows = {row["id"]: row for row in answered.take_all()}
    assert sorted(rows) == list(range(100))
    assert rows.pop(7) == {"id": 7, "prompt": "prompt 7", "answer": None, "response": None, "error": "request_failed: no: 400"}
    assert {i: (row["answer"], row["error"]) for i, row in rows.items()} == {i: (f"PROMPT {i}", None) for i in rows}
    assert json.loads(rows[0]["response"])["usage"]["total_tokens"] == 5
    assert service.asked == {f"prompt {i}": 1 if i == 7 else 2 for i in range(100)}
    assert {body["max_tokens"] for body in service.bodies} == {8}


def test_messages_and_texts_to_go_on_with(cluster: None, service: Service) -> None:
    import ray

    chats = ray.data.from_items([{"chat": [{"role": "user", "content": "a"}]}, {"chat": [{"role": "user", "content": "b"}]}])
    assert sorted(row["answer"] for row in predict(chats, service.url, "m", column="chat").take_all()) == ["A", "B"]
    texts = ray.data.from_items([{"prompt": "c"}])
    assert predict(texts, service.url, "m", chat=False).take_all()[0]["answer"] == "C"
    assert service.bodies[-1] == {"model": "m", "prompt": "c"}


def test_the_example_of_the_docs_runs(cluster: None, service: Service) -> None:
    exec(block_of_the_docs(service, "ray_data"), {})
    assert service.asked == {"What is the capital of France?": 1}


def test_a_service_that_is_away_fails_the_dataset_and_no_row(cluster: None, service: Service) -> None:
    import ray

    service.verdict = lambda prompt: 503
    with pytest.raises(Exception, match="nothing was answered for"):
        predict(ray.data.from_items([{"prompt": "a"}]), service.url, "m", limits=Limits(patience_s=0.5)).take_all()


def test_half_a_surrogate_pair_in_an_answer_fails_no_row() -> None:
    import pyarrow as pa

    bodies = [{"choices": [{"message": {"content": text}}]} for text in ("fine \u00e9", "half \ud83d")]
    outcomes: list[Reply | Failure] = [*(Reply(body, "", 1) for body in bodies), Failure("request_failed", "\ud83d")]
    rows = _with_outcomes(pa.table({"prompt": ["a", "b", "c"]}), outcomes).to_pylist()
    assert [row["answer"] for row in rows] == ["fine \u00e9", "half ?", None]
    assert [row["error"] for row in rows] == [None, None, "request_failed: ?"]
    assert "\u00e9" in rows[0]["response"], "other characters are no escapes"
    assert [json.loads(row["response"]) for row in rows[:2]] == bodies


def test_columns_that_cannot_be_asked_or_added_are_named() -> None:
    with pytest.raises(BatchError, match="the dataset has no column 'text'; name the prompts' column: one of prompt, id"):
        refuse_columns(["prompt", "id"], "text")
    with pytest.raises(BatchError, match="the dataset has a column 'error' already; rename it before predict"):
        refuse_columns(["prompt", "error"], "prompt")

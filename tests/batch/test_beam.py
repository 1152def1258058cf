"""``FleetModelHandler`` runs here in pipelines of Beam's own DirectRunner, against a small HTTP server that counts the requests."""

import json
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping, ModelMetadata, PredictionResult, RunInference
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows, GlobalWindows, TimestampedValue

from serve_app.batch.apache_beam import Failure, FleetModelHandler, Limits, SplitFailures
from serve_app.errors import BatchError, ServiceAway
from tests.batch.service import Service, block_of_the_docs

pytestmark = pytest.mark.timeout(240)
IMPATIENT = Limits(patience_s=0.5, tries=2)


@dataclass(frozen=True)
class Message:
    """As users of Beam's own chat handler have them."""

    role: str
    content: str


def text(prediction: PredictionResult) -> str:
    return str(prediction.inference["choices"][0]["message"]["content"])


def row(prediction: PredictionResult) -> tuple[str, str, str | None]:
    return str(prediction.example), text(prediction), prediction.model_id


def counters(result: Any) -> dict[str, int]:
    found = result.metrics().query(MetricsFilter().with_namespace("serve_app"))["counters"]
    return {metric.key.metric.name: metric.committed for metric in found}


def test_each_kind_of_example_has_its_answer_and_the_arguments_are_in_each_request(service: Service) -> None:
    examples: list[Any] = [
        "one",
        {"prompt": "two", "max_tokens": 9},
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "three"}],
        (Message("user", "four"),),
        {"url": "/v1/completions", "body": {"prompt": "five", "model": "other"}},
    ]
    with beam.Pipeline() as pipeline:
        predictions = (
            pipeline
            | beam.Create(examples)
            | RunInference(FleetModelHandler(service.url), inference_args={"max_tokens": 8, "temperature": 0})
        )
        expected = list(
            zip([str(e) for e in examples], ["ONE", "TWO", "THREE", "FOUR", "FIVE"], ["tiny"] * 4 + ["other"], strict=True)
        )
        assert_that(predictions | beam.Map(row), equal_to(expected))
    asked = {body.get("prompt") or body["messages"][-1]["content"]: body for body in service.bodies}
    assert asked["one"] == {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "one"}]}
    assert (asked["two"]["max_tokens"], asked["two"]["temperature"]) == (9, 0)
    assert [message["role"] for message in asked["three"]["messages"]] == ["system", "user"]
    assert asked["four"]["messages"] == [{"role": "user", "content": "four"}]
    assert asked["five"] == {"model": "other", "prompt": "five"}


def test_texts_to_go_on_with_and_the_workers_own_key(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_API_KEY", "secret")
    with beam.Pipeline() as pipeline:
        predictions = pipeline | beam.Create(["a"]) | RunInference(FleetModelHandler(service.url, "m", chat=False))
        assert_that(predictions | beam.Map(lambda p: p.inference["choices"][0]["text"]), equal_to(["A"]))
    assert service.bodies == [{"model": "m", "prompt": "a"}]
    assert service.keys == {"Bearer secret"}


def test_a_full_service_is_waited_for_and_beams_metrics_tell_it(service: Service) -> None:
    service.verdict = lambda prompt: 503 if service.asked[prompt] < 3 else 200
    prompts = [f"prompt {i}" for i in range(60)]
    pipeline = beam.Pipeline()
    predictions = pipeline | beam.Create(prompts) | RunInference(FleetModelHandler(service.url, "m"))
    assert_that(predictions | beam.Map(text), equal_to([prompt.upper() for prompt in prompts]))
    result = pipeline.run()
    result.wait_until_finish()
    assert service.asked == dict.fromkeys(prompts, 3)
    expected = {"num_inferences": 60, "requests_sent": 180, "failed_requests": 0, "prompt_tokens": 120, "completion_tokens": 180}
    assert {name: counters(result).get(name) for name in expected} == expected


def test_the_threads_of_a_worker_share_its_places(service: Service) -> None:
    service.delay_s = 0.02
    options = PipelineOptions(direct_running_mode="multi_threading", direct_num_workers=4)
    handler = FleetModelHandler(service.url, "m", limits=Limits(concurrency=6), min_batch_size=4, max_batch_size=8)
    with beam.Pipeline(options=options) as pipeline:
        prompts = pipeline | beam.Create([f"prompt {i}" for i in range(200)]) | beam.Reshuffle()
        assert_that(prompts | RunInference(handler) | beam.combiners.Count.Globally(), equal_to([200]))
    assert service.asked.total() == 200
    assert service.most_at_once == 6


def test_beam_makes_the_batches(service: Service) -> None:
    sizes = FleetModelHandler(service.url, "m", min_batch_size=4, max_batch_size=4)
    pipeline = beam.Pipeline()
    _ = pipeline | beam.Create([str(i) for i in range(8)], reshuffle=False) | RunInference(sizes)
    result = pipeline.run()
    result.wait_until_finish()
    (found,) = result.metrics().query(MetricsFilter().with_name("inference_request_batch_size"))["distributions"]
    assert (found.committed.max, found.committed.sum) == (4, 8)


def test_a_refused_example_ends_the_pipeline_with_the_services_words(service: Service) -> None:
    service.verdict = lambda prompt: 400 if prompt == "bad" else 200
    with (
        pytest.raises(BatchError, match="1 of 3 examples failed, the first by request_failed: no: 400"),
        beam.Pipeline() as pipeline,
    ):
        _ = pipeline | beam.Create(["a", "bad", "b"], reshuffle=False) | RunInference(FleetModelHandler(service.url, "m"))


def test_beams_own_dead_letters_hold_whole_batches_with_the_reason(service: Service) -> None:
    service.verdict = lambda prompt: 400 if prompt == "bad" else 200
    handler = FleetModelHandler(service.url, "m", min_batch_size=1, max_batch_size=1)
    with beam.Pipeline() as pipeline:
        prompts = pipeline | beam.Create(["a", "bad", "b"])
        answered, dead = prompts | RunInference(handler).with_exception_handling()
        assert_that(answered | beam.Map(text), equal_to(["A", "B"]), "answered")
        reasons = dead.failed_inferences | beam.Map(lambda letter: (list(letter[0]), "no: 400" in letter[1][1]))
        assert_that(reasons, equal_to([(["bad"], True)]), "dead")


@pytest.mark.parametrize("keyed", [False, True])
def test_failures_beside_answers_are_parted(service: Service, keyed: bool) -> None:
    service.verdict = lambda prompt: {"bad": 400, "worse": 500}.get(prompt, 200)
    handler: Any = FleetModelHandler(service.url, "m", on_failure="return", limits=Limits(tries=2))
    examples: list[Any] = ["a", "bad", "worse", 7, {"prompt": b"bytes"}, "b"]
    given: list[Any] = [(i, example) for i, example in enumerate(examples)] if keyed else examples
    of_prediction: Callable[[Any], PredictionResult] = (lambda pair: pair[1]) if keyed else (lambda prediction: prediction)
    with beam.Pipeline() as pipeline:
        predictions = pipeline | beam.Create(given) | RunInference(KeyedModelHandler(handler) if keyed else handler)
        answered, failed = predictions | SplitFailures()
        assert_that(answered | "texts" >> beam.Map(lambda p: text(of_prediction(p))), equal_to(["A", "B"]), "answered")
        expected = [
            ("bad", Failure("request_failed", "no: 400", 400, 1, {"error": {"message": "no: 400", "type": ""}})),
            ("worse", Failure("request_failed", "no: 500", 500, 2, {"error": {"message": "no: 500", "type": ""}})),
            ("7", Failure("invalid_line", "the prompt is of the type int, not a text, mapping or list of messages")),
            ("{'prompt': b'bytes'}", Failure("invalid_line", "the prompt has neither messages nor a text as 'prompt'")),
        ]
        reasons = failed | beam.Map(of_prediction) | "reasons" >> beam.Map(lambda p: (str(p.example), p.inference))
        assert_that(reasons, equal_to(expected), "failed")


@pytest.mark.parametrize("on_failure", ["raise", "return"])
def test_a_service_that_is_away_is_no_failure_of_its_examples(service: Service, on_failure: Any) -> None:
    service.verdict = lambda prompt: 503
    handler = FleetModelHandler(service.url, "m", on_failure=on_failure, limits=IMPATIENT)
    with pytest.raises(ServiceAway, match="nothing was answered for"), beam.Pipeline() as pipeline:
        _ = pipeline | beam.Create(["a"]) | RunInference(handler)


def test_keys_stay_with_their_answers_and_may_choose_the_model(service: Service) -> None:
    def named(model: str) -> FleetModelHandler:
        return FleetModelHandler(service.url, model)

    examples = [("red", "a"), ("blue", "b"), ("green", "c")]
    with beam.Pipeline() as pipeline:
        keyed = pipeline | beam.Create(examples)
        one = keyed | "one" >> RunInference(KeyedModelHandler(named("m")))
        assert_that(
            one | "rows" >> beam.Map(lambda p: (p[0], text(p[1]))), equal_to([("red", "A"), ("blue", "B"), ("green", "C")]), "1"
        )
        several = KeyedModelHandler([KeyModelMapping(["red", "blue"], named("m1")), KeyModelMapping(["green"], named("m2"))])
        two = keyed | "two" >> RunInference(several)
        models = two | "models" >> beam.Map(lambda p: (p[0], text(p[1]), p[1].model_id))
        assert_that(models, equal_to([("red", "A", "m1"), ("blue", "B", "m1"), ("green", "C", "m2")]), "2")


def test_a_side_input_changes_the_model_and_each_element_is_answered_once(service: Service) -> None:
    def at(time_and_value: tuple[int, Any]) -> TimestampedValue:
        return TimestampedValue(time_and_value[1], time_and_value[0])

    updates = [(minute * 60, ModelMetadata(f"model-{minute}", f"version-{minute}")) for minute in range(3)]
    prompts = [(second, f"prompt {second}") for second in range(180)]
    with beam.Pipeline() as pipeline:
        models = (
            pipeline | "models" >> beam.Create(updates) | "at" >> beam.Map(at) | "of minutes" >> beam.WindowInto(FixedWindows(60))
        )
        windows = pipeline | beam.Create(prompts) | beam.Map(at) | beam.WindowInto(FixedWindows(60))
        predictions = windows | RunInference(
            FleetModelHandler(service.url, "old", max_batch_size=32), model_metadata_pcoll=models
        )
        rows = predictions | "all" >> beam.WindowInto(GlobalWindows()) | beam.Map(row)
        assert_that(rows, equal_to([(prompt, prompt.upper(), f"model-{second // 60}") for second, prompt in prompts]))
    assert service.asked.total() == 180


def test_what_the_handler_decides_is_no_argument(service: Service) -> None:
    with pytest.raises(ValueError, match="inference_args has 'model'; use the handler's model, or a side input of RunInference"):
        _ = beam.Pipeline() | beam.Create(["a"]) | RunInference(FleetModelHandler(service.url), inference_args={"model": "m"})
    with pytest.raises(ValueError, match="inference_args has 'stream'; use nothing: predictions are whole answers"):
        FleetModelHandler(service.url).validate_inference_args({"stream": True})
    with pytest.raises(ValueError, match="on_failure is 'drop', neither 'raise' nor 'return'"):
        FleetModelHandler(service.url, on_failure="drop")  # type: ignore[arg-type]


def test_a_service_that_is_away_is_waited_for_before_its_model_is_known() -> None:
    handler = FleetModelHandler("http://127.0.0.1:9", limits=Limits(patience_s=1.0))
    with pytest.raises(ServiceAway, match=r"/v1/models does not answer: .*; check the URL"):
        handler.run_inference(["a"], handler.load_model())


def test_the_example_writes_answers_and_failures(service: Service, tmp_path: Path) -> None:
    service.verdict = lambda prompt: 400 if prompt == "bad" else 200
    (tmp_path / "prompts.txt").write_text("a\nbad\nb\n")
    example = str(Path(__file__).parents[2] / "examples" / "beam_pipeline.py")
    options = ["--url", service.url, "--input", str(tmp_path / "prompts.txt"), "--output", str(tmp_path / "out")]
    main = runpy.run_path(example)["main"]
    main([*options, "--max_tokens", "4", "--direct_num_workers", "1"])

    def lines(pattern: str) -> list[dict[str, Any]]:
        return [json.loads(line) for file in tmp_path.glob(pattern) for line in file.read_text().splitlines()]

    assert sorted((line["prompt"], line["answer"], line["model"]) for line in lines("out-answers*.jsonl")) == [
        ("a", "A", "tiny"),
        ("b", "B", "tiny"),
    ]
    assert lines("out-failures*.jsonl") == [{"prompt": "bad", "code": "request_failed", "message": "no: 400"}]
    assert {body["max_tokens"] for body in service.bodies} == {4}


def test_the_pipeline_of_the_docs_runs(service: Service) -> None:
    exec(block_of_the_docs(service, "FleetModelHandler"), {})
    assert service.asked == {"What is the capital of France?": 1, "Count to ten.": 1}


@pytest.mark.slow
def test_worker_processes_ask_each_prompt_once_within_the_limits_of_their_clients(service: Service) -> None:
    service.delay_s = 0.05
    options = PipelineOptions(direct_running_mode="multi_processing", direct_num_workers=2)
    handler = FleetModelHandler(service.url, "m", limits=Limits(concurrency=3), min_batch_size=4, max_batch_size=8)
    with beam.Pipeline(options=options) as pipeline:
        prompts = pipeline | beam.Create([f"prompt {i}" for i in range(100)]) | beam.Reshuffle()
        assert_that(prompts | RunInference(handler) | beam.combiners.Count.Globally(), equal_to([100]))
    assert service.asked == {f"prompt {i}": 1 for i in range(100)}
    assert service.most_at_once <= 2 * 3

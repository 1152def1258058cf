"""`FleetModelHandler` lets Apache Beam's ``RunInference`` ask a fleet. Needs the extra ``serve-app[beam]``.

    predictions = prompts | RunInference(FleetModelHandler("http://serve-app:8010"), inference_args={"max_tokens": 64})
    predictions = prompts | RunInference(EmbeddedModelHandler("fleet.yaml"), inference_args={"max_tokens": 64})

With `FleetModelHandler` Beam's workers hold no model: they share a running service with whoever else uses it, and its replicas see one
stream of requests in place of batches (docs/adr/0018-beam-workers-share-the-fleet.md). `EmbeddedModelHandler` is for workers that have
the accelerators themselves: each worker machine has a fleet of its own, which all worker processes of the machine share
(docs/adr/0036-a-fleet-for-each-worker-machine.md). docs/batch.md has pipelines.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.ml.inference.base import ModelHandler, PredictionResult

from serve_app.batch.blocking import BlockingClient
from serve_app.batch.client import Failure, Limits, Reply, key_of_environment
from serve_app.batch.fleet_watch import Keep
from serve_app.batch.requests import Defaults, Request, request_of_example
from serve_app.batch.shared_client import SharedClient
from serve_app.batch.shared_fleet import SharedFleet
from serve_app.config import mapping_in, parse_settings, read_text
from serve_app.errors import BatchError

__all__ = ["EmbeddedModelHandler", "Failure", "FleetModelHandler", "Keep", "Limits", "SplitFailures"]

_METRICS = "serve_app"
_NOT_ARGUMENTS = {
    "model": "the handler's model, or a side input of RunInference",
    "stream": "nothing: predictions are whole answers",
}


class Asks(Protocol):
    """What a worker process asks by."""

    def ask(self, requests: Sequence[Request]) -> list[Reply | Failure]:
        """Return the outcomes in the order of ``requests``."""

    def only_model(self) -> str:
        """Return the name of the one model that is served."""


class FleetModelHandler(ModelHandler[Any, PredictionResult, Asks]):
    """Makes a request of each example and a ``PredictionResult`` of each answer.

    An example is a text, a mapping with ``prompt`` or ``messages`` whose other keys are fields of the request, a line of OpenAI's Batch
    API, or a list of messages. The ``inference`` is the body that the service answered with, and ``model_id`` the model's name.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        chat: bool = True,
        system: str = "",
        prompt_field: str = "prompt",
        on_failure: Literal["raise", "return"] = "raise",
        limits: Limits | None = None,
        api_key: Callable[[], str] = key_of_environment,
        min_batch_size: int | None = 32,
        max_batch_size: int | None = 256,
        max_batch_duration_secs: int | None = None,
        max_batch_weight: int | None = None,
        element_size_fn: Callable[[Any], int] | None = None,
    ) -> None:
        """Connect nothing yet: that is done in each of Beam's worker processes.

        Args:
            url: The service, as workers reach it.
            model: Its name; empty: the one that the service has. A side input of ``RunInference`` with another name replaces it.
            chat: A text is a user's message of a chat; else text to go on with.
            system: The system's message before each text of a chat.
            prompt_field: The key of mappings that holds the text.
            on_failure: ``raise``: an example that the service refuses, or fails ``limits.tries`` times, fails its batch with `BatchError`,
                which `RunInference` hands to ``with_exception_handling``, or else to the runner. ``return``: its ``inference`` is a
                `Failure`, and all other predictions of the batch are kept; `SplitFailures` parts them.
            limits: Of this worker process; None: `Limits()`.
            api_key: Is called in the worker and returns the key. Default: ``$SERVE_APP_API_KEY`` of the worker, so that no key is in
                the pipeline's description.
            min_batch_size: With the next four, of ``beam.BatchElements``. A batch is asked at once, as far as the service has places, and
                ends with its slowest answer: larger batches keep more of the places in use.
        """
        super().__init__(
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            max_batch_duration_secs=max_batch_duration_secs,
            max_batch_weight=max_batch_weight,
            element_size_fn=element_size_fn,
        )
        if on_failure not in ("raise", "return"):
            raise ValueError(f"on_failure is {on_failure!r}, neither 'raise' nor 'return'")
        self._url, self._model, self._api_key = url, model, api_key
        self._chat, self._system, self._prompt_field = chat, system, prompt_field
        self._on_failure, self._limits = on_failure, limits or Limits()

    def load_model(self) -> Asks:
        """Return the client that all threads of this worker process share."""
        return BlockingClient(self._url, self._api_key(), self._limits)

    def run_inference(
        self, batch: Sequence[Any], model: Asks, inference_args: dict[str, Any] | None = None
    ) -> list[PredictionResult]:
        """Ask for the whole batch; return its predictions in its order.

        Args:
            inference_args: Fields of each request, such as ``max_tokens``; an example's own fields win.

        Raises:
            BatchError: Examples failed, and ``on_failure`` is ``raise``.
            ServiceAway: The service has answered nothing for ``limits.patience_s``.
        """
        name = self._model or model.only_model()
        defaults = Defaults(name, self._chat, self._system, self._prompt_field, inference_args or {})
        outcomes = model.ask([request_of_example(number, example, defaults) for number, example in enumerate(batch, 1)])
        _count(outcomes)
        if self._on_failure == "raise":
            _raise_failures(outcomes)
        return [_prediction(example, outcome, name) for example, outcome in zip(batch, outcomes, strict=True)]

    def update_model_path(self, model_path: str | None = None) -> None:
        """Ask this model from the next batch on: its name, as the service has it."""
        self._model = model_path or self._model

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Refuse what the handler decides itself.

        Raises:
            ValueError: ``model`` or ``stream`` is among them.
        """
        for name, instead in _NOT_ARGUMENTS.items():
            if name in (inference_args or {}):
                raise ValueError(f"inference_args has {name!r}; use {instead}")

    def get_metrics_namespace(self) -> str:
        """Return the namespace of Beam's metrics and of ours: ``requests_sent``, ``failed_requests`` and two counts of tokens."""
        return _METRICS


class EmbeddedModelHandler(FleetModelHandler):
    """Starts a fleet on each worker machine, like ``serve-app up``, and asks it as `FleetModelHandler` asks a service.

    The first worker process of a machine starts the fleet, the others wait for it and share it. It is started again when it ends or is
    stuck, while requests wait and are asked again; it ends when no worker process uses it any more, also when they were killed. Handlers
    with the same configuration share one fleet: with several models in it, one handler for each.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        model: str = "",
        *,
        keep: Keep | None = None,
        command: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Read and check the configuration here, where the pipeline is made; workers get it with the handler.

        Args:
            config: A file of ``serve-app up``, or what it holds. Name and port of the fleet are replaced. Paths of models are the workers'.
            model: The name of one of its models; empty: the one that it has.
            keep: When the fleet counts as stuck, is given up, or ends; None: `Keep()`.
            command: What serves the configuration that comes on its standard input; empty: ``serve-app up -f -`` by the worker's Python.
            options: Those of `FleetModelHandler`, from ``chat`` on.

        Raises:
            ConfigError: As ``serve-app up`` would refuse it.
            ValueError: The configuration has no such model, or several and none is named.
        """
        mapping = config if isinstance(config, Mapping) else mapping_in(read_text(Path(config)), Path(config))
        models = parse_settings(mapping).models
        if model not in models and (model or len(models) != 1):
            raise ValueError(f"model is {model!r}; the configuration has: {', '.join(models)}")
        super().__init__("", model or next(iter(models)), **options)
        self._configuration, self._keep, self._command = dict(mapping), keep or Keep(), tuple(command)

    def load_model(self) -> Asks:
        """Return the client of this worker process, once the machine's fleet is ready.

        Raises:
            BatchError: The fleet did not start; the message holds its own reason.
        """
        fleet = SharedFleet(self._configuration, self._keep, self._command)
        return SharedClient(fleet, self._api_key(), self._limits)


class SplitFailures(beam.PTransform):
    """Two collections of one: predictions that have an answer, and those whose ``inference`` is a `Failure`; keyed or not."""

    def expand(self, predictions: Any) -> Any:
        """Return both."""
        return predictions | beam.Partition(lambda prediction, _: int(_is_failure(prediction)), 2)


def _is_failure(prediction: Any) -> bool:
    result = prediction if isinstance(prediction, PredictionResult) else prediction[1]
    return isinstance(result.inference, Failure)


def _prediction(example: Any, outcome: Reply | Failure, name: str) -> PredictionResult:
    if isinstance(outcome, Failure):
        return PredictionResult(example, outcome, name)
    return PredictionResult(example, outcome.body, str(outcome.body.get("model") or name))


def _count(outcomes: Sequence[Reply | Failure]) -> None:
    replies = [outcome for outcome in outcomes if isinstance(outcome, Reply)]
    counts = {
        "requests_sent": sum(outcome.num_sent for outcome in outcomes),
        "failed_requests": len(outcomes) - len(replies),
        "prompt_tokens": sum(reply.usage("prompt_tokens") for reply in replies),
        "completion_tokens": sum(reply.usage("completion_tokens") for reply in replies),
    }
    for name, count in counts.items():
        Metrics.counter(_METRICS, name).inc(count)


def _raise_failures(outcomes: Sequence[Reply | Failure]) -> None:
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if failures:
        raise BatchError(
            f"{len(failures)} of {len(outcomes)} examples failed, the first by {failures[0].code}: {failures[0].message}",
            "on_failure='return' keeps the other predictions of a batch",
        )

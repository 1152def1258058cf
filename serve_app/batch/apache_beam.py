"""Two handlers let Apache Beam's ``RunInference`` ask a fleet. The module needs the extra ``serve-app[beam]``.

    predictions = prompts | RunInference(FleetModelHandler("http://serve-app:8010"), inference_args={"max_tokens": 64})
    predictions = prompts | RunInference(EmbeddedModelHandler("fleet.yaml"), inference_args={"max_tokens": 64})

With `FleetModelHandler` Beam's workers hold no model: they share a running service with its other clients, and its replicas see one stream
of requests in place of batches (docs/adr/0018-beam-workers-share-the-fleet.md). `EmbeddedModelHandler` is for workers that have the
accelerators themselves: each worker machine has a fleet of its own, which all worker processes of the machine share
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
    """The client of one worker process: `BlockingClient` or `SharedClient`."""

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
            model: The model's name; empty: the only model of the service. A side input of ``RunInference`` with another name replaces it.
            chat: Whether a text is a user's message of a chat; if not, the model continues the text.
            system: The system's message before each text of a chat.
            prompt_field: The key of mappings that holds the text.
            on_failure: ``raise``: an example that the service refuses, or fails ``limits.tries`` times, fails its batch with `BatchError`,
                which `RunInference` hands to ``with_exception_handling``, or else to the runner. ``return``: the example's ``inference``
                is a `Failure`, and all other predictions of the batch are kept; `SplitFailures` separates them.
            limits: The limits of this worker process; None: `Limits()`.
            api_key: A function, called in the worker, that returns the key. Default: ``$SERVE_APP_API_KEY`` of the worker, so that no key
                is in the pipeline's description.
            min_batch_size: With the next four, arguments of ``beam.BatchElements``. The requests of a batch are sent at once, as far as
                the service has places, and the batch ends with its slowest answer: larger batches keep more of the places in use.
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
        """Ask another model from the next batch on, by its name in the service."""
        self._model = model_path or self._model

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Refuse arguments that the handler sets itself.

        Raises:
            ValueError: ``model`` or ``stream`` is among them.
        """
        for name, instead in _NOT_ARGUMENTS.items():
            if name in (inference_args or {}):
                raise ValueError(f"inference_args has {name!r}; use {instead}")

    def get_metrics_namespace(self) -> str:
        """Return the namespace of Beam's metrics and of ours.

        Ours are ``requests_sent``, ``failed_requests``, ``prompt_tokens`` and ``completion_tokens``.
        """
        return _METRICS


class EmbeddedModelHandler(FleetModelHandler):
    """Starts a fleet on each worker machine, like ``serve-app up``, and asks it as `FleetModelHandler` asks a service.

    The first worker process of a machine starts the fleet, and the others wait for the fleet and share it. A fleet that ends or is stuck is
    started again; requests wait meanwhile and are sent again. The fleet ends when no worker process uses it any more, also when the worker
    processes were killed. Handlers with the same configuration share one fleet: for several models in it, use one handler each.
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
            config: A file of ``serve-app up``, or its content. Name and port of the fleet are replaced. Paths of models are the workers'.
            model: The name of one of the configuration's models; empty: its only model.
            keep: When the fleet counts as stuck, is given up, or ends; None: `Keep()`.
            command: The command that serves the configuration from its standard input; empty: ``serve-app up -f -`` by the worker's Python.
            options: The options of `FleetModelHandler`, from ``chat`` on.

        Raises:
            ConfigError: ``serve-app up`` would refuse the configuration.
            ValueError: The configuration has no such model, or has several and ``model`` is empty.
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
            BatchError: The fleet did not start; the message holds the fleet's own reason.
        """
        fleet = SharedFleet(self._configuration, self._keep, self._command)
        return SharedClient(fleet, self._api_key(), self._limits)


class SplitFailures(beam.PTransform):
    """Splits a collection in two: predictions that have an answer, and predictions whose ``inference`` is a `Failure`; keyed or not."""

    def expand(self, predictions: Any) -> Any:
        """Return both collections."""
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

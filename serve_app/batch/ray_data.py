"""``predict`` answers a Ray dataset's prompts by a running service. Needs the extra ``serve-app[ray-data]``."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from serve_app.batch.client import BatchClient, Failure, Limits, Reply, connect, key_of_environment, only_model
from serve_app.batch.requests import Defaults, Request, request_of_example
from serve_app.errors import BatchError

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset

COLUMNS = ("answer", "response", "error")
"""The columns that `predict` adds: the answer's text, the service's whole body as JSON, and the reason why there is neither."""


def predict(
    dataset: "Dataset",
    url: str,
    model: str = "",
    *,
    column: str = "prompt",
    chat: bool = True,
    system: str = "",
    parameters: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    api_key: Callable[[], str] = key_of_environment,
    batch_size: int = 64,
    num_actors: int = 1,
) -> "Dataset":
    """Return the dataset with three more columns. The result is lazy, as Ray's datasets are; a task that Ray repeats asks again.

    A row that the service refuses, or fails ``limits.tries`` times, has the reason in the column ``error``; other rows have null there.

    Args:
        model: The model's name; empty: the service's only model.
        column: The column with texts, or lists of messages.
        chat: Whether a text is a user's message of a chat, after ``system``; if not, the model continues the text.
        parameters: Fields of each request, such as ``max_tokens``.
        limits: The limits of each actor; None: `Limits()`.
        api_key: A function, called in the actors, that returns the key. Default: the actors' ``$SERVE_APP_API_KEY``.
        batch_size: Rows of a batch; an actor has four batches under way.
        num_actors: The number of actors. Each is a process with a client of its own.

    Raises:
        BatchError: Raised when the dataset is computed: the service has answered nothing for ``limits.patience_s``, the column is missing,
            or one of the three new columns is there already.
    """
    defaults = Defaults(model, chat, system, parameters=dict(parameters or {}))
    return dataset.map_batches(
        _Asker,
        fn_constructor_kwargs={
            "url": url,
            "defaults": defaults,
            "column": column,
            "limits": limits or Limits(),
            "api_key": api_key,
        },
        batch_size=batch_size,
        batch_format="pyarrow",
        concurrency=num_actors,
    )


class _Asker:
    """An actor of Ray Data, which calls it for several batches at once, all in one event loop."""

    def __init__(self, url: str, defaults: Defaults, column: str, limits: Limits, api_key: Callable[[], str]) -> None:
        key = api_key()
        name = defaults.model or only_model(url, key, limits)
        self._defaults = Defaults(name, defaults.chat, defaults.system, parameters=defaults.parameters)
        self._column = column
        self._client = BatchClient(connect(url, key, limits), limits)

    async def __call__(self, batch: "pa.Table") -> "pa.Table":
        refuse_columns(batch.column_names, self._column)
        examples = enumerate(batch.column(self._column).to_pylist(), 1)
        outcomes = await asyncio.gather(
            *(self._ask(request_of_example(number, text, self._defaults)) for number, text in examples)
        )
        return _with_outcomes(batch, outcomes)

    async def _ask(self, request: Request) -> Reply | Failure:
        if request.body is None:
            return Failure("invalid_line", f"the prompt {request.problem}")
        return await self._client.ask(request.path, request.body)


def refuse_columns(names: Sequence[str], column: str) -> None:
    """Raise BatchError when the prompts' ``column`` is not among the columns' ``names``, or one that `predict` adds is."""
    if column not in names:
        raise BatchError(f"the dataset has no column {column!r}", f"name the prompts' column: one of {', '.join(names)}")
    if taken := [name for name in COLUMNS if name in names]:
        raise BatchError(f"the dataset has a column {taken[0]!r} already", "rename it before predict")


def _with_outcomes(batch: "pa.Table", outcomes: list[Reply | Failure]) -> "pa.Table":
    import pyarrow as pa

    values = [_values(outcome) for outcome in outcomes]
    for i, name in enumerate(COLUMNS):
        batch = batch.append_column(name, pa.array([value[i] for value in values], pa.string()))
    return batch


def _values(outcome: Reply | Failure) -> tuple[str | None, str | None, str | None]:
    """Return the answer's text, its body, and the reason of a failure; the text is None if the answer has none, as an embedding has none.

    Half a surrogate pair has no UTF-8, which Arrow's texts need: in the text it becomes `?`. The body keeps it, as an escape of JSON.
    """
    if isinstance(outcome, Failure):
        return None, None, _utf8(f"{outcome.code}: {outcome.message}")
    choice = (outcome.body.get("choices") or [{}])[0]
    text = (choice.get("message") or {}).get("content", choice.get("text"))
    body = json.dumps(outcome.body, ensure_ascii=False)
    if _utf8(body) != body:
        body = json.dumps(outcome.body)
    return text if text is None else _utf8(text), body, None


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()

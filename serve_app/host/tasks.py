"""`raise_failure` raises the error that ended one of a deployment's own tasks, for its health check."""

import asyncio
from collections.abc import Iterable
from typing import Any


def raise_failure(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Raise the error that ended one of ``tasks``. A cancelled task has not failed."""
    for task in tasks:
        if task.done() and not task.cancelled() and (exc := task.exception()) is not None:
            raise exc

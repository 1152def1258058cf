"""`BatchService` puts OpenAI's Files and Batches API together over one storage: routes, records and the worker."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from serve_app.batch.batches_api import BatchesApi
from serve_app.batch.disk_threads import DiskThreads
from serve_app.batch.files_api import FilesApi, Handler
from serve_app.batch.in_process import Application
from serve_app.batch.records import KeyState, Owner
from serve_app.batch.rows import ProblemOfLine
from serve_app.batch.storage import open_storage
from serve_app.batch.worker import Worker
from serve_app.config import BatchSettings


class Routes(Protocol):
    """The routes below one path."""

    def methods(self, below: tuple[str, ...]) -> Mapping[str, Handler] | None:
        """Return HTTP method -> handler at these parts of the path; None: there is no such path."""
        ...


class BatchService:
    """The batch service of one ingress. Give the ingress its routes, ``files`` and ``batches``, then ``start`` the service.

    Raises:
        ConfigError: The storage cannot be used.
    """

    def __init__(self, settings: BatchSettings) -> None:
        self._storage = open_storage(settings)
        disk = DiskThreads(self._storage.scratch.reserve.free)
        self._worker = Worker(settings, self._storage)
        self.store = self._storage.store
        self.files: Routes = FilesApi(settings, self._storage, disk)
        self.batches: Routes = BatchesApi(settings, self._storage.store, disk, self._worker.wake)

    def start(
        self,
        application: Application,
        models: Callable[[Owner], Collection[str]],
        problem_of_line: ProblemOfLine,
        *,
        state_of_key: Callable[[Owner], KeyState],
    ) -> None:
        """Run batches by ``application``, the ingress's own.

        Args:
            models: Returns the names that lines of an owner's batches may ask for.
            state_of_key: Returns whether the API key of an owner may run batches.
        """
        self._worker.start(application, models, problem_of_line, state_of_key=state_of_key)

    def lines_per_s(self) -> dict[str, float]:
        """Return model -> lines a second that have to be answered, so that all batches of the database end in time."""
        return self._worker.lines_per_s()

    async def stop(self) -> None:
        """Give up the requests under way. Answers are kept, and the next process continues the batches. The routes still answer."""
        await self._worker.stop()

    def close(self) -> None:
        """Close the database and remove the scratch folder, if there is one. Call it after `stop`, when no route is used any more."""
        self._storage.close()

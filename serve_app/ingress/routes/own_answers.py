"""Own answers are those that an ingress gives to GET without vLLM: probes, metrics, version, served models, members of the fleet."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from serve_app.core.tenants import Caller
from serve_app.errors import LeaseBoardSilent, ModelNotFound
from serve_app.host import descriptors
from serve_app.ingress.front_end.front_end import FrontEnd

FleetReport = Callable[[], Awaitable[dict[str, Any]]]
"""Asks the lease board and Serve's controller: `serve_app.ingress.deployment.Ingress._report`."""

MODELS = "/v1/models"
REQUESTS = "/fleet/requests"

FRESH_S = 0.5
"""Seconds for which a report of the fleet, or the error that the board is silent, is used again. So many watchers cost the lease board and
this event loop no more than one."""


def json_answer(content: Any) -> Response:
    """Return an answer with plain data or structs of msgspec as JSON."""
    return Response(msgspec.json.encode(content), media_type="application/json")


class OwnAnswers:
    """The handlers of GET. ``listed``: the front ends that clients see, by model name. Without ``report`` there is no `/fleet`."""

    def __init__(
        self,
        listed: Mapping[str, FrontEnd],
        *,
        version: Mapping[str, Any],
        fleet_id: str,
        is_draining: Callable[[], bool],
        report: FleetReport | None = None,
    ) -> None:
        self._listed = listed
        self._version = dict(version)
        self._fleet_id = fleet_id
        self._is_draining = is_draining
        self._report = report
        self._reported: tuple[float, bytes | LeaseBoardSilent] | None = None
        self._asking = asyncio.Lock()

    def by_path(self) -> dict[str, Callable[[], Awaitable[Response]]]:
        """Return the handler of GET and HEAD for each path; `models` and `model` answer by tenant."""
        fleet: dict[str, Callable[[], Awaitable[Response]]] = {} if self._report is None else {"/fleet": self._fleet}
        return fleet | {
            "/healthz": self._healthz,
            "/health": self._health,
            "/readyz": self.readyz,
            "/metrics": self._metrics,
            "/version": self._get_version,
        }

    async def readyz(self) -> Response:
        """Answer 200 if this ingress is not draining, every required model has an accepting replica, and file descriptors are left."""
        missing = [n for n, f in self._listed.items() if f.model.required and not f.client.is_ready()]
        if self._is_draining():
            return JSONResponse({"status": "draining"}, status_code=503)
        if missing:
            return JSONResponse({"status": "waiting", "models_without_a_replica": missing}, status_code=503)
        if descriptors.are_short_now():
            return JSONResponse({"status": "crowded", "file_descriptors": descriptors.limit()}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def models(self, caller: Caller | None) -> Response:
        """Answer with the cards of the models that the caller may ask."""
        return JSONResponse({"object": "list", "data": await self._cards(caller)})

    async def model(self, name: str, caller: Caller | None) -> Response:
        """Answer with the card of one model: a route of OpenAI's API that vLLM lacks.

        Raises:
            ModelNotFound: The model is not served here, or not to the caller.
        """
        cards = {card["id"]: card for card in await self._cards(caller)}
        if name not in cards:
            raise ModelNotFound(model=name, served=tuple(cards))
        return JSONResponse(cards[name])

    async def _healthz(self) -> Response:
        """Answer that the process is alive, with its fleet, which another application's ingress reads before it listens."""
        return JSONResponse({"status": "ok", "fleet": self._fleet_id})

    async def _health(self) -> Response:
        """Answer as vLLM's own probe does, so that a prober of vLLM servers needs no other path here."""
        return Response()

    async def _metrics(self) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def _fleet(self) -> Response:
        """Answer with the fleet's members and loads, for `serve-app status` and the fleet page.

        The answer also has lost replicas, targets, starting replicas, and the autoscaler's last decisions.

        Raises:
            LeaseBoardSilent: The board does not answer.
        """
        assert self._report is not None
        async with self._asking:
            if self._reported is None or time.monotonic() - self._reported[0] >= FRESH_S:
                answer = await self._ask_board()
                self._reported = time.monotonic(), answer  # the time of the answer, so that all who waited share it
        answer = self._reported[1]
        if isinstance(answer, LeaseBoardSilent):
            raise answer
        return Response(answer, media_type="application/json")

    async def _ask_board(self) -> bytes | LeaseBoardSilent:
        assert self._report is not None
        try:
            return bytes(JSONResponse({"time": time.time(), **await self._report()}).body)
        except LeaseBoardSilent as exc:
            return exc

    async def _get_version(self) -> Response:
        return JSONResponse(self._version)

    async def _cards(self, caller: Caller | None) -> list[dict[str, Any]]:
        cards: list[dict[str, Any]] = []
        for name, front in self._listed.items():
            if caller is None or caller.tenant.may_ask(name):
                listing = await (await front.app()).state.openai_serving_models.show_available_models()
                cards += listing.model_dump()["data"]
        return cards

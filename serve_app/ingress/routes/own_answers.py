"""What an ingress answers itself, by GET: probes, metrics, its version, which models it serves, and who is in the fleet."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from serve_app.errors import LeaseBoardSilent, ModelNotFound
from serve_app.host import descriptors
from serve_app.ingress.front_end.front_end import FrontEnd

FleetReport = Callable[[], Awaitable[dict[str, Any]]]
"""Asks the lease board: `serve_app.membership.Membership.report`."""

FRESH_S = 0.5
"""A report of the fleet that is younger is given again, also one that the board is silent: many people who watch cost the lease board,
and this event loop, what one does."""


class OwnAnswers:
    """``listed`` are the front ends that clients are told of, by their models' names. Without ``report`` there is no `/fleet`."""

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
        """Return what answers GET and HEAD at each path; `model` is for the paths that hold a name."""
        fleet: dict[str, Callable[[], Awaitable[Response]]] = {} if self._report is None else {"/fleet": self._fleet}
        return fleet | {
            "/healthz": self._healthz,
            "/health": self._health,
            "/readyz": self.readyz,
            "/metrics": self._metrics,
            "/version": self._get_version,
            "/v1/models": self._models,
        }

    async def readyz(self) -> Response:
        """Ready: not draining, some replica of every required model takes requests, and there is room for connections."""
        missing = [n for n, f in self._listed.items() if f.model.required and not f.client.is_ready()]
        if self._is_draining():
            return JSONResponse({"status": "draining"}, status_code=503)
        if missing:
            return JSONResponse({"status": "waiting", "models_without_a_replica": missing}, status_code=503)
        if descriptors.are_short_now():
            return JSONResponse({"status": "crowded", "file_descriptors": descriptors.limit()}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def model(self, name: str) -> Response:
        """As OpenAI's API has it, which vLLM leaves out.

        Raises:
            ModelNotFound: It is not served here.
        """
        cards = {card["id"]: card for card in await self._cards()}
        if name not in cards:
            raise ModelNotFound(model=name, served=tuple(cards))
        return JSONResponse(cards[name])

    async def _healthz(self) -> Response:
        """Alive. An ingress of another application that would listen on this port reads `fleet`, and does not (shared_port.py)."""
        return JSONResponse({"status": "ok", "fleet": self._fleet_id})

    async def _health(self) -> Response:
        """Alive, in the form of vLLM's own probe: what asks a vLLM server needs no other path here."""
        return Response()

    async def _metrics(self) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def _fleet(self) -> Response:
        """Who is in the fleet, with loads, and the last decisions of the autoscaler: what `serve-app status` and the fleet page show.

        Raises:
            LeaseBoardSilent: The board does not answer.
        """
        assert self._report is not None
        async with self._asking:
            if self._reported is None or time.monotonic() - self._reported[0] >= FRESH_S:
                told = await self._ask_board()
                self._reported = time.monotonic(), told  # as old as the answer: those who waited for it share it
        told = self._reported[1]
        if isinstance(told, LeaseBoardSilent):
            raise told
        return Response(told, media_type="application/json")

    async def _ask_board(self) -> bytes | LeaseBoardSilent:
        assert self._report is not None
        try:
            return bytes(JSONResponse({"time": time.time(), **await self._report()}).body)
        except LeaseBoardSilent as exc:
            return exc

    async def _get_version(self) -> Response:
        return JSONResponse(self._version)

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": await self._cards()})

    async def _cards(self) -> list[dict[str, Any]]:
        cards: list[dict[str, Any]] = []
        for front in self._listed.values():
            listing = await (await front.app()).state.openai_serving_models.show_available_models()
            cards += listing.model_dump()["data"]
        return cards

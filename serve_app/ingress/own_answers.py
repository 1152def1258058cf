"""What an ingress answers itself, by GET: probes, metrics, its version, and which models it serves."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from serve_app import descriptors
from serve_app.errors import ModelNotFound
from serve_app.ingress.frontend import FrontEnd


class OwnAnswers:
    """``listed`` are the front ends that clients are told of, by their models' names."""

    def __init__(
        self, listed: Mapping[str, FrontEnd], *, version: Mapping[str, Any], fleet_id: str, is_draining: Callable[[], bool]
    ) -> None:
        self._listed = listed
        self._version = dict(version)
        self._fleet_id = fleet_id
        self._is_draining = is_draining

    def by_path(self) -> dict[str, Callable[[], Awaitable[Response]]]:
        """Return what answers GET and HEAD at each path; `model` is for the paths that hold a name."""
        return {
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

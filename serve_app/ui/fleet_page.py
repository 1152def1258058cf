"""The fleet page asks `/fleet` and `/fleet/requests` every second while it is open, and shows the fleet and what happened in it.

What can be clicked stands above all that grows, so that nothing moves from under a pointer.
"""

import asyncio
import html
from collections.abc import Mapping
from typing import Any

import gradio as gr

from serve_app.ui.api import MALFORMED, Service, ServiceProblem
from serve_app.ui.changes import MAX_KNOWN, Happening, changes, is_older
from serve_app.ui.fleet_view import fleet_html, happenings_html, problem_html
from serve_app.ui.killing import Killer, is_local
from serve_app.ui.replicas import Report

POLL_S = 1.0
"""Loads are up to 2 s old (`membership.renew_s`), so asking more often than once a second shows nothing new."""


_ASKING = '<div class="fleet"><p class="quiet">Asking the service …</p></div>'


class FleetPage:
    """Builds the page inside the open page of `gr.Blocks`; with a ``killer``, it offers to kill an engine."""

    def __init__(self, service: Service, killer: Killer | None = None) -> None:
        self._service = service
        self._killer = killer
        before, happenings = gr.State(None), gr.State([])
        gr.Navbar(main_page_name="Chat")
        key = gr.Textbox(label="API key", type="password", elem_id="fleet-key", visible=False, render=False)
        hidden = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
        if killer is not None:
            with gr.Row(elem_id="demo"):
                kill = gr.Button("Kill an engine", scale=0, min_width=140, elem_id="kill")
                killed = gr.HTML(_status("A demo: this ends the process of the busiest one."), elem_id="killed")
            kill.click(self.kill, key, killed, **hidden)
        key.render()
        problem, now, happened = gr.HTML("", visible=False), gr.HTML(_ASKING), gr.HTML(happenings_html([]))
        shown = [key, problem, now, happened, before, happenings]
        gr.Timer(POLL_S).tick(self.look, [key, before, happenings], shown, **hidden)

    async def look(self, key: str | None, before: Report | None, happenings: list[tuple[Any, ...]]) -> list[Any]:
        """Return the page's next content (key, problem, fleet, happenings) and its memory (report, happenings).

        ``key`` is None while its field is hidden.
        """
        try:
            report, ways = await asyncio.gather(self._service.fleet(key or ""), self._ways(key or ""))
        except ServiceProblem as exc:
            shows_key = gr.update(visible=True) if exc.needs_key else gr.skip()
            return [shows_key, _problem(f"{exc}{_age(before)}"), gr.skip(), gr.skip(), before, happenings]
        try:
            return [gr.skip(), *_next(report, ways, before, [Happening(*happening) for happening in happenings])]
        except MALFORMED as exc:
            said = f"{self._service.url} did not answer with a fleet's report: {exc!r}.{_age(before)}"
            return [gr.skip(), _problem(said), gr.skip(), gr.skip(), before, happenings]

    async def _ways(self, key: str) -> Mapping[str, Any] | None:
        """Return the ways of requests; None from a service that does not show them."""
        try:
            return await self._service.requests(key)
        except ServiceProblem:
            return None

    async def kill(self, key: str | None, request: gr.Request) -> str:
        """Kill an engine of the fleet that is there now; return what the page says about it. Who may not read `/fleet` kills nothing."""
        if self._killer is None or not is_local(request.headers.get("host", "")):
            return _status("Engines are killed only by a page that was opened at 127.0.0.1 or localhost.")
        try:
            return _status(self._killer.kill(await self._service.fleet(key or "")))
        except ServiceProblem as exc:
            return _status(str(exc))
        except MALFORMED as exc:
            return _status(f"{self._service.url} did not answer with a fleet's report: {exc!r}.")


def _next(report: Report, ways: Mapping[str, Any] | None, before: Report | None, known: list[Happening]) -> list[Any]:
    if before is not None and is_older(report, before):
        return [_problem(""), gr.skip(), gr.skip(), before, known]
    new = changes(before, report, known)
    known = [*known, *new][-MAX_KNOWN:]
    shown = happenings_html(known) if new else gr.skip()
    return [_problem(""), fleet_html(report, ways), shown, report, known]


def _age(shown: Report | None) -> str:
    """Return the sentence with the time of the fleet that the page still shows; empty if it shows no fleet."""
    return f" The fleet below is that of {Happening(shown['time'], '').clock()} UTC." if shown is not None else ""


def _problem(text: str) -> Any:
    return gr.update(value=problem_html(text) if text else "", visible=bool(text))


def _status(text: str) -> str:
    return f'<div role="status">{html.escape(text)}</div>'

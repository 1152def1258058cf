"""This module puts the pages together as one web application, and runs the process that serves it."""

import base64
import logging
import os
import socket
import threading
import warnings
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # Gradio reads it at import: no analytics are sent

import gradio as gr
import psutil
import uvicorn
from fastapi import FastAPI

from serve_app.errors import ListenFailed
from serve_app.ui.api import Service
from serve_app.ui.chat_page import ChatPage
from serve_app.ui.fleet_page import FleetPage
from serve_app.ui.guard import Guarded
from serve_app.ui.killing import Killer

_HERE = Path(__file__).parent
_FONTS = ("system-ui", "Segoe UI", "Roboto", "Helvetica", "Arial", "sans-serif")
"""Fonts of the system: Gradio's own come from Google, which pages in a closed network must not ask."""
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def build(service: Service, killer: Killer | None = None) -> gr.Blocks:
    """Return the pages: the chat at `/`, the fleet at `/fleet`."""
    with gr.Blocks(title="serve-app", analytics_enabled=False, fill_height=True) as pages:
        gr.Navbar(main_page_name="Chat")
        _title("Chat with serve-app")
        ChatPage(service, pages)
    with pages.route("Fleet", "/fleet"):
        _title("Fleet of serve-app")
        FleetPage(service, killer)
    return pages


def _title(text: str) -> None:
    gr.HTML(f"<h1>{text}</h1>", elem_classes="title", padding=False)


def web_app(url: str, killer: Killer | None = None) -> FastAPI:
    """Return the application in front of the service at ``url``; with a ``killer``, its fleet page offers to kill an engine."""
    service = Service(url)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(Guarded)

    @app.get("/healthz")
    async def healthz() -> Mapping[str, str]:
        return {"status": "ok"}

    pages = build(service, killer)
    pages.queue(default_concurrency_limit=None)
    theme = gr.themes.Soft(primary_hue="teal", neutral_hue="slate", font=list(_FONTS), font_mono=list(_MONO)).set(
        block_title_background_fill="transparent",
        block_title_background_fill_dark="transparent",
        block_title_text_color="*body_text_color",
        block_title_text_color_dark="*body_text_color",
        block_title_text_weight="500",
        block_title_padding="0",
        # The theme's own teal and grey are too light for text.
        body_text_color_subdued="*neutral_500",
        block_info_text_color="*neutral_500",
        color_accent="*primary_700",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_hover_dark="*primary_800",
        checkbox_label_background_fill_selected="*primary_700",
        checkbox_label_background_fill_selected_dark="*primary_700",
    )
    css, js = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    mark = _HERE / "mark.svg"
    css += f'.nav-holder::before {{ background-image: url("data:image/svg+xml;base64,{base64.b64encode(mark.read_bytes()).decode()}"); }}'
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SSR mode is not supported")  # SSR needs Node, and is switched off
        mounted: FastAPI = gr.mount_gradio_app(
            app,
            pages,
            path="/",
            theme=theme,
            css=css,
            head=f"<style>{css}</style>",  # of `css`, Gradio applies @media rules only inside a page's content, not to the rest
            js=js,
            favicon_path=str(mark),
            footer_links=[],
            ssr_mode=False,
            run_history=False,
        )
    return mounted


def run(url: str, host: str, port: int, *, ends_with_input: bool = False, kills: bool = False) -> None:
    """Serve the pages until SIGINT or SIGTERM, or until standard input ends.

    Args:
        kills: Whether the fleet page offers to kill an engine that the parent of this process has started.

    Raises:
        ListenFailed: The port is taken.
    """
    killer = Killer(psutil.Process(os.getppid())) if kills else None
    with _listening(host, port) as listening:
        # critical: otherwise uvicorn logs an error for each open page at its end. Gradio prints failures of handlers itself.
        server = uvicorn.Server(
            uvicorn.Config(web_app(url, killer), log_level="critical", access_log=False, timeout_graceful_shutdown=1)
        )
        if ends_with_input:
            threading.Thread(target=_wait_for_end_of_input, args=(server,), daemon=True).start()
        logging.getLogger("httpx").setLevel(logging.WARNING)
        server.run([listening])


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as exc:
        listening.close()
        raise ListenFailed(host=host, port=port, reason=str(exc.strerror), key="--port") from exc
    return listening


def _wait_for_end_of_input(server: Any) -> None:
    """End the server when standard input is closed: the process that started this one has ended."""
    while os.read(0, 1024):
        pass
    server.should_exit = True

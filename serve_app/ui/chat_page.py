"""`ChatPage` is the chat page: Gradio's components, and a handler for each of their events."""

import html
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import gradio as gr
from pydantic import ValidationError

from serve_app.ui.answering import Answering
from serve_app.ui.api import Service, ServiceProblem
from serve_app.ui.preset import MAX_CHOICES, Message, Preset
from serve_app.ui.shown_answer import ShownAnswer

logger = logging.getLogger(__name__)

Update = dict[Any, Any]
"""Component -> its new value or properties."""

_COPY_LINK = """(query) => {
  const link = location.origin + location.pathname + query;
  navigator.clipboard ? navigator.clipboard.writeText(link) : window.prompt("Link", link);
  return query;
}"""
"""Browsers offer a clipboard only to pages by HTTPS or from localhost; elsewhere a dialog shows the link."""


class ChatPage:
    """Builds the page inside the open `gr.Blocks` ``page``."""

    def __init__(self, service: Service, page: Any) -> None:
        self._service = service
        self._answering = Answering(service)
        self.history = gr.State([])
        """The conversation: each prompt with its first answer, or with the chosen answer."""
        self.asked = gr.State("")
        self.choices = gr.State([])
        """The answers to the last prompt.

        Kept apart from the history until the next prompt: until then the person may choose another answer.
        """
        self._sidebar()
        self._main()
        self._bind(page)

    def _sidebar(self) -> None:
        d = Preset()
        with gr.Sidebar(width=320):
            self.key = gr.Textbox(label="API key", type="password", placeholder="if the service asks for one", elem_id="key")
            model = gr.Dropdown([], label="Model or adapter", allow_custom_value=True, elem_id="model")
            mode = gr.Radio(["chat", "completion"], value=d.mode, label="Mode", elem_id="mode")
            system = gr.Textbox(label="System prompt", lines=2, max_lines=6, elem_id="system")
            temperature = gr.Slider(0, 2, d.temperature, step=0.05, label="Temperature", elem_id="temperature")
            top_p = gr.Slider(0.05, 1, d.top_p, step=0.05, label="Top p", elem_id="top-p")
            n = gr.Slider(1, MAX_CHOICES, d.n, step=1, label="Answers side by side", elem_id="n")
            with gr.Row():
                max_tokens = gr.Number(d.max_tokens, precision=0, label="Max tokens", min_width=100, elem_id="max-tokens")
                seed = gr.Number(None, precision=0, label="Seed", placeholder="random", min_width=100, elem_id="seed")
            stop = gr.Textbox(label="Stop at", placeholder="text that ends an answer", elem_id="stop-at")
            self.copy = gr.Button("Copy a link to these settings", size="sm", elem_id="copy-link")
            self.query = gr.Textbox(visible=False)
        self.controls: dict[str, Any] = {
            "mode": mode,
            "model": model,
            "system": system,
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_tokens,
            "n": n,
            "seed": seed,
            "stop": stop,
        }
        """Field of `Preset` -> the control that sets it. `_main` adds the prompt, which is below the answers."""

    def _main(self) -> None:
        self.problem = gr.HTML("", elem_id="problem", visible=False)
        self.columns, self.chats, self.keeps = [], [], []
        with gr.Row(elem_id="answers"):
            for number in range(MAX_CHOICES):
                with gr.Column(visible=number == 0, min_width=200) as column:
                    self.chats.append(_chatbot(number))
                    self.keeps.append(gr.Button("Continue with this answer", size="sm", visible=False, elem_id=f"keep-{number}"))
                self.columns.append(column)
        self.figures = gr.HTML("", elem_id="figures")
        with gr.Row(elem_id="ask"):
            self.controls["prompt"] = gr.Textbox(
                show_label=False,
                placeholder="Ask something. Enter sends, Shift+Enter starts a new line, Esc stops.",
                lines=1,
                max_lines=8,
                scale=8,
                container=False,
                autofocus=True,
                elem_id="prompt",
            )
            self.send = gr.Button("Send", variant="primary", scale=1, min_width=90, elem_id="send")
            self.stop = gr.Button("Stop", variant="stop", scale=1, min_width=90, visible=False, elem_id="stop")
            self.clear = gr.Button("New chat", scale=1, min_width=120, elem_id="clear")

    def _bind(self, page: Any) -> None:
        controls = list(self.controls.values())
        states = [self.history, self.asked, self.choices]
        shown = [*self.columns, *self.chats, *self.keeps, self.problem, self.figures]
        answered = [*states, *shown, self.controls["prompt"], self.send, self.stop]
        hidden = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
        gr.on(
            [self.send.click, self.controls["prompt"].submit],
            self._send,
            [*states, self.key, *controls],
            answered,
            **(hidden | {"api_visibility": "public"}),
            api_name="send",
        )
        self.stop.click(self._stop, None, None, queue=False, **hidden)
        self.clear.click(self._clear, None, [*states, *shown], **hidden)
        for number, keep in enumerate(self.keeps):
            keep.click(_keep(number), states, [*states, *self.keeps, *self.columns, *self.chats], **hidden)
        self.copy.click(self._link, controls, self.query, **hidden).then(None, self.query, self.query, js=_COPY_LINK)
        self.key.submit(self._models, [self.key, self.controls["model"]], [self.controls["model"], self.problem], **hidden)
        self.key.blur(self._models, [self.key, self.controls["model"]], [self.controls["model"], self.problem], **hidden)
        page.load(self._open, None, [*controls, self.problem], **hidden)
        page.unload(self._leave)

    async def _open(self, request: gr.Request) -> Update:
        """Set the controls from the link, and list the models."""
        preset, problems = Preset.from_link(dict(request.query_params))
        update: Update = {self.controls[name]: value for name, value in preset.model_dump().items() if name != "model"}
        models = await self._models("", preset.model)
        update |= models
        if problems:
            update[self.problem] = _problem(" ".join(problems))
        return update

    async def _models(self, key: str, model: str) -> Update:
        try:
            names = await self._service.models(key)
        except ServiceProblem as exc:
            return {self.controls["model"]: gr.update(value=model or None), self.problem: _problem(str(exc))}
        chosen = model or (names[0] if names else None)
        return {self.controls["model"]: gr.update(choices=names, value=chosen), self.problem: _problem("")}

    async def _send(
        self, history: list[Message], asked: str, choices: list[str], key: str, request: gr.Request, *controls: Any
    ) -> AsyncIterator[Update]:
        named = dict(zip(self.controls, controls, strict=True))
        try:
            preset = Preset.model_validate({name: value for name, value in named.items() if value is not None})
        except ValidationError as exc:
            yield {self.problem: _problem("; ".join(f"{error['loc'][0]}: {error['msg'].lower()}" for error in exc.errors()))}
            return
        if not preset.prompt.strip():
            yield {self.problem: _problem("Type a prompt first.")}
            return
        history = [] if preset.mode == "completion" else _with(history, asked, choices)
        busy = {self.send: gr.update(visible=False), self.stop: gr.update(visible=True)}
        # Show the columns before the first text: Gradio may lose text for a column that the same update makes visible.
        columns = {column: gr.update(visible=number < preset.n) for number, column in enumerate(self.columns)}
        yield busy | columns | {self.problem: _problem(""), self.controls["prompt"]: "", self.history: history}
        answer, problem = None, ""
        try:
            async with aclosing(self._answering.answer(request.session_hash, preset, history, key)) as answers:
                async for answer in answers:
                    yield self._show(history, preset, answer)
        except ServiceProblem as exc:
            problem = str(exc)
        except Exception:
            logger.exception("The chat page could not show an answer.")
            problem = "The page failed; its log has the cause."
        done = {self.send: gr.update(visible=True), self.stop: gr.update(visible=False), self.problem: _problem(problem)}
        if answer is None or not any(answer.texts):
            yield done | {self.controls["prompt"]: preset.prompt, self.asked: "", self.choices: []}
            return
        keeps = {keep: gr.update(visible=preset.n > 1) for keep in self.keeps}
        yield done | keeps | {self.asked: preset.prompt, self.choices: answer.texts}

    def _show(self, history: list[Message], preset: Preset, answer: ShownAnswer) -> Update:
        update: Update = {self.figures: _figures(answer.figures(now=time.monotonic()))}
        for number, (chat, keep) in enumerate(zip(self.chats, self.keeps, strict=True)):
            update[keep] = gr.update(visible=False)
            if number < preset.n:
                thought = [_thought(answer.thoughts[number])] if answer.thoughts[number] else []
                text = {"role": "assistant", "content": answer.texts[number]}
                update[chat] = [*_with(history, preset.prompt, []), *thought, text]
        return update

    def _stop(self, request: gr.Request) -> None:
        self._answering.stop(request.session_hash)

    def _leave(self, request: gr.Request) -> None:
        """End the answer of a closed page."""
        self._answering.stop(request.session_hash)

    def _clear(self, request: gr.Request) -> Update:
        self._answering.stop(request.session_hash)
        update: Update = {chat: [] for chat in self.chats} | {keep: gr.update(visible=False) for keep in self.keeps}
        update |= {column: gr.update(visible=number == 0) for number, column in enumerate(self.columns)}
        return update | {self.history: [], self.asked: "", self.choices: [], self.figures: "", self.problem: _problem("")}

    def _link(self, *controls: Any) -> str:
        named = dict(zip(self.controls, controls, strict=True))
        return Preset.model_construct(**named).link()


def _chatbot(number: int) -> Any:
    return gr.Chatbot(
        show_label=False,
        height="calc(100vh - 260px)",
        min_height=240,
        buttons=["copy"],
        placeholder="<h2>What would you like to know?</h2>" if number == 0 else None,
        latex_delimiters=[],
        elem_id=f"answer-{number}",
    )


def _keep(number: int) -> Any:
    """Return the handler that continues with the answer ``number``: it becomes the only answer, and the next prompt's history."""

    def keep(history: list[Message], asked: str, choices: list[str]) -> list[Any]:
        kept = _with(history, asked, choices[number : number + 1])
        buttons = [gr.update(visible=False)] * MAX_CHOICES
        columns = [gr.update(visible=other == 0) for other in range(MAX_CHOICES)]
        return [kept, "", [], *buttons, *columns, kept, *[[]] * (MAX_CHOICES - 1)]

    return keep


def _with(history: list[Message], asked: str, choices: list[str]) -> list[Message]:
    """Return the conversation with the last prompt and the first of its answers."""
    if not asked:
        return history
    answered = [{"role": "assistant", "content": choices[0]}] if choices else []
    return [*history, {"role": "user", "content": asked}, *answered]


def _thought(text: str) -> dict[str, Any]:
    """Return a message that Gradio shows as a separate part, which can be folded."""
    return {"role": "assistant", "content": text, "metadata": {"title": "Thought"}}


def _problem(text: str) -> Any:
    return gr.update(value=f'<div role="alert">{html.escape(text)}</div>' if text else "", visible=bool(text))


def _figures(text: str) -> str:
    return f'<div aria-live="polite">{html.escape(text)}</div>'

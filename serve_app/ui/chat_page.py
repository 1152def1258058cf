"""`ChatPage` is the chat page: Gradio's components, and a handler for each of their events."""

import html
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import gradio as gr
from pydantic import ValidationError

from serve_app.ui.answering import Answering
from serve_app.ui.api import Service, ServiceProblem
from serve_app.ui.chat import Chat
from serve_app.ui.preset import MAX_CHOICES, Preset
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

_WELCOME = """<h2>What would you like to know?</h2>
<p>Enter sends, Shift+Enter starts a new line, Esc stops.<br>Drop a text file anywhere to add it to the prompt.</p>"""


class ChatPage:
    """Builds the page inside the open `gr.Blocks` ``page``.

    The browser holds the conversation and sends it with each event, so a conversation outlives this process. ``page.js`` keeps the chats in
    the browser's storage.
    """

    def __init__(self, service: Service, page: Any) -> None:
        self._service = service
        self._answering = Answering(service)
        self.chat = gr.JSON(visible=False)
        """The conversation, as `Chat` dumps it."""
        self.listing = gr.JSON(visible=False)
        """The stored chats as pairs of title and id (``choices``), and the id of the one that is open (``value``)."""
        self._sidebar()
        self._main()
        self._bind(page)

    def _sidebar(self) -> None:
        d = Preset()
        with gr.Sidebar(width=320), gr.Tabs():
            with gr.Tab("Chats", render_children=True):
                self.list = gr.Radio([], label="Chats", show_label=False, container=False, elem_id="chats")
                self.delete = gr.Button("Delete this chat", size="sm", visible=False, elem_id="delete")
                gr.HTML("Chats are stored in this browser only.", elem_id="stored")
            with gr.Tab("Settings", render_children=True, elem_id="settings"):
                mode = gr.Radio(["chat", "completion"], value=d.mode, label="Mode", elem_id="mode")
                system = gr.Textbox(label="System prompt", lines=2, max_lines=2, elem_id="system")
                temperature = gr.Slider(0, 2, d.temperature, step=0.05, label="Temperature", elem_id="temperature")
                top_p = gr.Slider(0.05, 1, d.top_p, step=0.05, label="Top p", elem_id="top-p")
                n = gr.Slider(1, MAX_CHOICES, d.n, step=1, label="Answers side by side", elem_id="n")
                with gr.Row():
                    max_tokens = gr.Number(d.max_tokens, precision=0, label="Max tokens", min_width=100, elem_id="max-tokens")
                    seed = gr.Number(None, precision=0, label="Seed", placeholder="random", min_width=100, elem_id="seed")
                stop = gr.Textbox(label="Stop at", placeholder="text that ends an answer", elem_id="stop-at")
                self.copy = gr.Button("Copy a link to these settings", size="sm", elem_id="copy-link")
                self.query = gr.Textbox(visible=False)
        model = gr.Dropdown(
            [],
            label="Model or adapter",
            show_label=False,
            container=False,
            allow_custom_value=True,
            scale=1,
            elem_id="model",
            render=False,
        )
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
        """Field of `Preset` -> the control that sets it. `_main` adds the prompt, and shows the model."""

    def _main(self) -> None:
        with gr.Row(elem_id="head"):
            self.controls["model"].render()
            self.clear = gr.Button("New chat", scale=0, min_width=110, elem_id="clear")
        self.columns, self.answers, self.keeps = [], [], []
        with gr.Row(elem_id="answers"):
            for number in range(MAX_CHOICES):
                with gr.Column(visible=number == 0, min_width=200) as column:
                    self.answers.append(_chatbot(number))
                    self.keeps.append(gr.Button("Continue with this answer", size="sm", visible=False, elem_id=f"keep-{number}"))
                self.columns.append(column)
        self.figures = gr.HTML("", elem_id="figures")
        self.problem = gr.HTML("", elem_id="problem", visible=False)
        self.key = gr.Textbox(label="API key", type="password", visible=False, elem_id="key")
        with gr.Row(elem_id="ask"):
            self.controls["prompt"] = gr.Textbox(
                label="Prompt",
                show_label=False,
                placeholder="Ask something",
                lines=1,
                max_lines=8,
                scale=8,
                container=False,
                autofocus=True,
                elem_id="prompt",
            )
            self.add_file = gr.Button("Add file", scale=0, min_width=90, elem_id="add-file")
            self.send = gr.Button("Send", variant="primary", scale=0, min_width=90, elem_id="send")
            self.stop = gr.Button("Stop", variant="stop", scale=0, min_width=90, visible=False, elem_id="stop")

    def _bind(self, page: Any) -> None:
        controls = list(self.controls.values())
        shown = [self.chat, *self.columns, *self.answers, *self.keeps, self.problem, self.figures, self.controls["prompt"]]
        hidden = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
        # One event for all ways to ask: Gradio lets a page have each event once at a time.
        asked = gr.on(
            [
                self.send.click,
                self.controls["prompt"].submit,
                *(answer.retry for answer in self.answers),
                *(answer.edit for answer in self.answers),
            ],
            self._send,
            [self.chat, self.key, *controls],
            [*shown, self.key, self.send, self.stop, self.clear, self.list, self.delete],
            **(hidden | {"api_visibility": "public"}),
            api_name="send",
        )
        self.stop.click(self._stop, None, None, queue=False, **hidden)
        undone = gr.on([answer.undo for answer in self.answers], self._undo, self.chat, shown, **hidden)
        kept = [keep.click(self._keep(number), self.chat, shown, **hidden) for number, keep in enumerate(self.keeps)]
        cleared = self.clear.click(lambda: self._shown(Chat()), None, shown, **hidden)
        cleared.then(None, None, None, js="() => serveApp.focus()")
        for event in (asked, undone, *kept, cleared):
            self._list_after(event.then(None, self.chat, self.listing, js="(chat) => serveApp.keep(chat)"), hidden)
        self.list.input(None, self.list, self.chat, js="(id) => serveApp.open(id)").then(
            self._reopen, self.chat, shown, **hidden
        ).then(None, None, None, js="() => serveApp.focus()")
        removed = self.delete.click(None, self.chat, [self.listing, self.chat], js="(chat) => serveApp.remove(chat)")
        self._list_after(removed, hidden).then(self._after_delete, self.chat, shown, **hidden)
        self.add_file.click(None, None, None, js="() => serveApp.chooseFiles()")
        self.copy.click(self._link, controls, self.query, **hidden).then(None, self.query, self.query, js=_COPY_LINK)
        for event in (self.key.submit, self.key.blur):
            model = self.controls["model"]
            event(self._models, [self.key, model], [model, self.problem, self.key], **hidden)
        page.load(self._open, None, [*controls, self.problem, self.key], **hidden)
        self._list_after(page.load(None, None, self.listing, js="() => serveApp.listing(null)"), hidden)
        page.unload(self._leave)

    def _list_after(self, event: Any, hidden: dict[str, Any]) -> Any:
        """Show the stored chats after an event that sets ``listing``."""
        return event.then(self._list, self.listing, [self.list, self.delete], **hidden)

    async def _open(self, request: gr.Request) -> Update:
        """Set the controls from the link, and list the models."""
        preset, problems = Preset.from_link(dict(request.query_params))
        update: Update = {self.controls[name]: value for name, value in preset.model_dump().items() if name != "model"}
        models = await self._models("", preset.model)
        update |= models
        if problems:
            update[self.problem] = _problem(" ".join(problems))
        return update

    async def _models(self, key: str | None, model: str) -> Update:
        """List the models. The field for the API key is shown as long as the service refuses the key."""
        chooser = self.controls["model"]
        try:
            names = await self._service.models(key or "")
        except ServiceProblem as exc:
            return self._failure(exc) | {chooser: gr.update(value=model or None)}
        chosen = model or (names[0] if names else None)
        return {
            chooser: gr.update(choices=names, value=chosen),
            self.problem: _problem(""),
            self.key: gr.update(visible=False),
        }

    async def _send(
        self, chat: Any, key: str | None, event: gr.EventData, request: gr.Request, *controls: Any
    ) -> AsyncIterator[Update]:
        """Answer the prompt in its field, an edited prompt, or the last prompt once more. An edit to nothing deletes prompt and answer."""
        known = Chat.read(chat)
        turn, prompt, is_edit = _asked(known, event)
        if is_edit and not (prompt or "").strip():
            yield self._shown(known.without(turn))
            return
        named = dict(zip(self.controls, controls, strict=True))
        # Without an answer the prompt goes back into its field. A retried prompt does not, because the chat still has it, nor does an
        # edited prompt if the field holds the next one.
        is_given_back = prompt is None or (is_edit and not named["prompt"])
        named |= {} if prompt is None else {"prompt": prompt}
        failed = self._shown(known) | ({self.controls["prompt"]: named["prompt"]} if is_given_back else {})
        try:
            preset = Preset.model_validate({name: value for name, value in named.items() if value is not None})
            refusal = preset.refusal()
        except ValidationError as exc:
            refusal = "; ".join(f"{error['loc'][0]}: {error['msg'].lower()}" for error in exc.errors())
        if refusal:
            yield ({} if prompt is None else failed) | {self.problem: _problem(refusal)}
            return
        base = known.before(turn)
        if preset.mode == "completion" and base.turns:
            base = Chat()
        if prompt is None:
            yield {self.controls["prompt"]: ""}
        async with aclosing(self._answer(base, preset, key or "", request.session_hash, failed=failed)) as updates:
            async for update in updates:
                yield update

    async def _answer(self, base: Chat, preset: Preset, key: str, page: str, *, failed: Update) -> AsyncGenerator[Update, None]:
        """Add a turn to ``base``. Without an answer the page is updated with ``failed``."""
        idle = (self.clear, self.list, self.delete)
        busy = {self.send: gr.update(visible=False), self.stop: gr.update(visible=True)}
        busy |= {control: gr.update(interactive=False) for control in idle}
        # Show the columns before the first text: Gradio may lose text for a column that the same update makes visible.
        columns = {column: gr.update(visible=number < preset.n) for number, column in enumerate(self.columns)}
        yield busy | columns | {self.problem: _problem("")}
        answer, failure = None, {self.problem: _problem("")}
        try:
            async with aclosing(self._answering.answer(page, preset, base.messages(), key)) as answers:
                async for answer in answers:
                    yield self._growing(base, preset, answer)
        except ServiceProblem as exc:
            failure = self._failure(exc)
        except Exception:
            logger.exception("The chat page could not show an answer.")
            failure = {self.problem: _problem("The page failed; its log has the cause.")}
        done = {self.send: gr.update(visible=True), self.stop: gr.update(visible=False)}
        done |= {control: gr.update(interactive=True) for control in idle}
        if answer is None or not any(answer.texts):
            yield failed | done | failure
            return
        keeps = {keep: gr.update(visible=preset.n > 1) for keep in self.keeps}
        yield done | failure | keeps | {self.chat: base.answered(preset.prompt, answer.texts).model_dump()}

    def _failure(self, problem: ServiceProblem) -> Update:
        """Say what went wrong, and show the field for the API key if the service wants one."""
        asks = {self.key: gr.update(visible=True)} if problem.needs_key else {}
        return asks | {self.problem: _problem(str(problem))}

    def _growing(self, base: Chat, preset: Preset, answer: ShownAnswer) -> Update:
        update: Update = {self.figures: _figures(answer.figures(now=time.monotonic()))}
        asked = {"role": "user", "content": preset.prompt}
        for number, (column, keep) in enumerate(zip(self.answers, self.keeps, strict=True)):
            update[keep] = gr.update(visible=False)
            if number < preset.n:
                thought = [_thought(answer.thoughts[number])] if answer.thoughts[number] else []
                text = {"role": "assistant", "content": answer.texts[number]}
                update[column] = [*base.messages(), asked, *thought, text]
        return update

    def _shown(self, chat: Chat) -> Update:
        """Show a conversation in one column."""
        update: Update = {column: gr.update(visible=number == 0) for number, column in enumerate(self.columns)}
        update |= {keep: gr.update(visible=False) for keep in self.keeps}
        update |= {answer: chat.messages() if number == 0 else [] for number, answer in enumerate(self.answers)}
        return update | {self.chat: chat.model_dump(), self.figures: "", self.problem: _problem("")}

    def _keep(self, number: int) -> Any:
        """Return the handler that continues with the answer ``number``."""

        def keep(chat: Any) -> Update:
            return self._shown(Chat.read(chat).with_choice(number))

        return keep

    def _undo(self, chat: Any) -> Update:
        """Take the last turn back, and give its prompt to the field."""
        known = Chat.read(chat)
        if not known.turns:
            return self._shown(known)
        return self._shown(known.before(len(known.turns) - 1)) | {self.controls["prompt"]: known.turns[-1][0]}

    def _reopen(self, chat: Any) -> Update:
        return self._shown(Chat.read(chat))

    def _after_delete(self, chat: Any) -> Update:
        """Show an empty chat if the chat was deleted. If the person cancelled, the page stays as it is."""
        return self._shown(Chat()) if chat is None else gr.skip()

    def _list(self, listing: dict[str, Any]) -> Update:
        choices = [(title, chat_id) for title, chat_id in listing["choices"]]
        is_stored = listing["value"] in [chat_id for _, chat_id in choices]
        value = listing["value"] if is_stored else None
        return {self.list: gr.update(choices=choices, value=value), self.delete: gr.update(visible=is_stored)}

    def _stop(self, request: gr.Request) -> None:
        self._answering.stop(request.session_hash)

    def _leave(self, request: gr.Request) -> None:
        """End the answer of a closed page."""
        self._answering.stop(request.session_hash)

    def _link(self, *controls: Any) -> str:
        named = dict(zip(self.controls, controls, strict=True))
        return Preset.model_construct(**named).link()


def _chatbot(number: int) -> Any:
    return gr.Chatbot(
        label=f"Answer {number + 1}",
        show_label=False,
        height="100%",
        buttons=["copy"],
        editable="user",
        placeholder=_WELCOME if number == 0 else None,
        latex_delimiters=[],
        elem_id=f"answer-{number}",
    )


def _asked(known: Chat, event: gr.EventData) -> tuple[int, str | None, bool]:
    """Return the index of the turn to answer, its prompt (None for the one in its field), and whether the prompt was edited.

    Gradio's retry and edit name the index of a prompt among the messages, in which a turn has two; only edit has the text before.
    """
    data = event._data
    if not isinstance(data, dict) or "index" not in data or not known.turns:
        return len(known.turns), None, False
    turn = min(data["index"] // 2, len(known.turns) - 1)
    is_edit = "previous_value" in data
    return turn, str(data["value"]) if is_edit else known.turns[turn][0], is_edit


def _thought(text: str) -> dict[str, Any]:
    """Return a message that Gradio shows as a separate part, which can be folded."""
    return {"role": "assistant", "content": text, "metadata": {"title": "Thought"}}


def _problem(text: str) -> Any:
    return gr.update(value=f'<div role="alert">{html.escape(text)}</div>' if text else "", visible=bool(text))


def _figures(text: str) -> str:
    """Return the figures; where the line is too narrow for all, it is broken between two of them."""
    figures = " · ".join(f"<span>{html.escape(figure)}</span>" for figure in text.split(" · "))
    return f'<div aria-live="polite">{figures}</div>'

"""Between vLLM's app and the client: a refusal before the first byte gets a real status, an error after it a last event.

vLLM begins a stream before it asks the engine, and ends one only by errors of its own.
"""

from starlette.types import Message, Send

from serve_app.ingress.admission import Admission
from serve_app.ingress.error_answers import answer_of, responses_event, stream_event

_BEFORE_THE_ENGINE = (b"event: response.created\n", b"event: response.in_progress\n")
_ERROR_OF_VLLM = b'data: {"error": '


class HeldAnswer:
    """An ASGI ``send`` that keeps everything back until the first byte that the engine has a part in."""

    def __init__(self, send: Send, verdict: Admission, *, is_responses: bool) -> None:
        self._send = send
        self._verdict = verdict
        self._is_responses = is_responses
        self._held: list[Message] = []
        self._num_events = 0
        self._begun = False
        self._ended = False
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if self._ended:
            return
        if not self._begun and self._comes_before_the_engine(message):
            self._held.append(message)
            return
        error = self._verdict.error
        if error is not None and not self._begun:
            await self._refuse()
            return
        if error is not None and message.get("body", b"").startswith(_ERROR_OF_VLLM):
            message = {**message, "body": stream_event(error)}  # vLLM's has no type that tells one 503 from another
        await self._release()
        await self._pass_on(message)

    async def end(self) -> bool:
        """Tell the client why the app has failed, if the fleet knows; return whether it does."""
        error = self._verdict.error
        if error is None:
            return False
        if not self._begun:
            await self._refuse()
        elif not self._ended:
            event = responses_event(error, self._num_events) if self._is_responses else stream_event(error)
            await self._pass_on({"type": "http.response.body", "body": event, "more_body": False})
        return True

    def _comes_before_the_engine(self, message: Message) -> bool:
        return message["type"] == "http.response.start" or (
            self._is_responses and message.get("body", b"").startswith(_BEFORE_THE_ENGINE)
        )

    async def _refuse(self) -> None:
        error = self._verdict.error
        assert error is not None
        self._begun = self._ended = True
        response = answer_of(error).response()
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await self._send({"type": "http.response.body", "body": response.body})

    async def _release(self) -> None:
        self._begun = True
        held, self._held = self._held, []
        for message in held:
            await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._num_events += bool(message.get("body"))
            self._ended = not message.get("more_body", False)
        await self._send(message)

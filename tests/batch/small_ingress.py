"""This process has the Files and Batches API in front of a model that answers in capitals. Without vLLM, it starts in two seconds.

Run as ``python -m tests.batch.small_ingress FOLDER PORT DELAY_S [SETTINGS]``; the settings are those of `ingress.batch` as JSON, else a
folder below FOLDER. Each prompt that is asked becomes a line of ``FOLDER/asked``.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from serve_app.batch.records import NO_OWNER, Owner
from serve_app.batch.rows import any_line
from serve_app.batch.service import BatchService, Routes
from serve_app.config import BatchSettings, IngressSettings
from serve_app.errors import ServingError
from serve_app.ingress.http.listener import Listener


class SmallIngress:
    def __init__(self, service: BatchService, asked: Path, delay_s: float) -> None:
        self._stored: dict[str, Routes] = {"files": service.files, "batches": service.batches}
        self._delay_s = delay_s
        self._asked = os.open(asked, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        parts = scope["path"].split("/")[2:]
        methods = self._stored[parts[0]].methods(tuple(parts[1:]))
        assert methods is not None
        try:
            response = await methods[scope["method"]](Request(scope, receive), NO_OWNER)
        except ServingError as exc:
            response = JSONResponse({"error": {"message": str(exc)}}, exc.http_status)
        await response(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send, owner: Owner) -> None:
        """Answer a line of a batch."""
        body: dict[str, Any] = json.loads((await receive())["body"])
        prompt = body["messages"][-1]["content"]
        os.write(self._asked, f"{prompt}\n".encode())
        await asyncio.sleep(self._delay_s)
        answer = {"id": "1", "choices": [{"message": {"content": prompt.upper()}}], "usage": {"total_tokens": 5}}
        await JSONResponse(answer)(scope, receive, send)


async def main(folder: Path, port: int, delay_s: float, given: dict[str, Any]) -> None:
    service = BatchService(BatchSettings(**(given or {"dir": folder / "store"}), concurrency=8))
    app = SmallIngress(service, folder / "asked", delay_s)
    listener = Listener(app, IngressSettings(port=port))
    await listener.start()
    service.start(app.answer, lambda _: ["tiny"], any_line, state_of_key=lambda _: "valid")
    while True:
        await asyncio.sleep(1.0)
        listener.check()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), json.loads("".join(sys.argv[4:]) or "{}")))

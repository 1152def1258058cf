"""An image of a chat becomes tensors in the ingress, and the engine gets them, also an engine with a newer vLLM.

An ingress whose Python lacks what a model's processor imports refuses the image by the package's name.
"""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import Blip2Processor
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from serve_app.ingress.front_end import front_end
from tests.contracts.tables import VERSIONS
from tests.doubles.fake_engine import VLLM_VERSION
from tests.doubles.fleet import MODEL, in_loop
from tests.doubles.tiny_blip2 import IMAGE_TOKENS, SIZE, make_tiny_blip2
from tests.ingress.serving import serving


def image_of(body: dict[str, Any]) -> str:
    """Return the chat's image in base64."""
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    return str(url.partition(",")[2])


def question() -> dict[str, Any]:
    """Return the body of a chat with an image."""
    picture = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(picture, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 2}


@pytest.mark.parametrize("version", sorted({VLLM_VERSION, VERSIONS[1]}))
@in_loop
async def test_an_image_reaches_the_engine_as_tensors(version: str, tmp_path: Path) -> None:
    async with serving(make_tiny_blip2(tmp_path / "blip2"), adapters=(), vllm_version=version) as (http, engine, _):
        answer = await http.post("/v1/chat/completions", json=question())
        assert answer.status_code == 200, answer.text
        (asked,) = engine.added
    assert asked.mm_features is not None
    (feature,) = asked.mm_features
    assert (feature.modality, feature.mm_position.length) == ("image", IMAGE_TOKENS)
    assert feature.data is not None
    assert feature.data["pixel_values"].data.shape == (3, SIZE, SIZE)


CUDA_IMAGE, INSTALL = "run the CUDA image in all pods", "install it"
HIDDEN = ImportError("Please install vllm[video] for video support")
HIDDEN.__cause__ = ModuleNotFoundError("No module named 'cv2'")


@pytest.mark.parametrize(
    ("place", "error", "package", "way_out"),
    [
        ((BaseMultiModalProcessor, "apply"), ModuleNotFoundError("No module named 'torchvision'"), "torchvision", CUDA_IMAGE),
        (
            (Blip2Processor, "__call__"),  # vLLM makes a ValueError of it
            ImportError("SomeVideoProcessor requires the Torchvision library but it was not found in your environment."),
            "torchvision",
            CUDA_IMAGE,
        ),
        ((BaseMultiModalProcessor, "apply"), HIDDEN, "cv2", INSTALL),
    ],
)
@in_loop
async def test_an_image_for_which_a_package_is_missing_is_refused_by_its_name_on_each_route(
    place: tuple[type, str],
    error: Exception,
    package: str,
    way_out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    said = (
        f"a request like this one, for which the ingress needs the Python package {package}, is not supported; "
        f"the ingress lacks it: ask the operator to {way_out}"
    )
    refused = {"error": {"message": said, "type": "BadRequestError", "param": None, "code": 400}}
    asked = question()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image_of(asked)}}
    messages = {**asked, "messages": [{"role": "user", "content": [image]}]}
    async with serving(make_tiny_blip2(tmp_path / "blip2"), adapters=()) as (http, engine, _):
        monkeypatch.setattr(*place, fail)
        for more in ({}, {"stream": True}):
            answer = await http.post("/v1/chat/completions", json=asked | more)
            assert (answer.status_code, answer.json()) == (400, refused)
        answer = await http.post("/v1/messages", json=messages)
        assert (answer.status_code, answer.json()["error"]) == (400, {"type": "invalid_request_error", "message": said})
        assert engine.added == []
        text = {**asked, "messages": [{"role": "user", "content": "What is it?"}]}
        assert (await http.post("/v1/chat/completions", json=text)).status_code == 200
    (warning,) = (record.getMessage() for record in caplog.records if record.name == front_end.__name__)
    assert warning.startswith(f"requests for {MODEL} get 400, since they need the package {package}: ")
    assert warning.endswith(f"; {way_out}")


@in_loop
async def test_an_import_that_fails_for_another_reason_stays_an_error_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ImportError("cannot import name 'a' from 'b'")

    async with serving(make_tiny_blip2(tmp_path / "blip2"), adapters=()) as (http, _, _):
        monkeypatch.setattr(BaseMultiModalProcessor, "apply", fail)
        assert (await http.post("/v1/chat/completions", json=question())).status_code == 500

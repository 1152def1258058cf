"""A processor of media that fails while the ingress starts is named with its model, the first cause and what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.errors import FrontEndStartFailed
from serve_app.ingress.front_end.media_failures import start_failure
from tests.doubles.fleet import in_loop
from tests.doubles.tiny_blip2 import make_tiny_blip2
from tests.ingress.test_frontend import front_of

FILES = "processor_config.json, preprocessor_config.json and what they name must be complete in the checkpoint"
TEXT_ALONE = "engine_args.language_model_only: true serves text alone"
PROCESSOR = "the front end of 'chat' did not start: its processor of images, sound or video failed: "


def without_processor(folder: Path) -> None:
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()


def of_unknown_type(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "NoSuchProcessor"}))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("damage", "cause", "way_out"),
    [
        (without_processor, "OSError: Can't load image processor for ", f"{FILES}; {TEXT_ALONE}"),
        (
            of_unknown_type,
            "ValueError: Unrecognized image processor in ",
            f"...; {FILES}; code of the checkpoint's own needs engine_args.trust_remote_code: true; {TEXT_ALONE}",
        ),
    ],
)
@in_loop
async def test_a_checkpoint_with_a_damaged_processor_serves_text_alone_as_the_error_says(
    damage: Callable[[Path], None], cause: str, way_out: str, tmp_path: Path
) -> None:
    damage(folder := make_tiny_blip2(tmp_path / "model"))
    with pytest.raises(FrontEndStartFailed) as failed:
        await front_of(folder, engine_args={"max_model_len": 64})
    said = str(failed.value)
    assert said.startswith(PROCESSOR + cause), said
    assert said.endswith(way_out), said
    await front_of(folder, engine_args={"max_model_len": 64, "language_model_only": True})


def raised_in(module: str, exc: Exception) -> Exception:
    with pytest.raises(type(exc)) as raised:
        exec("raise exc", {"__name__": module, "exc": exc})
    return raised.value


LACKS_TORCHVISION = ImportError("GemmaImageProcessor requires the Torchvision library but it was not found")


@pytest.mark.parametrize(
    ("module", "exc", "said"),
    [
        (
            "vllm.multimodal.processing.context",
            LACKS_TORCHVISION,
            f"{PROCESSOR}ImportError: {LACKS_TORCHVISION}; this Python lacks torchvision: run the CUDA image in all pods. {TEXT_ALONE}",
        ),
        (
            "vllm.model_executor.models.registry",
            ModuleNotFoundError("No module named 'einops'"),
            "the front end of 'chat' did not start: ModuleNotFoundError: No module named 'einops'; "
            "this Python lacks einops: install it",
        ),
        ("vllm.config.model", ValueError("too long"), "the front end of 'chat' did not start: ValueError: too long"),
    ],
)
def test_a_package_that_is_lacking_is_named_with_the_way_to_get_it(module: str, exc: Exception, said: str) -> None:
    assert str(start_failure("chat", raised_in(module, exc))) == said

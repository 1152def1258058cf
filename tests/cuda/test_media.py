"""Both images' vLLM makes the same tensors of images, sound and video, for each model of which an ingress of the CPU image sends them to an
engine of the CUDA image.

Both images have one version of the other packages that a processor calls (`tests/test_locks.py`), but for two. torchvision, with
torchaudio and torchcodec, is in the CUDA image only: a processor that needs it makes nothing in the CPU image, and others resize by Pillow,
to the same size with other rounding. torch is newer in the CUDA image: a processor scales and reshapes with it, here to the same tensors of
an image. The handshake compares a model's configuration and its tokenizer.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.config.vllm_source import takes_media
from serve_app.vllm_versions import may_send_media
from tests.contracts.tables import VERSIONS
from tests.cuda.conftest import PYTHONS, run
from tests.cuda.media_sources import Comparison, Pair, Source
from tests.doubles.tiny_blip2 import make_tiny_blip2

READ = {
    "vllm._version:__version__": "the hub is told it",
    "vllm.config.model:ModelConfig.get_inputs_embeds_size": (
        "the width of a client's own embeddings, which differs only where OPT's tokens are narrower than its hidden states"
    ),
    "vllm.model_executor.models.diffusion_gemma:DiffusionGemmaForConditionalGeneration.get_placeholder_str": "as Gemma 4's",
    "vllm.model_executor.models.gemma4_mm:Gemma4ForConditionalGeneration.get_placeholder_str": (
        "for templates that take no parts of a message; the ingress writes it and looks for it, and refuses the request if it is not there"
    ),
    "vllm.multimodal.image:convert_image_mode": (
        "an RGB image with one transparent colour: 0.32 leaves that colour, 0.33 makes it white; the shape is the same"
    ),
    "vllm.renderers.base:BaseRenderer._process_multimodal": "it forgets entries of a cache that an ingress does not have",
    "vllm.renderers.params:TokenizeParams": "the type of a text's `max_output_tokens`",
    "vllm.tokenizers.registry:cached_tokenizer_from_config": "`code_revision` of a tokenizer; the handshake compares vocabularies",
    "vllm.tokenizers.registry:get_tokenizer": "the same",
}
"""Definitions that differ and were read -> why the engine gets tensors that its model reads, nevertheless."""
HANDED_OVER = [f"vllm.multimodal.{name}" for name in ("hasher", "inputs", "parse")]
HANDED_OVER += [f"vllm.multimodal.processing.{name}" for name in ("context", "dummy_inputs", "inputs", "processor")]
"""Modules of whose classes all processors get objects, so that their code need not name them."""
AROUND = [
    ("vllm.config.model", "ModelConfig._resolve_mm_device_do_normalize"),
    ("vllm.config.multimodal", "MultiModalConfig"),
    ("vllm.multimodal.registry", "MultiModalRegistry"),
    ("vllm.renderers.base", "BaseRenderer._process_mm_uuids"),
    ("vllm.renderers.base", "BaseRenderer._process_multimodal"),
    ("vllm.v1.engine.input_processor", "InputProcessor"),
]
"""What calls the processors and puts their tensors into a request. Of what else these name, not all is equal or concerns media."""


def package(image: str) -> Path:
    (found,) = Path(PYTHONS[image]).parents[1].glob("lib/python3.*/site-packages/vllm")
    return found


@pytest.fixture(scope="module")
def versions() -> Comparison:
    return Comparison(Source(package("cpu")), Source(package("cuda")))


def told(pairs: set[Pair]) -> Iterator[str]:
    for (home, name), newer in pairs:
        yield f"{home}:{name}" if (home, name) == newer else f"{home}:{name} is now {newer[0]}:{newer[1]}"


def test_media_are_sent_for_the_models_that_both_versions_process_alike(versions: Comparison) -> None:
    differences = {
        architecture: {*told(versions.of_model(architecture))}
        for architecture in versions.older.media_models.keys() & versions.newer.media_models.keys()
    }
    alike = {architecture for architecture, found in differences.items() if found <= READ.keys()}
    known = versions.older.media_models.keys() | versions.newer.media_models.keys()
    assert {architecture for architecture in known if may_send_media(architecture, *VERSIONS)} == alike
    assert {"PaddleOCRVLForConditionalGeneration", "NemotronParseForConditionalGeneration"} <= differences.keys() - alike
    assert READ.keys() - {name for architecture in alike for name in differences[architecture]} == {
        "vllm.renderers.base:BaseRenderer._process_multimodal"
    }


def test_check_knows_which_models_take_media(versions: Comparison) -> None:
    """It asks the vLLM of its Python; here that is the newer one."""
    assert {architecture for architecture in versions.newer.media_models if not takes_media(architecture)} == set()


def test_what_all_processors_get_and_what_calls_them_is_alike(versions: Comparison) -> None:
    classes = [
        (module, name)
        for module in HANDED_OVER
        if (inside := versions.older.module(module)) is not None
        for name in inside.definitions
        if name not in inside.imports  # a name for type checkers
    ]
    found = {*told(versions.differences((place, place) for place in classes))}
    found |= {f"{home}:{name}" for home, name in AROUND if not versions.is_equal((home, name))}
    assert found <= READ.keys()
    assert {"BaseMultiModalProcessor", "InputProcessingContext", "MultiModalFieldConfig"} <= {name for _, name in classes}


def test_the_tensors_of_an_image_are_alike(tmp_path: Path) -> None:
    checkpoint = make_tiny_blip2(tmp_path / "blip2")
    offline = {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    cpu, cuda = (run(image, "tests.cuda.media_tensors", str(checkpoint), env=offline) for image in PYTHONS)
    older, newer = (each.pop("tensors") for each in (cpu, cuda))
    assert cpu == cuda
    assert may_send_media(cpu["architecture"], *VERSIONS)
    assert {name: told[:-1] for name, told in older.items()} == {name: told[:-1] for name, told in newer.items()}
    for name in older:  # Pillow resizes in one image, torchvision in the other
        assert newer[name][-1] == pytest.approx(older[name][-1], abs=0.05)


def write(package: Path, files: dict[str, str]) -> Source:
    for name, text in files.items():
        file = package / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Source(package)


MODEL = {
    "__init__": "",
    "model_executor.models.registry": '_M = {"A": ("a", "A"), "Text": ("a", "Text"), "Child": ("a", "Child")}',
    "model_executor.models.interfaces": "class SupportsTranscription:\n    def get_prompt(self): ...",
    "model_executor.models.a": (
        "from vllm.processors import Parent, P\n"
        "class Text: ...\n"
        "@REGISTRY.register_processor(P, info=I)\n"
        "class A:\n"
        "    def get_prompt(self): return 1\n"
        "    def forward(self): return 2\n"
        "class Child(A): ...\n"
        "class I(Parent): size = 1"
    ),
    "config.model": (
        "class ModelConfig:\n    def width(self): return self.size()\n    def size(self): return 1\n    def depth(self): return 2"
    ),
    "processors": (
        "from .helpers import pad as fill\n"
        "class Parent:\n"
        "    def get(self, x: int) -> int:\n"
        '        "Pad."\n'
        "        return fill(x, envs.SIZE, self.ctx.model_config.width())\n"
        "class P: ...\n"
        "from vllm import envs"
    ),
    "helpers": "def pad(x, size): return x[size:]",
    "envs": "if TYPE_CHECKING:\n    SIZE: int = 4\nenvironment_variables: D = {'SIZE': lambda: 6, 'OTHER': lambda: 5}",
}


@pytest.mark.parametrize(
    ("module", "old", "new", "found"),
    [
        ("helpers", "x[size:]", "x[:size]", ["vllm.helpers:pad"]),
        ("envs", "int = 4", "int = 5", ["vllm.envs:SIZE"]),
        ("envs", "lambda: 6", "lambda: 7", ["vllm.envs:SIZE"]),
        ("envs", "lambda: 5", "lambda: 7", []),
        ("config.model", "return 1", "return 3", ["vllm.config.model:ModelConfig.size"]),
        ("config.model", "return 2", "return 3", []),
        ("model_executor.models.a", "size = 1", "size = 2", ["vllm.model_executor.models.a:I"]),
        ("model_executor.models.a", "return 1", "return 3", ["vllm.model_executor.models.a:A.get_prompt"]),
        ("model_executor.models.a", "return 2", "return 3", []),
        ("model_executor.models.a", "class Child(A): ...", "class Child(A):\n    get_prompt = 1", ["Child"]),
        ("processors", '"Pad."', '"Pad to a size."', []),
        ("processors", "x: int) -> int", "x) -> float", []),
        ("processors", "pad as fill\n", "pad\nfill = pad\n", ["vllm.helpers:pad is now vllm.processors:fill"]),
        ("processors", "fill", "filled", []),
    ],
)
def test_a_difference_is_found_wherever_the_names_lead(module: str, old: str, new: str, found: list[str], tmp_path: Path) -> None:
    older = write(tmp_path / "older", MODEL)
    newer = write(tmp_path / "newer", {**MODEL, module: MODEL[module].replace(old, new)})
    assert older.media_models.keys() == {"A", "Child"}
    of_child = [*told(Comparison(older, newer).of_model("Child"))]
    if found == ["Child"]:
        assert of_child == ["vllm.model_executor.models.a:A.get_prompt is now vllm.model_executor.models.a:Child.get_prompt"]
    else:
        assert of_child == [*told(Comparison(older, newer).of_model("A"))] == found

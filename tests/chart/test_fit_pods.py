"""`serve-app fit` names the sizes of pods that the chart renders, and reads what the chart renders."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.sizing.nodes import pod_sizes
from tests.chart.places import HUB, S3
from tests.chart.render import Rendered, Values, at, merged, models, render
from tests.sizing.shapes import LLAMA_8B

CHECKPOINTS_GIB = (0, 1, 9, 15, 18, 27, 44, 63, 132, 221, 400)
"""Multiples of 9 are whole tenths of the limit: a rounding error would add a GiB."""


def _sizes(made: Rendered, group: str) -> dict[str, str]:
    pod, resources = made.pod(group), made.container(group)["resources"]
    (shm,) = (v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory")
    return {f"{kind} {name}": resources[kind][name] for kind in ("requests", "limits") for name in ("cpu", "memory")} | {
        "shm": shm
    }


def test_fit_and_chart_give_a_replica_the_same_pod() -> None:
    """Both have the rule: templates cannot call Python, and fit runs without the chart."""
    asked = {f"m{num_gpus}-{gib}": (num_gpus, gib, 0.0) for num_gpus in (1, 2, 4, 8) for gib in CHECKPOINTS_GIB}
    asked |= {f"kv{number}": (2, gib, kv) for number, (gib, kv) in enumerate([(0, 64.0), (132, 64.0), (0, 0.5)])}
    of_fit = {}
    for name, (num_gpus, gib, kv) in asked.items():
        sizes = pod_sizes(num_gpus, kv)
        of_fit[name] = {
            "requests cpu": str(sizes.cpu_request),
            "requests memory": f"{sizes.memory_request_gib}Gi",
            "limits cpu": str(sizes.cpu_limit),
            "limits memory": f"{sizes.limit_of_chart_gib(gib)}Gi",
            "shm": f"{sizes.shm_gib}Gi",
        }
    made = render(
        models(
            *(
                {
                    "name": name,
                    "model": "embedded:smollm2-135m-instruct",
                    "device": "cuda",
                    "gpus_per_replica": num_gpus,
                    "pods": {"checkpointSize": f"{gib}Gi" if gib else ""},
                    **({"kv": {"offload_gib": kv}} if kv else {}),
                }
                for name, (num_gpus, gib, kv) in asked.items()
            )
        )
    )
    assert {name: _sizes(made, f"model-{name}") for name in asked} == of_fit


CHAT = {"name": "chat", "model": "/models/m", "device": "cuda", "gpus_per_replica": 1, "engine_args": {"max_model_len": 16384}}
LOADED = merged(models(CHAT), {"weights": {"enabled": True, "downloads": [HUB, S3]}})
"""HUB is fetched to /models/m, at a commit of forty a."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def fit(folder: Path, values: Values) -> tuple[int, str]:
    """Run `serve-app fit` on what the chart renders of the values; return its exit status, and its output in one line."""
    file = folder / "manifests.yaml"
    file.write_text(render(values).text)
    done = CliRunner().invoke(app, ["fit", str(file), "--gpu", "l4"], terminal_width=80)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def test_fit_finds_the_model_that_a_job_fetches_in_the_cache_of_the_hub_and_reads_the_pods_own_sizes(
    hub: Path, tmp_path: Path
) -> None:
    snapshot = hub / "models--o--n" / "snapshots" / HUB["revision"]
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA_8B))
    code, output = fit(tmp_path, LOADED)
    assert code == 0, output
    assert "pod: memory 12 to 24 GiB" in output
    assert "modelPods.checkpointSize: 15Gi" in output
    code, output = fit(tmp_path, merged(LOADED, at("modelPods.checkpointSize", "15Gi")))
    assert code == 0
    assert "pod: memory 12 to 29 GiB" in output
    assert "checkpointSize" not in output
    code, output = fit(tmp_path, merged(LOADED, at("modelPods.resources", {"limits": {"memory": "20Gi"}})))
    assert "pod: memory 12 to 20 GiB" in output


def test_fit_says_how_to_get_the_config_of_a_model_that_a_job_will_fetch(hub: Path, tmp_path: Path) -> None:
    code, output = fit(tmp_path, LOADED)
    assert code == 1
    assert "RayService demo: models.chat.model: o/n is neither here nor in the cache of the hub" in output
    assert f"run `hf download o/n config.json --revision {HUB['revision']}` first" in output
    code, output = fit(tmp_path, merged(LOADED, at("config.models.chat.model", f"/models/{S3['path']}")))
    assert code == 1
    assert "models.chat.model: s3://b/p is not on this machine" in output
    assert "run `aws s3 cp s3://b/p/config.json b/p/config.json`, then the same command again in this folder" in output
    code, output = fit(tmp_path, merged(models(CHAT), at("weights", {"enabled": True, "existingClaim": "mine"})))
    assert code == 1
    assert "models.chat.model: /models/m is not on this machine; fit reads no volume of the cluster" in output
    assert "copy its config.json to models/m/, then the same command again" in output


@pytest.mark.parametrize(
    ("copy", "weights"),
    [("b/p", {"downloads": [S3]}), ("models/s", {"existingClaim": "mine"})],
)
def test_fit_reads_the_file_where_its_own_command_has_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: str, weights: Values
) -> None:
    monkeypatch.chdir(tmp_path)
    values = merged(models(CHAT | {"model": "/models/s"}), {"weights": {"enabled": True, **weights}})
    code, output = fit(tmp_path, values)
    assert (code, f"{copy}/" in output) == (1, True)
    (tmp_path / copy).mkdir(parents=True)
    (tmp_path / copy / "config.json").write_text(json.dumps(LLAMA_8B))
    code, output = fit(tmp_path, values)
    assert (code, "chat: llama, 8.03 billion parameters" in output) == (0, True), output


def test_fit_reads_the_folder_of_a_bucket_where_the_volume_is_mounted(tmp_path: Path) -> None:
    (tmp_path / S3["path"]).mkdir()
    (tmp_path / S3["path"] / "config.json").write_text(json.dumps(LLAMA_8B))
    file = tmp_path / "manifests.yaml"
    values = merged(LOADED, at("config.models.chat.model", f"/models/{S3['path']}"))
    file.write_text(render(values).text.replace("/models/", f"{tmp_path}/"))
    done = CliRunner().invoke(app, ["fit", str(file), "--gpu", "l4"], terminal_width=80)
    assert done.exit_code == 0, done.output
    assert "chat: llama, 8.03 billion parameters" in done.output

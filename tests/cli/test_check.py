"""`serve-app check` and `serve-app config schema` run here as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.cluster import _num_cpus
from serve_app.cli.main import app, main
from serve_app.config import load_settings, settings_json_schema

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, command)
    return result.exit_code, result.output


def test_the_schema_command_prints_the_schema() -> None:
    code, output = run("config", "schema")
    assert (code, json.loads(output)) == (0, settings_json_schema())


def test_check_sums_up_what_a_file_asks_for() -> None:
    code, output = run("check", str(EXAMPLES / "gpu.yaml"))
    assert code == 0
    assert "1 to 8 replicas, each with 4 CPU + 1 GPU" in output
    assert "At full scale Ray reserves 48 CPU and 8 GPU for it." in output


@pytest.mark.parametrize(("cores", "lacks"), [(2, True), (3, False)])
def test_check_says_that_one_machine_may_have_fewer_cpus_than_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, lacks: bool
) -> None:
    file = tmp_path / "own.yaml"  # as that of docs/start.md
    file.write_text("models: {m: {model: org/small, replicas: {min: 2, max: 2}}}")
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    code, output = run("check", "--no-vllm", str(file))
    assert code == 0, output
    assert "At full scale Ray reserves 3 CPU for it." in output
    said = "A cluster needs that many CPUs; on this machine serve-app up starts with 2, which its processes share."
    assert (said in output) == lacks
    assert _num_cpus(load_settings(file)) >= 3  # which `up` tells Ray that this machine has


@pytest.mark.parametrize(
    ("num_gpus", "minimum", "said"),
    [
        (0, 1, "serve-app up does not start on this machine: the smallest fleet needs 1 GPU, and none is seen here."),
        (1, 2, "serve-app up does not start on this machine: the smallest fleet needs 2 GPUs, and 1 is seen here."),
        (2, 2, "A cluster needs that many CPUs; on this machine serve-app up starts with 1, which its processes share."),
    ],
)
def test_check_says_where_a_model_on_gpus_can_start(
    num_gpus: int, minimum: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "echo NVIDIA L4, 580.1\n" * num_gpus)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    file = tmp_path / "gpu.yaml"
    file.write_text(f"models: {{m: {{model: org/m, device: cuda, gpus_per_replica: 1, replicas: {{min: {minimum}, max: 4}}}}}}")
    code, output = run("check", "--no-vllm", str(file))
    assert code == 0, output
    starts = [line for line in output.splitlines() if "this machine" in line and not line.startswith("note:")]
    assert starts == [said]
    assert ("It starts on a machine that has all this, on a Ray cluster (--address)" in output) is (num_gpus < minimum)


def test_check_counts_missing_files_and_nodes_among_what_this_machine_lacks(tmp_path: Path) -> None:
    file = tmp_path / "wide.yaml"
    at = f"ingress: {{api_keys_file: {tmp_path}/nowhere/keys}}"
    simulated = "simulated: {profile: a10g-llama-8b}"
    file.write_text(f"models: {{m: {{model: org/wide, {simulated}, gpus_per_replica: 2, nodes: 2}}}}\n{at}")
    code, output = run("check", "--no-vllm", str(file))
    assert code == 0, output
    assert "serve-app up does not start on this machine: m needs 2 nodes; 1 file is missing, see below." in output


def test_check_says_what_a_replica_needs_on_each_of_its_nodes(tmp_path: Path) -> None:
    file = tmp_path / "wide.yaml"
    file.write_text("models: {m: {model: org/wide, device: cuda, gpus_per_replica: 16, nodes: 2, num_cpus: 4}}")
    code, output = run("check", "--no-vllm", str(file))
    assert code == 0, output
    assert "1 replica with 4 CPU + 8 GPU on each of 2 nodes" in output
    assert "At full scale Ray reserves 9 CPU and 16 GPU for it." in output


def test_check_counts_no_more_gpus_than_autoscaling_may_use(tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text((EXAMPLES / "gpu.yaml").read_text() + "\nautoscaling: {max_gpus: 3}\n")
    code, output = run("check", str(tmp_path / "few.yaml"))
    assert code == 0, output
    assert "and 3 GPU for it, of 8 that all models at their maximum would have." in output


def test_check_imports_neither_vllm_nor_torch_nor_ray() -> None:
    program = (
        "import sys; from serve_app.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "print(sorted({'vllm', 'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, "check", "--no-vllm", str(EXAMPLES / "cpu.yaml")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modls: []", "modls: unknown key; did you mean models?"),
        ("models: {a: {model: 'embedded:smollm2-135m'}}", "models.a.model: no embedded model 'smollm2-135m'; "),
        ("config: {models: []}", "holds values of the Helm chart; check what they render: helm template demo helm/serve-app -f "),
    ],
)
def test_an_error_is_one_line_with_file_and_key_and_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["serve-app", "check", str(file)])
    with pytest.raises(SystemExit) as exited:
        main()
    captured = capsys.readouterr()
    assert exited.value.code == 1
    assert captured.out == ""
    assert captured.err.startswith(f"error: {file}: {said}")
    assert captured.err.count("\n") == 1


def test_empty_standard_input_points_to_the_command_before_the_pipe() -> None:
    command = [sys.executable, "-m", "serve_app.cli.main", "check", "-"]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
    said = "error: standard input: is empty; the command before the pipe failed; its message says why\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_every_mistake_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {a: {model: /a, device: gpu, engine_args: {seed: one}}}\ningress: {prot: 8011}")
    code, output = run("check", str(file))
    assert (code, [line.split("; ")[0] for line in output.splitlines()]) == (
        1,
        [
            f"error: {file}: models.a.engine_args.seed: is 'one', but vLLM takes int",
            f"error: {file}: models.a.device: is 'gpu', but should be 'cpu' or 'cuda'",
            f"error: {file}: ingress.prot: unknown key",
        ],
    )


def test_timeouts_out_of_order_are_refused_by_the_name_of_the_rule(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {a: {model: /a}}\ntimeouts: {drain_s: 20}")
    code, output = run("check", str(file), "--client-timeout-s", "10", "--load-balancer-idle-s", "60")
    assert (code, output.splitlines()) == (
        1,
        [
            f"error: {file}: drain-outlasts-wait: timeouts.drain_s is 20 and timeouts.no_replica_s is 30: a stopping ingress "
            "would cut requests that still wait for a replica; 30 or more is needed",
            f"error: {file}: client-outlasts-drain: the clients' timeout is 10 and timeouts.drain_s must be 30: clients would "
            "give up answers that are still being made; 30 or more is needed",
        ],
    )


def test_a_rule_of_the_timeouts_can_be_broken_on_purpose_and_no_other_name_ignored(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("models: {a: {model: /a}}\ntimeouts: {drain_s: 20}")
    code, output = run("check", str(file), "--client-timeout-s", "10", "--ignore", "drain-outlasts-wait")
    assert (code, output.count("error:")) == (1, 1)
    assert "client-outlasts-drain" in output
    both = ("--ignore", "drain-outlasts-wait", "--ignore", "client-outlasts-drain")
    assert run("check", str(file), "--client-timeout-s", "10", *both)[0] == 0


def test_a_rule_that_does_not_exist_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve-app", "check", str(EXAMPLES / "cpu.yaml"), "--ignore", "drain-outlast-wait"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert (
        "--ignore: 'drain-outlast-wait' is not a rule of the timeouts; did you mean drain-outlasts-wait?"
        in capsys.readouterr().err
    )


def test_a_path_that_no_file_system_takes_is_one_that_does_not_exist(tmp_path: Path) -> None:
    file, path = tmp_path / "serve.yaml", f"/{'a' * 300}"
    file.write_text(f"models: {{a: {{model: {path}}}}}\nprotocol: {{cluster_token_file: {path}}}")
    code, output = run("check", "--no-vllm", str(file))
    assert (code, output.count(f"note: {path} does not exist on this machine")) == (0, 2)


def test_a_valid_file_of_tenants_is_counted_alone_and_with_its_configuration(tmp_path: Path) -> None:
    file, tenants = tmp_path / "serve.yaml", tmp_path / "tenants.yaml"
    old = f"{{id: old, sha256: {'a' * 64}, expires: 2026-01-01}}"
    tenants.write_text(f"tenants: {{team: {{keys: [{old}, {{id: new, sha256: {'b' * 64}}}]}}, free: {{}}}}")
    file.write_text(f"models: {{a: {{model: embedded:smollm2-135m-instruct}}}}\ningress: {{tenants_file: {tenants}}}")
    for checked in (tenants, file):
        code, output = run("check", "--no-vllm", str(checked))
        assert (code, "tenants: 2, with 2 API keys in all" in output) == (0, True), output
        assert "note: the API key old has expired on 2026-01-01 (tenant team)" in output


def test_a_limit_may_have_an_exponent(tmp_path: Path) -> None:
    file, tenants = tmp_path / "serve.yaml", tmp_path / "tenants.yaml"
    tenants.write_text(f"tenants: {{team: {{keys: [{{id: new, sha256: {'b' * 64}}}], limits: {{tokens_per_day: 5e7}}}}}}")
    file.write_text(f"models: {{a: {{model: embedded:smollm2-135m-instruct}}}}\ningress: {{tenants_file: {tenants}}}")
    for checked in (tenants, file):
        code, output = run("check", "--no-vllm", str(checked))
        assert (code, "tenants: 1, with 1 API key in all" in output) == (0, True), output


def test_each_mistake_of_a_tenants_file_is_a_line(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants: {team: {tpm: 5, weight: 0}}")
    code, output = run("check", str(tenants))
    assert code == 1
    assert f"error: {tenants}: tenants.team.tpm: unknown key; write limits.tokens_per_minute\n" in output
    assert f"error: {tenants}: tenants.team.weight: is 0, but should be" in output


def test_missing_authorities_of_the_issuer_are_noted(tmp_path: Path) -> None:
    file, tenants = tmp_path / "serve.yaml", tmp_path / "tenants.yaml"
    tenants.write_text("tenants: {team: {}}")
    oidc = "{issuer: https://login.example.org, audience: serve-app, tenant_claim: groups, ca_file: /none/ca.pem}"
    file.write_text(
        f"models: {{a: {{model: embedded:smollm2-135m-instruct}}}}\ningress: {{tenants_file: {tenants}, oidc: {oidc}}}"
    )
    code, output = run("check", "--no-vllm", str(file))
    assert (code, "note: /none/ca.pem does not exist on this machine; the nodes of the cluster need it" in output) == (0, True)


@pytest.mark.parametrize(
    ("keys", "is_there", "is_noted"),
    [
        ("kv: {transfer: nixl}", False, True),
        ("kv: {transfer: nixl}", True, False),
        ("kv: {transfer: none}", False, False),
        ("kv: {transfer: nixl}, simulated: {profile: h100-llama-8b, link: nvlink-4}", False, False),
    ],
)
def test_a_model_that_moves_kv_without_nixl_is_noted_with_the_extra(
    keys: str, is_there: bool, is_noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.cli.startable.find_spec", lambda name: {"nixl": object() if is_there else None}[name])
    file = tmp_path / "serve.yaml"
    file.write_text(f"models: {{a/b: {{model: /models/any, {keys}}}}}")
    code, output = run("check", "--no-vllm", str(file))
    said = (
        'note: models["a/b"].kv.transfer is nixl, and nixl is not installed for this Python; where replicas run, '
        "pip install 'serve-app[kv]', or set kv.transfer: none"
    )
    assert (code, said in " ".join(output.split())) == (0, is_noted)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_the_examples_timeouts_are_in_order(file: Path) -> None:
    code, output = run("check", "--no-vllm", str(file))
    assert code == 0, output


@pytest.mark.parametrize(("args", "is_noted"), [("{}", False), ("{scheduling_policy: fcfs}", True)])
def test_an_engine_that_starts_tenants_in_the_order_of_arrival_is_noted(args: str, is_noted: bool, tmp_path: Path) -> None:
    file, tenants = tmp_path / "serve.yaml", tmp_path / "tenants.yaml"
    tenants.write_text("tenants: {team: {}}")
    file.write_text(
        f"models: {{a: {{model: embedded:smollm2-135m-instruct, engine_args: {args}}}}}\ningress: {{tenants_file: {tenants}}}"
    )
    code, output = run("check", "--no-vllm", str(file))
    said = "note: models.a.engine_args.scheduling_policy is not priority: tenants' requests start in the order of arrival"
    assert (code, said in " ".join(output.split())) == (0, is_noted)


@pytest.mark.parametrize(
    ("config", "keys", "is_noted"),
    [
        ('{"architectures": ["PaddleOCRVLForConditionalGeneration"]}', "device: cuda, gpus_per_replica: 1", True),
        ('{"architectures": ["PaddleOCRVLForConditionalGeneration"]}', "device: cpu", False),
        ('{"architectures": ["ColPaliForRetrieval"]}', "device: cuda, gpus_per_replica: 1", True),
        ('{"architectures": ["InklingForConditionalGeneration"]}', "device: cuda, gpus_per_replica: 1", True),
        ('{"architectures": ["Blip2ForConditionalGeneration"]}', "device: cuda, gpus_per_replica: 1", False),
        ('{"architectures": ["LlamaForCausalLM"]}', "device: cuda, gpus_per_replica: 1", False),
        ('{"architectures": [3]}', "device: cuda, gpus_per_replica: 1", False),
        ("[]", "device: cuda, gpus_per_replica: 1", False),
        ("{", "device: cuda, gpus_per_replica: 1", False),
    ],
)
def test_a_model_on_gpus_whose_media_an_ingress_of_the_cpu_image_refuses_is_noted(
    config: str, keys: str, is_noted: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config)
    file = tmp_path / "serve.yaml"
    file.write_text(f"models: {{a: {{model: {tmp_path}, {keys}}}}}")
    code, output = run("check", "--no-vllm", str(file))
    said = (
        "note: models.a: an ingress with vLLM 0.32.0 (the CPU image) refuses images, sound and video for replicas with 0.33.0 (the CUDA "
        "image), which may make other tensors of them for {}; for media, give all pods the CUDA image"
    )
    noted = [said.format(name) for name in json.loads(config)["architectures"]] if is_noted else []
    output = " ".join(output.split())
    assert (code, output.count("refuses images")) == (0, len(noted))
    assert all(each in output for each in noted), output

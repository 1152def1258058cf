"""``serve-app batch run`` runs here as a process of its own, against a small HTTP server that counts the requests."""

import bz2
import gzip
import json
import lzma
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serve_app.batch.rows import open_input, rows
from serve_app.errors import BatchError
from tests.batch.service import Service

pytestmark = pytest.mark.timeout(240)


class Batch:
    """One input and its output."""

    def __init__(self, service: Service, folder: Path, lines: list[Any] | None = None, name: str = "in.jsonl") -> None:
        self.service, self.source, self.output = service, folder / name, folder / "out.jsonl"
        if lines is not None:
            self.source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start(self, *options: str, **kwargs: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "serve_app.cli.main", "batch", "run", str(self.source), "-o", str(self.output)]
        environment = {**os.environ, "COLUMNS": "500"}
        return subprocess.Popen(
            [*command, "--url", self.service.url, *options], stderr=subprocess.PIPE, text=True, env=environment, **kwargs
        )

    def run(self, *options: str, **kwargs: Any) -> tuple[int, str]:
        process = self.start(*options, **kwargs)
        _, said = process.communicate(timeout=200)
        return process.returncode, said

    def answers(self) -> dict[str, str]:
        lines = [json.loads(line) for line in self.output.read_text().splitlines()]
        found = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
        assert len(found) == len(lines), "an id twice"
        return found

    def errors(self) -> dict[str, str]:
        file = self.output.with_name("out.jsonl.errors.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return {f"{line['custom_id']} {line['error']['code']}": line["error"]["message"] for line in lines}


def prompts(num: int) -> list[dict[str, Any]]:
    return [{"custom_id": f"id-{i}", "prompt": f"prompt {i}"} for i in range(num)]


def test_killed_again_and_again_each_line_has_one_answer_and_hardly_one_was_asked_twice(service: Service, tmp_path: Path) -> None:
    service.delay_s = 0.02
    batch, chance, num_kills = Batch(service, tmp_path, prompts(2000)), random.Random(1), 0
    while True:
        process = batch.start("--concurrency", "8")
        until = service.asked.total() + chance.randint(200, 900)
        while process.poll() is None and service.asked.total() < until:
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()
            process.wait()
            num_kills += 1
            assert not batch.output.exists() or len(batch.answers()) == 2000, "an output that is not whole"
            continue
        break
    assert process.returncode == 0
    assert num_kills >= 2
    assert batch.answers() == {f"id-{i}": f"PROMPT {i}" for i in range(2000)}
    assert list(batch.answers()) == [f"id-{i}" for i in range(2000)], "the order of the input"
    # What was under way, and what a commit each 5 ms had not reached.
    assert service.asked.total() - 2000 <= num_kills * (8 + 8 * 0.1 / service.delay_s)


def test_ctrl_c_leaves_a_batch_that_goes_on(service: Service, tmp_path: Path) -> None:
    service.delay_s = 0.05
    batch = Batch(service, tmp_path, prompts(400))
    process = batch.start("--concurrency", "4")
    while service.asked.total() < 40:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues from there" in said
    service.delay_s = 0.0
    assert batch.run()[0] == 0
    assert len(batch.answers()) == 400
    assert service.asked.total() < 400 + 40


def test_a_finished_batch_asks_nothing_and_an_edited_input_only_for_what_changed(service: Service, tmp_path: Path) -> None:
    lines = prompts(20)
    batch = Batch(service, tmp_path, lines)
    assert batch.run()[0] == 0
    assert batch.run()[0] == 0
    assert service.asked.total() == 20
    lines[3]["prompt"] = "another"
    del lines[5]
    Batch(service, tmp_path, [*lines, {"custom_id": "new", "prompt": "new"}])
    assert batch.run()[0] == 0
    assert service.asked.total() == 22
    assert len(batch.answers()) == 20
    assert (batch.answers()["id-3"], batch.answers()["new"]) == ("ANOTHER", "NEW")


def test_each_bad_line_has_its_reason_and_the_others_their_answers(service: Service, tmp_path: Path) -> None:
    batch = Batch(service, tmp_path)
    lines = [
        b'{"custom_id": "a", "prompt": "good"}',
        b'{"custom_id": "b", "prompt":',
        b'{"custom_id": "c"}',
        b"\xff\xfe",
        b"[1]",
        b'{"custom_id": "a", "prompt": "again"}',
        b'{"prompt": "' + b"x" * (17 << 20) + b'"}',
        b'{"custom_id": "d", "method": "POST", "url": "/v1/files", "body": {}}',
        b'{"custom_id": "e", "prompt": "e", "stream": true}',
        b"",
        b'{"custom_id": "f", "method": "POST", "url": "/v1/completions", "body": {"prompt": "raw"}}',
        b'"only a prompt"',
    ]
    batch.source.write_bytes(b"\n".join(lines))
    code, said = batch.run()
    assert code == 3, said
    assert batch.answers() == {"a": "GOOD", "f": "RAW", "line-12": "ONLY A PROMPT"}
    errors = batch.errors()
    assert errors["line-2 invalid_line"].startswith("the line is not JSON")
    assert errors["c invalid_line"] == "the line has neither messages nor a text as 'prompt'"
    assert errors["line-4 invalid_line"] == "the line is not UTF-8 at byte 0"
    assert errors["line-5 invalid_line"] == "the line is a JSON list, neither an object nor a text"
    assert errors["a duplicate_id"] == "the id 'a' is another line's already"
    assert errors["line-7 invalid_line"] == "the line is longer than 16 MiB"
    assert errors["d invalid_line"].startswith("the line has the url '/v1/files', none of ")
    assert errors["e invalid_line"].startswith("the line asks for a stream")
    assert len(errors) == 8


def test_a_full_service_is_waited_for_and_a_refused_line_has_the_services_words(service: Service, tmp_path: Path) -> None:
    def verdict(prompt: str) -> int:
        if prompt == "prompt 7":
            return 400
        return 503 if service.asked[prompt] < 3 else 200

    service.verdict = verdict
    batch = Batch(service, tmp_path, prompts(50))
    assert batch.run()[0] == 3
    assert batch.errors() == {"id-7 request_failed": "no: 400"}
    assert len(batch.answers()) == 49
    service.verdict = lambda prompt: 200
    assert batch.run()[0] == 3, "it is not asked again unbidden"
    assert batch.run("--retry-failed")[0] == 0
    assert len(batch.answers()) == 50
    assert batch.errors() == {}


def test_lines_that_name_their_models_need_no_default_of_a_service_with_several(service: Service, tmp_path: Path) -> None:
    service.models = ["red", "blue"]
    lines = [{"id": f"id-{i}", "prompt": f"prompt {i}", "model": service.models[i % 2]} for i in range(4)]
    batch = Batch(service, tmp_path, lines)
    assert batch.run()[0] == 0
    assert sorted(body["model"] for body in service.bodies) == ["blue", "blue", "red", "red"]


def test_a_line_without_a_model_needs_a_default_of_a_service_with_several(service: Service, tmp_path: Path) -> None:
    service.models = ["red", "blue"]
    status, said = Batch(service, tmp_path, prompts(1)).run()
    assert (status, "serves red, blue; name one of them as the model" in " ".join(said.split())) == (1, True)


def test_what_the_service_fails_is_tried_again_and_then_given_up(service: Service, tmp_path: Path) -> None:
    service.verdict = lambda prompt: 500 if prompt == "prompt 1" else 200
    batch = Batch(service, tmp_path, prompts(3))
    assert batch.run("--tries", "2")[0] == 3
    assert service.asked["prompt 1"] == 2
    assert batch.errors() == {"id-1 request_failed": "no: 500"}


def test_a_service_that_is_away_stops_the_batch_and_nothing_is_lost(service: Service, tmp_path: Path) -> None:
    batch = Batch(service, tmp_path, prompts(10))
    service.verdict = lambda prompt: 503 if prompt == "prompt 9" else 200
    code, said = batch.run("--patience-s", "1")
    assert code == 1
    assert "nothing was answered for" in said
    assert "run the same command: what was answered is kept" in said
    service.verdict = lambda prompt: 200
    assert batch.run()[0] == 0
    assert [service.asked[f"prompt {i}"] for i in range(9)] == [1] * 9


def test_of_two_at_once_one_is_refused(service: Service, tmp_path: Path) -> None:
    service.delay_s = 1.0
    batch = Batch(service, tmp_path, prompts(200))
    first = batch.start("--concurrency", "4")
    while not service.asked:
        time.sleep(0.02)
    code, said = batch.run()
    assert code == 1
    assert "another process is writing" in said
    service.delay_s = 0.0
    assert first.wait(timeout=100) == 0
    assert service.asked.total() == 200


def test_a_full_disk_stops_it_and_with_room_it_goes_on(service: Service, tmp_path: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    batch = Batch(service, tmp_path, prompts(3000))
    code, said = batch.run(preexec_fn=limited)
    assert code == 1
    assert "make room and run the same command" in said
    assert batch.run()[0] == 0
    assert len(batch.answers()) == 3000


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("in.csv", 'prompt,max_tokens\n"a, b",1\nc,2\n', ()),
        ("in.txt", "a, b\n\nc\n", ()),
        ("in.csv", 'q,x\n"a, b",1\nc,2\n', ("--prompt-field", "q")),
        ("data", "a, b\nc\n", ("--format", "text")),
    ],
)
def test_csv_and_text(service: Service, tmp_path: Path, name: str, text: str, options: tuple[str, ...]) -> None:
    batch = Batch(service, tmp_path, name=name)
    batch.source.write_text(text)
    assert batch.run(*options)[0] == 0
    assert list(batch.answers().values()) == ["A, B", "C"]


def test_parquet_and_a_value_of_it_that_no_request_can_hold(service: Service, tmp_path: Path) -> None:
    batch = Batch(service, tmp_path, name="in.parquet")
    table = pa.table({"prompt": ["a", "b", "c"], "max_tokens": [1, None, 3], "user": [None, b"bytes", None]})
    pq.write_table(table, batch.source)
    assert batch.run()[0] == 3
    assert batch.answers() == {"line-1": "A", "line-3": "C"}
    said = "the line holds a value that JSON has no form for: Object of type bytes is not JSON serializable"
    assert batch.errors() == {"line-2 invalid_line": said}
    assert sorted(body["max_tokens"] for body in service.bodies) == [1, 3]


def test_the_api_key_is_the_first_one_in_plain_text_of_a_file(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"# of the team\n\nsha256:{'0' * 64}\n  secret\nanother\n")
    assert Batch(service, tmp_path, prompts(1)).run("--api-key-file", str(file))[0] == 0
    assert service.keys == {"Bearer secret"}
    file.write_text(f"# of the team\nsha256:{'0' * 64}\n")
    code, said = Batch(service, tmp_path, prompts(2)).run("--api-key-file", str(file))
    assert (code, "holds no key in plain text; name a file with a key" in said) == (2, True)
    code, said = Batch(service, tmp_path, prompts(2)).run("--api-key-file", str(tmp_path / "none"))
    assert (code, "the API key cannot be read" in said) == (2, True)


def test_what_the_command_says_is_in_each_request(service: Service, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    batch = Batch(service, tmp_path, [{"prompt": "a", "temperature": 1}])
    options = ("-p", "max_tokens=8", "-p", "temperature=0", "--system", "Be brief.", "--schema", str(schema), "--model", "m")
    assert batch.run(*options)[0] == 0
    (body,) = service.bodies
    assert body == {
        "model": "m",
        "max_tokens": 8,
        "temperature": 1,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
    }


@pytest.mark.parametrize(
    ("text", "name", "options", "said"),
    [
        (None, "in.jsonl", (), "cannot be opened: No such file or directory"),
        ("", "in.jsonl", (), "the input has no lines"),
        ("x", "in.what", (), "its name does not show the format; give --format, one of csv, jsonl, parquet, text"),
        ("x", "in.txt", ("-p", "max_tokens"), "'max_tokens' is not NAME=VALUE"),
        ("x", "in.txt", ("--url", "http://127.0.0.1:9", "--patience-s", "1"), "/v1/models does not answer: "),
        ("x", "in.txt", ("--url", "127.0.0.1:9"), "the URL is '127.0.0.1:9'; give one that begins with http:// or https://"),
        ("x", "in.txt", ("--format", "JSONL"), "--format is 'JSONL'; give one of csv, jsonl, parquet, text"),
        ("x", "in.txt", ("--output", "."), "--output is '.', a folder; name a file in it"),
        ("x", "in.txt", ("--embedded", "fleet.yaml"), "leave out --url: with --embedded the batch has a service of its own"),
        ("x", "in.txt", ("--address", "auto"), "give --embedded: only a fleet of the batch's own is started on a cluster"),
    ],
)
def test_what_cannot_begin_says_why(
    service: Service, tmp_path: Path, text: str | None, name: str, options: tuple[str, ...], said: str
) -> None:
    batch = Batch(service, tmp_path, name=name)
    if text is not None:
        batch.source.write_text(text)
    code, told = batch.run(*options)
    assert code in (1, 2)
    assert said in " ".join(told.split())


@pytest.mark.parametrize("name", ["out.jsonl", "./out.jsonl", "link.jsonl", "out.jsonl.errors.jsonl", "out.jsonl.journal"])
def test_an_input_that_the_command_would_write_is_refused_and_kept(service: Service, tmp_path: Path, name: str) -> None:
    (tmp_path / "link.jsonl").symlink_to("out.jsonl")
    (tmp_path / name).write_text('{"prompt": "a"}\n')
    command = [sys.executable, "-m", "serve_app.cli.main", "batch", "run", name, "-o", str(tmp_path / "out.jsonl")]
    options = ["--format", "jsonl", "--url", service.url]
    environment = {**os.environ, "COLUMNS": "500"}
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "which this command writes; choose another --output" in done.stderr
    assert (tmp_path / name).read_text() == '{"prompt": "a"}\n'


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_an_input_is_read_whatever_it_is_compressed_by(tmp_path: Path, suffix: str) -> None:
    with fsspec.open(str(path := tmp_path / f"in.jsonl{suffix}"), "wb", compression="infer") as file:
        file.write(b'{"prompt": "a"}\n\n{"prompt": "b"}\n')
    with open_input(str(path)) as opened:
        assert [(row.number, row.value) for row in rows(opened, "jsonl")] == [(1, {"prompt": "a"}), (3, {"prompt": "b"})]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_an_input_that_is_no_whole_archive_is_told_with_its_name(tmp_path: Path, suffix: str, is_cut: bool) -> None:
    data = random.Random(1).randbytes(100_000)
    content = {".gz": gzip.compress(data), ".bz2": bz2.compress(data), ".xz": lzma.compress(data)}[suffix]
    (path := tmp_path / f"in.jsonl{suffix}").write_bytes(content[: len(content) // 2] if is_cut else b"no archive")
    with pytest.raises(BatchError, match=rf"in\.jsonl\{suffix} cannot be decompressed: .*; get or compress it again"):
        list(rows(open_input(str(path)), "text", name=str(path)))

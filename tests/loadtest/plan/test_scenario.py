"""These tests check that a written scenario is read back unchanged, and that fields which a law ignores are refused."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import loadtest
from loadtest.errors import UsageError
from loadtest.inputs import read_yaml
from loadtest.plan.overrides import scenario_of
from loadtest.plan.request_class import RECORDED, Length
from loadtest.plan.scenario import load_scenario, parse_scenario
from loadtest.plan.schedule import make_schedule

SHIPPED = sorted(Path(loadtest.__file__).with_name("scenarios").glob("*.yaml"))


def with_length(**values: Any) -> dict[str, Any]:
    return {"name": "x", "arrival": {"law": "poisson", "rate": 5}, "requests": [{"output_tokens": values}]}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_scenario_that_was_written_is_the_same_when_it_is_read_again(path: Path, tmp_path: Path) -> None:
    scenario = load_scenario(path)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(scenario.model_dump(mode="json")))
    again = load_scenario(tmp_path / "again.yaml")
    assert again == scenario
    assert make_schedule(again).sha256 == make_schedule(scenario).sha256


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_scenario_is_found_by_its_name_in_a_clone_too(path: Path) -> None:
    assert not (Path(loadtest.__file__).parents[1] / path.stem).exists()  # a path of that name would be taken in its place


LENGTHS = st.one_of(
    st.builds(Length, dist=st.just("constant"), mean=st.integers(1, 4096)),
    st.builds(Length, dist=st.just("uniform"), min=st.integers(1, 50), max=st.integers(50, 500)),
    st.builds(Length, dist=st.just("exponential"), mean=st.floats(1, 1000), max=st.integers(1, 5000)),
    st.builds(Length, dist=st.just("lognormal"), mean=st.floats(1, 1000), cv=st.floats(0.01, 5)),
)


@given(LENGTHS)
def test_every_law_of_lengths_is_the_same_when_it_is_read_again(length: Length) -> None:
    written = yaml.safe_dump(length.model_dump(mode="json"))
    assert Length.model_validate(yaml.safe_load(written)) == length


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"dist": "uniform", "mean": 64}, "uniform takes min, max, and not mean (64); leave it out"),
        ({"dist": "uniform", "mean": 16, "max": 32}, "uniform takes min, max, and not mean (16); leave it out"),
        ({"dist": "uniform", "cv": 2}, "uniform takes min, max, and not cv (2); leave it out"),
        ({"dist": "exponential", "cv": 1.0}, "exponential takes mean, min, max, and not cv (1); leave it out"),
        ({"cv": 0.5}, "constant takes mean, min, max, and not cv (0.5); leave it out"),
    ],
)
def test_what_a_law_does_not_use_is_refused_by_its_name(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_scenario(with_length(**values))
    assert str(caught.value) == f"requests.0.output_tokens: {problem}"


def test_manifests_that_name_every_field_can_still_be_read() -> None:
    every = {"dist": "uniform", "mean": 64.0, "cv": 1.0, "min": 1, "max": 9}
    assert parse_scenario(with_length(**every), context=RECORDED) == parse_scenario(with_length(dist="uniform", min=1, max=9))


def test_a_device_a_pipe_and_a_large_file_are_no_scenarios(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (Path("/dev/zero"), Path("/dev/full"), tmp_path / "pipe.yaml"):
        with pytest.raises(UsageError, match="is a pipe, a socket or a device, which may have no end; give the path of a file"):
            load_scenario(path)
    with (tmp_path / "sparse.yaml").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UsageError, match=r"sparse.yaml: holds more than 1,048,576 characters"):
        load_scenario(tmp_path / "sparse.yaml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: a\narrival: {law: poisson}\nname: b\n", "s.yaml:3: 'name' is given twice, in lines 1 and 3; keep one of them"),
        ("name: a\nrequests:\n- weight: 1\n  weight: 2\n", "s.yaml:4: 'weight' is given twice, in lines 3 and 4"),
        ("name: a\narrival: {law: poisson\n", "s.yaml:3: expected ',' or '}'"),
        ("name: " + "[" * 20_000, "s.yaml: lists or mappings lie too deep in each other"),
        ("arrival: !!map [a]\n", "s.yaml:1: expected a mapping node, but found sequence"),
        ("name: a\nseed: !!int ''\n", "s.yaml:2: '' cannot be read as int: string index out of range"),
        ("name: a\nseed: !!bool x\n", "s.yaml:2: 'x' cannot be read as bool: 'x'"),
        ("name: a\nduration_s: 1:30\n", "s.yaml:2: YAML reads 1:30 as 90; write 90, or '1:30' for a text"),
        ("duration_s: 1:30.5\n", "s.yaml:1: YAML reads 1:30.5 as 90.5; write 90.5"),
        (f"name: a\nseed: {'9' * 5000}\n", "s.yaml:2: the number 99999999999999999999... has 5,000 characters, at most 300"),
        ("seed: 010\n", "s.yaml:1: YAML reads 010 as 8; write 8, or '010' for a text"),
        pytest.param(
            "a0: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 60)),
            "s.yaml: aliases (*name) stand for more than 4,194,304 values and characters; write fewer of them",
            id="aliases-that-double",
        ),
        pytest.param(
            "a0: &a0 [x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}]\n" for k in range(1, 200)),
            "s.yaml: lists or mappings lie too deep in each other",
            id="aliases-inside-each-other",
        ),
        ("a: &a [*a]\n", "s.yaml: lists or mappings lie too deep in each other"),
        ("arrival: {<<: {law: poisson, law: step}}\n", "s.yaml:1: 'law' is given twice"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_place(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    for load in (load_scenario, lambda path: scenario_of(path, ["duration_s=9"])):
        with pytest.raises(UsageError) as raised:
            load(tmp_path / "s.yaml")
        assert problem in str(raised.value)


def test_a_key_that_takes_the_place_of_a_merged_one_is_not_given_twice(tmp_path: Path) -> None:
    merged = "b: &b {law: poisson, rate: 1}\na: &a {<<: *b, rate: 2}\nc: {<<: *a}\n"
    (tmp_path / "s.yaml").write_text(merged)
    assert read_yaml(tmp_path / "s.yaml")["c"] == {"law": "poisson", "rate": 2}


def test_aliases_that_repeat_a_class_of_requests_work(tmp_path: Path) -> None:
    classes = "- &chat {name: a, weight: 2}\n" + "".join(f"- {{<<: *chat, name: a{k}}}\n" for k in range(199))
    (tmp_path / "s.yaml").write_text(f"name: x\narrival: {{law: poisson, rate: 1}}\nrequests:\n{classes}")
    assert {cls.weight for cls in load_scenario(tmp_path / "s.yaml").requests} == {2.0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed: on", "scenario: seed takes numbers (got True); YAML reads on and yes as true"),
        ("arrival: {law: poisson, rate: yes}", "arrival: rate takes numbers (got True)"),
        ("requests: [{cancel_after_s: on}]", "requests.0: cancel_after_s takes numbers (got True)"),
        ("requests: [{token_ids: [off, 9]}]", "requests.0: token_ids takes numbers (got False)"),
        ("slo: {limits: [{metric: ttft, quantile: 0.9, limit_s: on}]}", "slo.limits.0: limit_s takes numbers (got True)"),
        ("name: ..", "name '..' is a folder's own name or the one above; add a letter or a digit"),
        ("name: .", "name '.' is a folder's own name"),
        ('requests: [{extra_body: {a: "\\ud800"}}]', "requests.0.extra_body.a is '\\ud800', which has half of a surrogate pair"),
        ('requests: [{prompts: "\\udfff"}]', "requests.0.prompts is '\\udfff', which has half of a surrogate pair"),
        (
            "arrival: {law: flash-crowd, rate: 1, peak_rate: 9, at_s: 9, rise_s: 1.0e-308}",
            "arrival.rise_s: must be 0 or at least 0.001 s",
        ),
        ('observe: {metrics_url: "http://[::1"}', "observe.metrics_url: Invalid IPv6 URL (got 'http://[::1')"),
        ("requests: [{shared_prefix_tokens: 1000000000000}]", "requests.0.shared_prefix_tokens: Input should be less than"),
    ],
)
def test_what_is_no_number_and_no_name_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_scenario({"name": "x", "arrival": {"law": "poisson", "rate": 1}, **yaml.safe_load(text)})
    assert problem in str(caught.value)


def test_too_many_classes_are_refused_with_both_numbers_but_not_of_an_old_run() -> None:
    classes = [{"name": f"a{k}"} for k in range(201)]
    values = {"name": "x", "arrival": {"law": "poisson", "rate": 1}, "requests": classes}
    with pytest.raises(UsageError, match="requests: 201 classes, at most 200; leave some out"):
        parse_scenario(values)
    assert len(parse_scenario(values, context=RECORDED).requests) == 201


def test_on_is_true_where_true_belongs() -> None:
    cls = {"stream": True, "extra_body": {"a": True}}
    assert parse_scenario({"name": "..x", "arrival": {"law": "poisson", "rate": 1}, "requests": [cls]}).requests[0].stream


def test_the_path_of_a_key_in_a_message_is_short() -> None:
    deep = yaml.safe_load("[" * 90 + ".nan" + "]" * 90)
    cls = {"endpoint": "chat", "prompt": "text", "tools": [{"a": deep}]}
    with pytest.raises(UsageError) as caught:
        parse_scenario({"name": "x", "arrival": {"law": "poisson", "rate": 1}, "requests": [cls]})
    assert str(caught.value).startswith("requests.0.tools.0.a.list.0.list.0")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("arrival", "cls", "problem"),
    [
        ({"law": "poisson", "rate": 1}, {"prompt": "text"}, "conversation works with endpoint: chat, not completions"),
        (
            {"law": "closed", "concurrency": 2, "max_requests": 9},
            {},
            "arrival.law closed has no conversations; take one with a rate",
        ),
        ({"law": "burst", "max_requests": 9}, {}, "arrival.law burst has no conversations"),
        ({"law": "poisson", "rate": 1}, {"conversation": {"think_s": 3}}, "think_s: must be a mapping with keys of dist, mean"),
        ({"law": "poisson", "rate": 1}, {"conversation": {"turn": 3}}, "did you mean turns?"),
    ],
)
def test_conversations_that_cannot_be_held_are_refused(arrival: dict[str, Any], cls: dict[str, Any], problem: str) -> None:
    asked = {"endpoint": "completions" if "prompt" in cls else "chat", "prompt": "text", "conversation": {}, **cls}
    with pytest.raises(UsageError, match=re.escape(problem)):
        parse_scenario({"name": "x", "arrival": arrival, "requests": [asked]})


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        ({"modle": "x"}, "requests.0.modle: unknown key; did you mean model?"),
        ({"model": ""}, "requests.0: model '' is no name; name a model of the target's /v1/models, or leave the key out"),
        ({"extra_body": {"model": "x"}}, "requests.0: extra_body holds model ('x'); name it by the class's own key, model"),
        ({"tool": TOOLS}, "requests.0.tool: unknown key; did you mean tools?"),
        ({"tools": TOOLS[0]}, "requests.0.tools: must be a list: lines that begin with a dash (got {'type': 'function'"),
        ({"tools": "f"}, "requests.0.tools: must be a list: lines that begin with a dash (got 'f')"),
        ({"tools": ["f"]}, "requests.0.tools.0: must be a mapping of keys to values (got 'f')"),
        (
            {"tools": TOOLS, "endpoint": "completions"},
            "requests.0: tools work with endpoint: chat, not completions; take endpoint: chat",
        ),
        ({"tool_choice": "auto"}, "requests.0: tool_choice 'auto' does nothing without tools; name them too, or leave it out"),
        (
            {"tools": TOOLS, "tool_choice": "always"},
            "requests.0: tool_choice 'always' is none of auto, none, required and {type: function,",
        ),
        ({"tools": TOOLS, "tool_choice": ["f"]}, "requests.0: tool_choice ['f'] is none of auto, none, required and"),
        ({"tools": TOOLS, "tool_choice": "required"}, "requests.0: tool_choice 'required' needs ignore_eos: false"),
        ({"response_format": "json"}, "requests.0.response_format: must be a mapping of keys to values (got 'json')"),
        ({"response_format": {"type": "json_object"}}, "response_format {'type': 'json_object'} needs ignore_eos: false"),
        (
            {"response_format": {}, "endpoint": "generate"},
            "response_format works with endpoint: chat and completions, not generate",
        ),
    ],
)
def test_what_no_model_could_be_asked_is_refused_with_the_way_out(cls: dict[str, Any], problem: str) -> None:
    asked = {"endpoint": "chat", "prompt": "text", **cls}
    with pytest.raises(UsageError) as caught:
        parse_scenario({"name": "x", "arrival": {"law": "poisson", "rate": 1}, "requests": [asked]})
    assert problem in str(caught.value)


def test_a_model_that_no_class_asks_is_refused() -> None:
    classes = [{"name": "a", "model": "one"}, {"name": "b", "model": "two"}]
    values = {"name": "x", "arrival": {"law": "poisson", "rate": 1}, "requests": classes}
    with pytest.raises(UsageError, match="model 'three' is asked by no class of requests: each names its own; leave it out"):
        parse_scenario({**values, "model": "three"})
    assert parse_scenario(values).models("served") == ["one", "two"]
    assert parse_scenario({**values, "model": "three", "requests": [*classes, {}]}).models("three") == ["one", "two", "three"]


def test_runs_that_named_their_model_in_extra_body_can_still_be_read() -> None:
    values = {"name": "x", "arrival": {"law": "poisson", "rate": 1}, "requests": [{"extra_body": {"model": "x"}}]}
    assert parse_scenario(values, context=RECORDED).requests[0].extra_body == {"model": "x"}


def test_the_requests_that_the_documentation_shows_can_be_asked() -> None:
    page = (Path(__file__).parents[3] / "docs" / "loadtest.md").read_text()
    blocks = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)]
    shown = [{"name": "x", "arrival": {"law": "poisson", "rate": 1}, **block} for block in blocks if "requests" in block]
    classes = [cls for values in shown for cls in parse_scenario(values).requests]
    assert {cls.name for cls in classes} >= {"plain", "tuned", "agents", "records"}

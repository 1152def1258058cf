"""Beam's own parser takes the options that the example names for runners that no test has. Nothing runs on them."""

import logging
import re

import pytest
from apache_beam.options.pipeline_options import FlinkRunnerOptions, GoogleCloudOptions, PipelineOptions, PortableOptions

from tests.examples.test_examples import EXAMPLES


def options_of(runner: str, caplog: pytest.LogCaptureFixture) -> tuple[PipelineOptions, dict[str, object]]:
    """Return the options in the line of the example's docstring, and those of them that are not Beam's defaults."""
    text = (EXAMPLES / "beam_pipeline.py").read_text()
    (line,) = re.findall(rf"^    {runner} +(--.*)$", text, re.MULTILINE)
    options = PipelineOptions(line.split())
    with caplog.at_level(logging.WARNING):
        told = options.get_all_options(drop_default=True)
    assert "unparseable" not in caplog.text  # Beam drops what it does not know, with a warning
    return options, told


def test_beam_takes_the_options_for_flink(caplog: pytest.LogCaptureFixture) -> None:
    options, told = options_of("Flink", caplog)
    assert told["runner"] == "FlinkRunner"
    assert options.view_as(FlinkRunnerOptions).flink_master == "flink:8081"
    assert options.view_as(PortableOptions).environment_type == "LOOPBACK"


def test_beam_takes_the_options_for_dataflow(caplog: pytest.LogCaptureFixture) -> None:
    options, told = options_of("Dataflow", caplog)
    assert (told["runner"], told["sdk_container_image"]) == ("DataflowRunner", "IMAGE")
    assert options.view_as(GoogleCloudOptions).temp_location == "gs://BUCKET/tmp"


def test_beam_would_say_what_it_does_not_take(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        PipelineOptions(["--flink_mister", "flink:8081"]).get_all_options()
    assert "unparseable" in caplog.text

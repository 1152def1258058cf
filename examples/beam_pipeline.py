"""This Beam pipeline has prompts answered by a running service: one JSON line for each answer, and one with the reason for each failure.

    python examples/beam_pipeline.py --url http://127.0.0.1:8010 --input prompts.txt --output answers --max_tokens 64

All other options are Beam's. On workers that are elsewhere, --url is the service as they reach it, and they need serve-app[beam]:

    Flink      --runner FlinkRunner --flink_master flink:8081 --environment_type LOOPBACK
    Dataflow   --runner DataflowRunner --project PROJECT --region REGION --temp_location gs://BUCKET/tmp --sdk_container_image IMAGE
"""

import argparse
import json
import sys

import apache_beam as beam
from apache_beam.ml.inference.base import PredictionResult, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from serve_app.batch.apache_beam import FleetModelHandler, SplitFailures


def answer_line(prediction: PredictionResult) -> str:
    """Return the prompt and the answer's text as JSON."""
    text = prediction.inference["choices"][0]["message"]["content"]
    return json.dumps({"prompt": prediction.example, "answer": text, "model": prediction.model_id})


def failure_line(prediction: PredictionResult) -> str:
    """Return the prompt and the service's reason as JSON."""
    return json.dumps({"prompt": prediction.example, "code": prediction.inference.code, "message": prediction.inference.message})


def main(arguments: list[str]) -> None:
    """Build the pipeline, run it, and wait for its end."""
    parser = argparse.ArgumentParser(description="Answer the lines of a text file.")
    parser.add_argument("--url", default="http://127.0.0.1:8010")
    parser.add_argument("--model", default="", help="default: the one that the service has")
    parser.add_argument("--input", required=True, help="a pattern of text files, a prompt a line")
    parser.add_argument("--output", required=True, help="a prefix; files begin with it and -answers or -failures")
    parser.add_argument("--max_tokens", type=int, default=64)
    own, beams = parser.parse_known_args(arguments)
    handler = FleetModelHandler(own.url, own.model, on_failure="return")
    with beam.Pipeline(options=PipelineOptions(beams)) as pipeline:
        prompts = pipeline | beam.io.ReadFromText(own.input) | beam.Filter(str.strip)
        predictions = prompts | RunInference(handler, inference_args={"max_tokens": own.max_tokens, "temperature": 0})
        answered, failed = predictions | SplitFailures()
        _ = answered | "answers" >> beam.Map(answer_line) | beam.io.WriteToText(f"{own.output}-answers", ".jsonl")
        _ = (
            failed
            | "failures" >> beam.Map(failure_line)
            | "write failures" >> beam.io.WriteToText(f"{own.output}-failures", ".jsonl")
        )


if __name__ == "__main__":
    main(sys.argv[1:])

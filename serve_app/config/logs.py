"""`LogSettings` says how log lines look."""

from typing import Literal

from serve_app.config.base import Section


class LogSettings(Section):
    """The log files of ingresses and replicas."""

    format: Literal["text", "json"] = "text"
    """json: each line is an object, with the time, level, message, deployment and replica as fields: docs/logs.md."""

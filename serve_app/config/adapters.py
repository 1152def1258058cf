"""`AdapterSettings` describes a LoRA adapter: a small set of weights over a model's own, with a name that requests may ask for."""

import hashlib
import json
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from serve_app.config.base import AbsolutePath, Section
from serve_app.config.weight_places import checked_folder

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Files of an adapter's folder; of the weights one is enough."""
_FIRST_ID = 1 << 16
"""vLLM numbers the placeholders of its warm-up from 1."""


class AdapterSettings(Section):
    """One LoRA adapter, in the form that Hugging Face's PEFT writes."""

    path: Annotated[AbsolutePath, BeforeValidator(checked_folder)]
    """The adapter's folder, the same on every node of the model's replicas. Changed weights need a new folder: a running replica
    may read this folder again."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the folder's adapter_model.safetensors, or adapter_model.bin, as `sha256sum` prints it. A replica that finds another
    checksum does not start. Default: no check."""

    def number(self, name: str) -> int:
        """Return the adapter's id in engines: 2^16 <= id < 2^31, the same in each ingress and after each restart."""
        digest = hashlib.sha256(f"{name}\0{self.path}\0{self.sha256 or ''}".encode()).digest()
        return _FIRST_ID + int.from_bytes(digest[:8], "big") % ((1 << 31) - _FIRST_ID)


def rank_in(folder: Path) -> int:
    """Return the greatest rank in an adapter's folder.

    Raises:
        OSError: Its configuration is not there, or may not be read.
        ValueError: The configuration names no rank.
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    try:
        return max(int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values()), 1)
    except (TypeError, KeyError, AttributeError, OverflowError) as exc:
        raise ValueError(f"{folder / CONFIG} has no rank (r)") from exc

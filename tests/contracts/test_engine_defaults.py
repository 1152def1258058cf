"""The table of docs/models.md of vLLM's choices by accelerator agrees with vLLM."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


@dataclass(frozen=True)
class FakePlatform:
    """A machine, as vLLM asks for its properties."""

    name: str
    memory_gib: float = 0.0

    def get_device_total_memory(self) -> int:
        return int(self.memory_gib * 2**30)

    def get_device_name(self) -> str:
        return self.name

    def is_tpu(self) -> bool:
        return False

    def is_device_capability(self, capability: tuple[int, int]) -> bool:
        """vLLM 0.33 asks whether it is a GB10, of capability 12.1, which has the memory of a larger GPU."""
        return False

    def is_cpu(self) -> bool:
        return self.name == "CPU"


def written(row: str) -> list[int]:
    """Return the numbers of the row of docs/models.md that begins with this text."""
    (line,) = re.findall(rf"^\| {re.escape(row)}.*$", DOCS.read_text(), re.MULTILINE)
    return [int(cell) for cell in line.split("|")[2:4]]


@pytest.mark.parametrize(
    ("row", "platform"),
    [
        ("160 GiB", FakePlatform("NVIDIA B200", 178.4)),
        ("70 GiB", FakePlatform("NVIDIA H100 80GB HBM3", 79.6)),
        ("70 GiB", FakePlatform("NVIDIA H200", 139.8)),
        ("other GPUs", FakePlatform("NVIDIA A100-SXM4-80GB", 79.3)),
        ("other GPUs", FakePlatform("NVIDIA A10G", 22.5)),
        ("CPU, and", FakePlatform("CPU")),
    ],
    ids=lambda value: value.name if isinstance(value, FakePlatform) else "",
)
def test_docs_have_what_vllm_chooses_for_an_api_server(row: str, platform: FakePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(1)
    assert written(row) == [tokens[UsageContext.OPENAI_API_SERVER], seqs[UsageContext.OPENAI_API_SERVER]]

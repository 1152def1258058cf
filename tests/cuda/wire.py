"""This script prints how vLLM's structs of a link are encoded, as JSON on the last line: ``python -m tests.cuda.wire``.

Struct, named tuple or dataclass -> whether fields are found by place or by name, then the fields in their order, each with its name,
its type and its default. Enum -> all values in one list. Any other class -> a sample as vLLM encodes it: msgspec knows no fields of it.
"""

import json
from typing import Any

import numpy as np
import torch
from msgspec import NODEFAULT, inspect
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder, UtilityResult

_WITH_PARTS = inspect.StructType | inspect.NamedTupleType | inspect.DataclassType | inspect.EnumType
_FIELDS = {
    "batched": MultiModalBatchedField(),
    "flat": MultiModalFlatField(slices=[slice(0, 2), slice(2, 4)]),
    "shared": MultiModalSharedField(batch_size=2),
}
_SAMPLES = {
    MultiModalKwargsItem: MultiModalKwargsItem(
        {name: MultiModalFieldElem(torch.arange(4), how) for name, how in _FIELDS.items()}
    ),
    UtilityResult: UtilityResult({"a": [1, None]}),
    np.ndarray: np.arange(4, dtype=np.int32),
    torch.Tensor: torch.arange(4),
}


def written(kind: Any, found: dict[str, Any]) -> str:
    """Return the name of a type, and add it and the types of its fields to ``found``."""
    if isinstance(kind, _WITH_PARTS):
        name = kind.cls.__qualname__
        if name not in found:
            found[name] = []  # now: a type may have itself as a part
            found[name] = _parts(kind, found)
        return name
    if isinstance(kind, inspect.CustomType):
        found[kind.cls.__qualname__] = ["by vLLM", *_encoded(_SAMPLES[kind.cls])]
        return kind.cls.__qualname__
    parts = [_written_part(getattr(kind, part), found) for part in kind.__struct_fields__]
    return f"{type(kind).__name__.removesuffix('Type')}({', '.join(part for part in parts if part)})"


def _written_part(part: Any, found: dict[str, Any]) -> str:
    if isinstance(part, tuple):
        return (
            " | ".join(sorted(written(each, found) for each in part)) if part and isinstance(part[0], inspect.Type) else str(part)
        )
    return written(part, found) if isinstance(part, inspect.Type) else "" if part is None else str(part)


def _parts(kind: Any, found: dict[str, Any]) -> list[Any]:
    if isinstance(kind, inspect.EnumType):
        return ["by value", sorted(member.value for member in kind.cls)]
    if isinstance(kind, inspect.StructType):
        assert not kind.forbid_unknown_fields
    how = ["by place" if getattr(kind, "array_like", isinstance(kind, inspect.NamedTupleType)) else "by name"]
    return how + [[each.encode_name, written(each.type, found), _default(each)] for each in kind.fields]


def _encoded(sample: Any) -> list[list[str]]:
    """Return the buffers of a sample, in the form of fields that have no defaults: one more would be no field to leave out."""
    return [[f"buffer {i}", bytes(buffer).hex(), "required"] for i, buffer in enumerate(MsgpackEncoder().encode(sample))]


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    return f"{field.default_factory.__qualname__}()" if field.default is NODEFAULT else repr(field.default)


def main() -> None:
    found: dict[str, Any] = {}
    for root in (EngineCoreRequest, EngineCoreOutputs):
        written(inspect.type_info(root), found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Something of every tensor in a model's files, for a digest of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppo_lightning.errors import ModelError

_SAMPLED = 64  # values of a tensor: training moves all of them
_ENDS = 1 << 20  # bytes at either end of a file that is no safetensors
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls them."""


def sampled_lines(folder: Path) -> Iterator[bytes]:
    """Return something for each tensor of a model's files, or for each file of another format.

    Args:
        folder: With files of weights.

    Raises:
        ModelError: A file is damaged.
    """
    found = list(folder.glob("*.safetensors"))
    for file in found:
        yield from _tensor_lines(file)
    for file in [] if found else sorted(folder.glob("*.bin")):
        yield _ends_of(file)


def _tensor_lines(file: Path) -> list[bytes]:
    """Name, shape and some values of each tensor.

    The values are read from their places in the file. Where the tensors are mapped into memory, the
    system reads ahead of each value: 410 MB of a file of 410 MB, instead of 29 MB.
    """
    lines = []
    try:
        with (
            safe_open(file, framework="pt") as tensors,  # refuses what is damaged
            open(file, "rb", buffering=0) as content,
        ):
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size))
            for name in tensors.keys():  # noqa: SIM118
                entry = header[name]
                shape, dtype = tuple(entry["shape"]), _DTYPES.get(entry["dtype"])
                places = _places(math.prod(shape))
                if dtype is None:
                    values = tensors.get_tensor(name).flatten()[places]
                else:
                    values = _read(content, 8 + size + entry["data_offsets"][0], dtype, places)
                lines.append(f"{name}{shape}".encode() + values.float().numpy().tobytes())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"`{file}` cannot be read: {error}. Copy it again.") from error
    return lines


def _places(count: int) -> Tensor:
    """Which of so many values are looked at."""
    # In float32 the last place of a large tensor would be rounded to one behind its end.
    ends = (0, max(count - 1, 0), min(count, _SAMPLED))
    return torch.linspace(*ends, dtype=torch.float64).long()


def _read(content: FileIO, begin: int, dtype: torch.dtype, places: Tensor) -> Tensor:
    """Read single values of a tensor whose first one stands at ``begin``."""
    found = bytearray()
    for place in places.tolist():
        content.seek(begin + place * dtype.itemsize)
        found += content.read(dtype.itemsize)
    return torch.frombuffer(found, dtype=dtype) if found else torch.empty(0, dtype=dtype)


def _ends_of(file: Path) -> bytes:
    size = file.stat().st_size
    with open(file, "rb") as content:
        head = content.read(_ENDS)
        content.seek(max(size - _ENDS, 0))
        tail = content.read(_ENDS)
    return f"{file.name}{size}".encode() + head + tail

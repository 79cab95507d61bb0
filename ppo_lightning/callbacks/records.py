"""Records as JSONL text: what JSON cannot say becomes null."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any


def as_jsonl(records: Iterable[Mapping[str, Any]]) -> str:
    """Return one line of JSON for each record; NaN and infinities are written as null."""
    lines = [json.dumps(finite(record), ensure_ascii=False) for record in records]
    return "".join(f"{line}\n" for line in lines)


def finite(value: Any) -> Any:
    """Return the value with None in the place of NaN and infinities, at any depth."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

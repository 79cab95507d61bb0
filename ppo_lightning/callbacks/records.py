"""Records as JSONL text: what JSON cannot say becomes null."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ppo_lightning.io import finite


def as_jsonl(records: Iterable[Mapping[str, Any]]) -> str:
    """Return one line of JSON for each record; NaN and infinities are written as null."""
    lines = [json.dumps(finite(record), ensure_ascii=False) for record in records]
    return "".join(f"{line}\n" for line in lines)

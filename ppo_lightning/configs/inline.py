"""Records that stand in a config themselves, in the place of a file's name."""

from __future__ import annotations

from typing import Any

# `str` comes first at each level, down to the parts of a turn's content: of a text that is `Any`,
# such as "no", "4" or "null", jsonargparse makes what YAML would make of it without the quotes.
_Part = str | dict[str, str | Any]
_Turn = str | dict[str, str | list[_Part] | Any]

InlineRecord = dict[str, str | list[_Turn] | dict[str, str | list[_Part] | Any] | Any]
"""One record; its texts stay texts, also where they look like numbers or switches."""

"""From matplotlib's SVG to one that is part of a page: colours of the page, names for everything.

Colours are placeholders while it is drawn, and variables of the page's style afterwards, so that
one drawing serves light and dark.
"""

from __future__ import annotations

import html
import re

from ppo_lightning.io import own_ids

PLACEHOLDERS = {
    "ink": "#010101",
    "muted": "#010102",
    "rule": "#010103",
    "page": "#010104",
    "line-1": "#010111",
    "line-2": "#010112",
    "line-3": "#010113",
    "line-4": "#010114",
    "watch": "#010121",
    "ill": "#010122",
    "critical": "#010123",
    "action": "#010124",
}
"""Variable of the page to the colour that stands for it while it is drawn."""

_NAMES = {colour: name for name, colour in PLACEHOLDERS.items()}
_SVG = re.compile(r"<svg\b[^>]*?viewBox=\"([^\"]+)\"[^>]*>", re.DOTALL)


def page_svg(drawn: str, *, key: str, title: str, text: str) -> str:
    """Return an SVG element for a page.

    Args:
        drawn: A whole SVG document.
        key: Unique in the page; all names inside begin with it.
        title: Its name for screen readers.
        text: What it shows.
    """
    opening = _SVG.search(drawn)
    if opening is None:
        raise ValueError("`drawn` holds no `svg` element with a `viewBox`.")
    body = drawn[opening.end() :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"#0101[0-9a-f]{2}", _variable, own_ids(body, key))
    head = (
        f'<svg viewBox="{opening[1]}" role="img" aria-labelledby="{key}-title {key}-desc">'
        f'<title id="{key}-title">{html.escape(title)}</title>'
        f'<desc id="{key}-desc">{html.escape(text)}</desc>'
    )
    return head + body.strip()


def _variable(match: re.Match[str]) -> str:
    name = _NAMES.get(match[0])
    return f"var(--{name})" if name else match[0]

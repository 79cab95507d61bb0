"""A sweep's comparison as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ppo_lightning.io import write_text_atomic
from ppo_lightning.studies.compare import Comparison
from ppo_lightning.studies.plots import Plot, plots_of
from ppo_lightning.studies.report import cells, headers

_STYLE = """\
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
.scroll { overflow-x: auto; }
:focus-visible { outline: 3px solid; outline-offset: 2px; }
table { border-collapse: collapse; }
caption { text-align: left; padding: .5rem 0; }
th, td { border-bottom: 1px solid #8888; padding: .3rem .7rem; }
th, td { text-align: right; white-space: nowrap; }
th[scope=row], td.text { text-align: left; }
td.text { white-space: normal; min-width: 12rem; }
tr.base { font-weight: bold; }
figure { background: #fff; color: #111; margin: 2rem 0; padding: 1rem; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; }
code { overflow-wrap: anywhere; }
"""

# Nothing may be fetched or run, whatever a text in it says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""

_TEXT_COLUMNS = ("diagnosis",)


def write_page(path: Path, title: str, comparison: Comparison) -> bool:
    """Write the page.

    Args:
        path: Of the file.
        title: Of the page.
        comparison: Of the arms.

    Returns:
        Whether it has plots: without matplotlib it has the table alone, and says so.
    """
    plots = plots_of(comparison)
    write_text_atomic(path, sweep_page(title, comparison, plots))
    return plots is not None


def sweep_page(title: str, comparison: Comparison, plots: list[Plot] | None) -> str:
    """Return the page.

    Args:
        title: Of the page.
        comparison: Of the arms.
        plots: To show; None where matplotlib is missing.
    """
    parts = [_table(comparison), *(f"<p>{escape(note)}</p>" for note in comparison.notes)]
    parts += _problems(comparison)
    if plots is None:
        parts.append(
            "<p>There are no plots: matplotlib is not installed (extra <code>report</code>).</p>"
        )
    parts += [_figure(plot) for plot in plots or ()]
    return _PAGE.format(
        title=escape(title), policy=escape(_POLICY), style=_STYLE, body="\n".join(parts)
    )


def _table(comparison: Comparison) -> str:
    names = headers(comparison)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = []
    for place, row in enumerate(comparison.rows):
        first, *others = cells(row)
        columns = [
            f'<td class="text">{escape(cell)}</td>'
            if name in _TEXT_COLUMNS
            else f"<td>{escape(cell)}</td>"
            for name, cell in zip(names[1:], others, strict=True)
        ]
        kind = ' class="base"' if place == 0 else ""
        rows.append(f'<tr{kind}><th scope="row">{escape(first)}</th>{"".join(columns)}</tr>')
    caption = f"{comparison.metric}, by arm; the base is the config itself"
    return "\n".join(
        [
            f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">',
            f"<table>\n<caption>{escape(caption)}</caption>",
            f"<thead><tr>{head}</tr></thead>",
            f"<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table>\n</div>",
        ]
    )


def _problems(comparison: Comparison) -> list[str]:
    lines = [
        f"<li>{escape(row.arm.label)}, {escape(line)}</li>"
        for row in comparison.rows
        for line in row.problems
    ]
    return ["<h2>Runs that are missing</h2>", "<ul>", *lines, "</ul>"] if lines else []


def _figure(plot: Plot) -> str:
    return (
        f'<figure tabindex="0">\n<div role="img" aria-label="{escape(plot.told)}">\n'
        f"{plot.svg}\n</div>\n"
        f"<figcaption>{escape(plot.caption)}</figcaption>\n</figure>"
    )

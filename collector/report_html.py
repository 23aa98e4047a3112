"""A report as one HTML page: no script, no font, no request; readable in light and dark."""

from __future__ import annotations

from html import escape

from lanterne.collector.report import Document, Section, Table
from lanterne.collector.report_svg import svg

# Light: pale to dark, dark: dim to bright; one hue, so that it reads without colour vision too.
_LIGHT = ("#f1f4f8", "#dbe6f3", "#bdd3ea", "#97bbdf", "#6c9fd1", "#457fbc", "#2b609d", "#1a4479",
          "#0d2a54")  # fmt: skip
_DARK = ("#1a2029", "#1d2c40", "#22405f", "#285681", "#336fa5", "#4a8bc5", "#72aadb", "#a5cbec",
         "#e0effb")  # fmt: skip

STYLE = """\
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--quiet:#57606a;--line:#d0d7de;--bar:#2b609d;
--unknown:#fff;LIGHT}
@media (prefers-color-scheme:dark){:root{--bg:#0f1318;--fg:#e6eaef;--quiet:#9aa4b0;--line:#30363d;
--bar:#72aadb;--unknown:#0f1318;DARK}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2rem 1rem 4rem;max-width:56rem;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0 0 .5rem}h2{font-size:1.15rem;margin:2.5rem 0 .5rem}
.lead{font-size:1.1rem;margin:.5rem 0 1.5rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:0}
dt{color:var(--quiet)}dd{margin:0;overflow-wrap:anywhere}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;margin:.75rem 0}
th,td{text-align:left;padding:.3rem .9rem .3rem 0;border-bottom:1px solid var(--line);
vertical-align:top}
th{font-weight:600;white-space:nowrap}
figure{margin:1rem 0}figcaption{color:var(--quiet);font-size:.9rem;margin-bottom:.35rem}
svg{display:block;width:100%;height:auto;min-width:36rem;font:12px system-ui,sans-serif}
svg text{fill:var(--fg)}svg .quiet{fill:var(--quiet)}.bar{fill:var(--bar)}
.unknown{fill:var(--unknown);stroke:var(--line)}
FILLS
@media print{body{max-width:none}}
"""


def html(document: Document) -> str:
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # Proof to the reader's browser, too, that nothing is fetched or run.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(document.title)}</title>",
        f"<style>\n{_style()}</style>",
        "</head>",
        "<body>",
        "<main>",
        f"<h1>{escape(document.title)}</h1>",
        f'<p class="lead">{escape(document.lead)}</p>',
    ]
    if document.facts:
        rows = "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in document.facts)
        parts.append(f"<dl>{rows}</dl>")
    plots = 0
    for section in document.sections:
        parts += _section(section, plots)
        plots += len(section.plots)
    return "\n".join([*parts, "</main>", "</body>", "</html>"]) + "\n"


def _style() -> str:
    light = "".join(f"--h{n}:{colour};" for n, colour in enumerate(_LIGHT))
    dark = "".join(f"--h{n}:{colour};" for n, colour in enumerate(_DARK))
    fills = "".join(f".h{n}{{fill:var(--h{n})}}" for n in range(len(_LIGHT)))
    return STYLE.replace("LIGHT", light).replace("DARK", dark).replace("FILLS", fills)


def _section(section: Section, plots: int) -> list[str]:
    parts = ["<section>", f"<h2>{escape(section.heading)}</h2>"]
    parts += [f"<p>{escape(sentence)}</p>" for sentence in section.text]
    if section.table is not None:
        parts += _table(section.table)
    for number, plot in enumerate(section.plots, plots):
        parts += [
            f"<figure><figcaption>{escape(plot.label)}</figcaption>",
            f'<div class="wide">{svg(plot, number)}</div>',
            "</figure>",
        ]
    return [*parts, "</section>"]


def _table(table: Table) -> list[str]:
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in table.columns)
    rows = [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    ]
    return [
        '<div class="wide"><table>',
        f"<thead><tr>{head}</tr></thead>",
        "<tbody>",
        *rows,
        "</tbody></table></div>",
    ]

"""The figures as Markdown tables and plots for docs/detection-benchmark.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.bench.detect import plots
from tests.bench.detect.cases import NOISES, SIZES, SLOWDOWNS
from tests.bench.detect.runs import OURS

PAGE, PICTURES = "detection-benchmark.md", "detection"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
# In plots; the variants that ask for two windows are in the tables.
SHOWN = (OURS, "nvrx_relative_twice", "z_score_twice", "mad_z_twice", "short_wait_twice",
         "deepxtrace_twice", "own_history_twice")  # fmt: skip
Cell = Mapping[str, Any]


def overview(result: Cell) -> str:
    """What fits a terminal: floors, false alarms, cells where a baseline is ahead."""
    lines = [
        f"{result['runs']} runs, {result['simulated_hours']:.1f} simulated hours, seeds "
        f"'{result['seeds']}', {result['wall_seconds']} s",
        "",
    ]
    lines += _floors(result["floors"])
    lines += ["", *_alarms(result)]
    named = result["baseline_ahead"]
    lines += ["", f"A baseline is ahead in {len(named)} of {_count(result)} cells:"]
    lines += [f"- {name}" for name in named] or ["- none"]
    return "\n".join(lines)


def write(result: Cell, folder: Path) -> None:
    """Replaces the measured part of the page, and the plots. The rest of the page is kept."""
    pictures = folder / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for name, picture in _pictures(result).items():
        (pictures / f"{name}.svg").write_text(picture)
    page = folder / PAGE
    text = page.read_text() if page.exists() else f"# Detection benchmark\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{_measured(result)}\n{END}{after}")


def _measured(result: Cell) -> str:
    named = result["baseline_ahead"]
    parts = [
        f"{result['runs']} runs, {result['simulated_hours']:.1f} simulated hours, seeds "
        f"`{result['seeds']}`.",
        "### Promises\n\n" + "\n".join(_floors(result["floors"])),
        "### By size and slowdown\n\nAll kinds of slow rank and all evidence together; precision / "
        "recall, and the delay in windows.\n\n" + _grid(result["by_size"], "size", SIZES),
        "![recall by slowdown](detection/recall.svg)\n![precision by slowdown]"
        "(detection/precision.svg)\n![recall by size](detection/sizes.svg)",
        "### By noise\n\n" + _grid(result["by_noise"], "noise", NOISES),
        "### By kind\n\n" + _kinds(result["by_kind"]),
        "### Beside the baselines\n\nPrecision / recall over all kinds of slow rank, sizes and "
        "noise.\n\n" + _beside(result),
        "### False alarms without a fault\n\n" + "\n".join(_alarms(result)),
        "### Wait matrices\n\nAll sizes, layouts and numbers of slow ranks or paths together; "
        "precision / recall.\n\n" + _matrices(result["matrices"]),
        f"### Cells where a baseline is ahead ({len(named)} of {_count(result)})\n\n"
        "By the harmonic mean of precision and recall.\n\n"
        + ("\n".join(f"- {name}" for name in named) or "None."),
    ]
    return "\n\n".join(parts) + "\n"


def _count(result: Cell) -> int:
    return len(result["cells"]) + len(result["matrices"])


def _floors(floors: Iterable[Cell]) -> list[str]:
    lines = ["| what | promised | measured | holds | worst sizes |", "|---|---|---|---|---|"]
    for f in floors:
        sign = "≥" if f["side"] == "least" else "≤"
        bad = [
            f"{n}: {v:.3g}"
            for n, v in f["by_size"].items()
            if v is not None and (v < f["limit"] if f["side"] == "least" else v > f["limit"])
        ]
        lines.append(
            f"| {f['what']} | {sign} {f['limit']:g} | {f['value']:.3f} | "
            f"{'yes' if f['holds'] else 'no'} | {', '.join(bad)} |"
        )
    return lines


def _alarms(result: Cell) -> list[str]:
    lines = ["| noise | hours | false alarms | per hour (95 %) |", "|---|---|---|---|"]
    for row in result["days"]:
        lines.append(
            f"| {row['noise']}, 64 ranks | {row['hours']:.0f} | {row['events']} | "
            f"{_number(row['per_hour'])} |"
        )
    for cell in result["fault_free"]:
        ours = cell["detectors"][OURS]
        lines.append(
            f"| {cell['noise']}, all sizes | {ours['hours']:.1f} | {ours['false']} | "
            f"{_number(ours['false_per_hour'])} |"
        )
    return lines


def _grid(cells: Iterable[Cell], name: str, rows: Iterable[object]) -> str:
    found = {(c[name], c["slowdown"]): c["detectors"][OURS] for c in cells}
    columns = [s for s in SLOWDOWNS if any(k[1] == s for k in found)]
    lines = [
        f"| {name} | " + " | ".join(f"{s:g}" for s in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in rows:
        if any((row, s) in found for s in columns):
            shown = [_pair(found.get((row, s)), delay=True) for s in columns]
            lines.append(f"| {row} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _kinds(cells: Iterable[Cell]) -> str:
    lines = [
        "| kind | evidence | n | false (stayed) | precision | recall | class | delay, p90 "
        "| named as |",
        "|---" * 9 + "|",
    ]
    for c in cells:
        o = c["detectors"][OURS]
        p90 = "" if o["delay_p90"] is None else f", {o['delay_p90']:.1f}"
        named = ", ".join(f"{k} {v}" for k, v in o["classes"].items())
        lines.append(
            f"| {c['kind']} | {c['evidence']} | {o['n']} | {o['false']} ({o['stayed']}) | "
            f"{_number(o['precision'])} | "
            f"{_number(o['recall'])} | {_number(o['class_accuracy'])} | "
            f"{_number(o['delay'])}{p90} | {named} |"
        )
    return "\n".join(lines)


def _beside(result: Cell) -> str:
    columns = [s for s in SLOWDOWNS if any(c["slowdown"] == s for c in result["by_size"])]
    lines = [
        "| rule | " + " | ".join(f"{s:g}" for s in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in result["detectors"]:
        shown = []
        for s in columns:
            same = [c["detectors"][name] for c in result["by_size"] if c["slowdown"] == s]
            shown.append(_pair(_sum(same)))
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _matrices(cells: Iterable[Cell]) -> str:
    found = list(cells)
    lines = ["| kind | slowdown | ours | deepxtrace |", "|---" * 4 + "|"]
    for kind, slowdown in dict.fromkeys((c["kind"], c["slowdown"]) for c in found):
        same = [c for c in found if (c["kind"], c["slowdown"]) == (kind, slowdown)]
        shown = [_pair(_sum([c["detectors"][n] for c in same])) for n in (OURS, "deepxtrace")]
        lines.append(f"| {kind} | {slowdown:g} | {shown[0]} | {shown[1]} |")
    return "\n".join(lines)


def _sum(cells: list[Cell]) -> dict[str, Any]:
    found, missed, false = (sum(c[k] for c in cells) for k in ("found", "missed", "false"))
    return {
        "precision": (found / (found + false),) if found + false else None,
        "recall": (found / (found + missed),) if found + missed else None,
        "false": false,
    }


def _pair(figures: Cell | None, *, delay: bool = False) -> str:
    if figures is None:
        return ""
    if figures["recall"] is None:
        return f"{figures['false']} false"
    shown = [f"{f[0]:.2f}" if f else "–" for f in (figures["precision"], figures["recall"])]
    after = f", {figures['delay'][0]:.1f}" if delay and figures["delay"] else ""
    return " / ".join(shown) + after


def _number(figure: tuple[float, float, float] | list[float] | None) -> str:
    return "" if figure is None else f"{figure[0]:.2f} ({figure[1]:.2f} to {figure[2]:.2f})"


def _pictures(result: Cell) -> dict[str, str]:
    def by(
        cells: Iterable[Cell], at: Callable[[Cell], object], name: str, what: str
    ) -> plots.Series:
        found = {at(c): c["detectors"][name][what] for c in cells}
        return [found.get(p) for p in (places if at is _size else slowdowns)]

    slowdowns = [s for s in SLOWDOWNS if any(c["slowdown"] == s for c in result["by_size"])]
    places = [n for n in SIZES if any(c["size"] == n for c in result["by_size"])]
    eight = [c for c in result["by_size"] if c["size"] == 8]
    sharp = [c for c in result["by_size"] if c["slowdown"] == 1.2]
    pictures = {}
    for what in ("recall", "precision"):
        pictures[what] = plots.lines(
            f"{what}, 8 ranks, all kinds and noise (95 % intervals)",
            "slowdown",
            what,
            [f"{s:g}" for s in slowdowns],
            {n: by(eight, _slowdown, n, what) for n in SHOWN},
        )
    pictures["sizes"] = plots.lines(
        "recall at slowdown 1.2, all kinds and noise (95 % intervals)",
        "ranks",
        "recall",
        [str(n) for n in places],
        {n: by(sharp, _size, n, "recall") for n in SHOWN},
    )
    return pictures


def _size(cell: Cell) -> object:
    return cell["size"]


def _slowdown(cell: Cell) -> object:
    return cell["slowdown"]

"""Two recordings of the same requests, stage by stage: what really changed.

Every figure is a ratio of sums over the windows of a recording, with an interval of its change. As
several figures are looked at together, a change counts as real only beyond what the best of so many
would show by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import intervals
from lanterne.collector.analyse.intervals import Change
from lanterne.collector.errors import RecordingError
from lanterne.collector.replay import Source
from lanterne.collector.replay_bins import Binned
from lanterne.collector.replay_series import STAGE_SUMS, STEP_PARTS, SUMS, Series
from lanterne.collector.report import Bars, Document, Section, Table, seconds, share, size
from lanterne.collector.snapshot import DOMAINS

F64 = npt.NDArray[np.float64]

LEAST = 0.01  # a smaller change is not worth a line in the lead, however certain


@dataclass(frozen=True)
class Figure:
    key: str
    name: str
    top: str  # of SUMS
    bottom: str
    show: Callable[[float], str]
    lower_is_better: bool | None = True  # None: neither


def _plain(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "–"


FIGURES = (
    Figure("own_seconds", "own time before an operation", "compute", "own_rounds", seconds),
    Figure("dispatch_seconds", "dispatch", "dispatch", "dispatches", seconds),
    Figure("combine_seconds", "combine", "combine", "combines", seconds),
    Figure("other_seconds", "other collectives", "other", "others", seconds),
    Figure("wait_seconds", "waiting in an operation", "wait", "rank_seconds", seconds),
    Figure("transfer_seconds", "transfer in an operation", "transfer", "rank_seconds", seconds),
    Figure("operations_per_second", "operations a second", "instances", "seconds", _plain, False),
    Figure("load_skew", "load skew (max / mean of ranks)", "skew", "skews", _plain),
    *(
        Figure(
            f"bytes_{domain}", f"bytes an operation, {domain.replace('_', ' ')}",
            f"bytes_{domain}", "instances", size, None,
        )
        for domain in DOMAINS
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    key: str
    name: str
    change: Change
    real: bool
    a: str
    b: str
    lower_is_better: bool | None


@dataclass(frozen=True)
class Comparison:
    workload_a: str
    workload_b: str
    windows: tuple[int, int]
    rows: tuple[Row, ...]


def compare(a: Series, b: Series, workload: str | None = None) -> list[Comparison]:
    """Jobs of the same name; if each recording has but one, these two. Raises RecordingError."""
    names_a, names_b = sorted(a.windows), sorted(b.windows)
    if workload is not None:
        for side, names in (("A", names_a), ("B", names_b)):
            if workload not in names:
                raise RecordingError(
                    f"--workload {workload}: not in recording {side}, which has "
                    f"{', '.join(map(repr, names)) or 'none'}"
                )
        pairs = [(workload, workload)]
    elif len(names_a) == len(names_b) == 1:
        pairs = [(names_a[0], names_b[0])]
    else:
        pairs = [(n, n) for n in names_a if n in names_b]
    if not pairs:
        raise RecordingError(
            "the recordings have no job in common: A has "
            f"{', '.join(map(repr, names_a)) or 'none'}, B has "
            f"{', '.join(map(repr, names_b)) or 'none'}"
        )
    return [_compared(a, b, *pair) for pair in pairs]


def _compared(a: Series, b: Series, name_a: str, name_b: str) -> Comparison:
    first, second = _windows(a.windows[name_a]), _windows(b.windows[name_b])
    found: list[tuple[Figure, Change]] = []
    for figure in FIGURES:
        top, bottom = SUMS.index(figure.top), SUMS.index(figure.bottom)
        result = intervals.change((first[top], first[bottom]), (second[top], second[bottom]))
        if result.a > 0 or result.b > 0:
            found.append((figure, result))
    for figure, pair in (*_steps(a, b, name_a, name_b), *_stages(a, b, name_a, name_b)):
        found.append((figure, intervals.change(*pair)))
    latency_a, latency_b = _latency(a, name_a), _latency(b, name_b)
    for key in sorted(latency_a.keys() & latency_b.keys()):
        figure = Figure(f"engine_{key}", f"engine: {key}", "", "", _engine_value(key), None)
        found.append((figure, intervals.change(latency_a[key], latency_b[key])))
    real = intervals.holm([result.p for _, result in found])
    rows = tuple(
        Row(f.key, f.name, c, r, f.show(c.a), f.show(c.b), f.lower_is_better)
        for (f, c), r in zip(found, real, strict=True)
    )
    return Comparison(name_a, name_b, (first.shape[1], second.shape[1]), rows)


def _windows(binned: Binned) -> F64:
    """[sum, window] without the first and the last, which are not whole, and none but busy ones."""
    numbers = binned.numbers()[1:-1]
    if not numbers:
        return np.zeros((len(SUMS), 0))
    windows: F64 = np.stack([binned.at(n) for n in numbers], axis=1)
    return windows[:, windows[SUMS.index("seconds")] > 0]


def _steps(
    a: Series, b: Series, name_a: str, name_b: str
) -> Iterator[tuple[Figure, tuple[tuple[F64, F64], tuple[F64, F64]]]]:
    """Serving steps where both know them: how long they take, and where their time goes."""
    for part in STEP_PARTS:
        pair = [s.steps.get((n, part)) for s, n in ((a, name_a), (b, name_b))]
        if pair[0] is None or pair[1] is None:
            continue
        sums = [
            np.array([of.at(n) for n in of.numbers()[1:-1]]).reshape(-1, 2).T
            for of in pair
            if of is not None
        ]
        name = "a step" if part == "span" else f"of a step: {part.replace('_', ' ')}"
        figure = Figure(f"step_{part}_seconds", name, "", "", seconds)
        yield figure, ((sums[0][0], sums[0][1]), (sums[1][0], sums[1][1]))
    if (name_a, "span") in a.steps and (name_b, "span") in b.steps:
        rates = [_rate(s, n) for s, n in ((a, name_a), (b, name_b))]
        yield (
            Figure("steps_per_second", "steps a second", "", "", _plain, False),
            (
                rates[0],
                rates[1],
            ),
        )


def _rate(series: Series, workload: str) -> tuple[F64, F64]:
    """(steps, seconds) by window, windows without a step included."""
    steps, windows = series.steps[workload, "span"], series.windows[workload]
    numbers = windows.numbers()[1:-1]
    have = set(steps.numbers())
    count = [float(steps.at(n)[1]) if n in have else 0.0 for n in numbers]
    seconds_ = [float(windows.at(n)[SUMS.index("seconds")]) for n in numbers]
    return np.array(count), np.array(seconds_)


def _stages(
    a: Series, b: Series, name_a: str, name_b: str
) -> Iterator[tuple[Figure, tuple[tuple[F64, F64], tuple[F64, F64]]]]:
    """GPU time by stage where both know it: of a kernel, and as a share of the time."""
    for workload, stage in sorted(a.stages):
        if workload != name_a or (name_b, stage) not in b.stages:
            continue
        sums = [
            np.array([binned.at(n) for n in binned.numbers()[1:-1]]).reshape(-1, len(STAGE_SUMS)).T
            for binned in (a.stages[name_a, stage], b.stages[name_b, stage])
        ]
        name = f"GPU, {stage.replace('_', ' ')}"
        kernel = Figure(f"stage_{stage}_kernel_seconds", f"{name}: a kernel", "", "", seconds)
        yield kernel, ((sums[0][0], sums[0][1]), (sums[1][0], sums[1][1]))
        busy = Figure(f"stage_{stage}_share", f"{name}: share of the time", "", "", share, None)
        yield busy, ((sums[0][2], sums[0][3]), (sums[1][2], sums[1][3]))


def _latency(series: Series, workload: str) -> Mapping[str, tuple[F64, F64]]:
    """What engines tell, by figure: (sum, readings) by window."""
    found = {}
    for (of, name), binned in series.latency.items():
        if of in (workload, ""):
            values = np.array([binned.at(n) for n in binned.numbers()[1:-1]]).reshape(-1, 2)
            found[name] = (values[:, 0], values[:, 1])
    return found


def _engine_value(key: str) -> Callable[[float], str]:
    timed = key.startswith(("ttft", "tpot", "itl", "e2e")) and not key.endswith("_count")
    return seconds if timed else _plain


# ---- as JSON and as a report


def as_json(sources: tuple[Source, Source], found: list[Comparison]) -> dict[str, object]:
    return {
        "format": "comparison",
        "a": {"files": list(sources[0].files), "seconds": sources[0].seconds},
        "b": {"files": list(sources[1].files), "seconds": sources[1].seconds},
        "confidence": intervals.CONFIDENCE,
        "workloads": [
            {
                "workload_a": c.workload_a,
                "workload_b": c.workload_b,
                "windows_a": c.windows[0],
                "windows_b": c.windows[1],
                "figures": {
                    row.key: {
                        "a": row.change.a,
                        "b": row.change.b,
                        "change": row.change.change,
                        "low": row.change.low,
                        "high": row.change.high,
                        "p": row.change.p,
                        "changed": row.real,
                    }
                    for row in c.rows
                },
            }
            for c in found
        ],
    }


def document(sources: tuple[Source, Source], found: list[Comparison]) -> Document:
    facts = tuple(
        (side, f"{', '.join(s.files)}: {s.seconds:.1f} s")
        for side, s in zip(("A", "B"), sources, strict=True)
    )
    real = [row for c in found for row in c.rows if row.real and abs(row.change.change) >= LEAST]
    real.sort(key=lambda row: -abs(math.log1p(row.change.change)))
    lead = (
        "Changed: " + "; ".join(f"{r.name} {_percent(r.change.change)}" for r in real[:4]) + "."
        if real
        else "Nothing changed that the length of these recordings could show."
    )
    return Document("Comparison of two recordings", lead, facts, tuple(_section(c) for c in found))


def _section(c: Comparison) -> Section:
    rows = tuple(
        (
            row.name,
            row.a,
            row.b,
            _percent(row.change.change),
            f"{_percent(row.change.low)} … {_percent(row.change.high)}"
            if math.isfinite(row.change.low)
            else "too short",
            _judged(row),
        )
        for row in c.rows
    )
    known = [row for row in c.rows if math.isfinite(row.change.change)]
    plots = (
        Bars(
            "Size of the change",
            tuple(row.name for row in known),
            tuple(abs(row.change.change) for row in known),
            tuple(_percent(row.change.change) + ("" if row.real else " (not certain)")
                  for row in known),
        ),
    )  # fmt: skip
    name = c.workload_a if c.workload_a == c.workload_b else f"{c.workload_a} → {c.workload_b}"
    text = (
        f"{c.windows[0]} and {c.windows[1]} windows. Intervals are of the change, at "
        f"{100 * intervals.CONFIDENCE:g} %; real is what stands out among all lines together.",
    )
    columns = ("figure", "A", "B", "change", "interval", "real")
    return Section(name or "job", text, Table(columns, rows), plots if known else ())


def _judged(row: Row) -> str:
    if not math.isfinite(row.change.p):
        return "–"
    if not row.real:
        return "no"
    if row.lower_is_better is None:
        return "yes"
    return "better" if (row.change.change < 0) == row.lower_is_better else "worse"


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %" if math.isfinite(value) else "–"

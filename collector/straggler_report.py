"""An analysed straggler trace as a report."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lanterne.collector.analyse.schedule import COMPUTE
from lanterne.collector.report import (
    Bars,
    Document,
    Plot,
    Section,
    Table,
    heat_map,
    seconds,
    share,
    times,
)
from lanterne.collector.straggler_trace import CLASS, SENTENCES, Analysis

_CAUSES = {
    "slow_worker": "slow workers",
    "microbatch_imbalance": "imbalance between microbatches",
    "stage_imbalance": "imbalance between stages",
    "communication": "communication",
}


def document(a: Analysis, path: Path) -> Document:
    w, f, t = a.whatif, a.finding, a.trace
    facts = (
        ("trace", path.name),
        ("steps", f"{len(t.steps)}" + (f", {t.steps_left_out} incomplete ones left out"
                                       if t.steps_left_out else "")),
        ("workers", f"{t.rank.shape[0]} stages × {t.rank.shape[1]} replicas"),
        ("step", f"{seconds(w.now)}; {seconds(w.ideal)} if every operation took what is usual"),
        ("slowdown", f"{w.slowdown:.2f}×; {share(f.recoverable_share)} of the step can come back"),
    )  # fmt: skip
    return Document(
        f"Replay of {path.name}", SENTENCES[f.cause], facts, (_named(a), _why(a), _heat(a))
    )


def _named(a: Analysis) -> Section:
    rows = tuple(
        (
            str(int(a.trace.rank[x.stage, x.replica])),
            str(x.stage),
            str(x.replica),
            CLASS,
            share(x.blame_share),
            f"{x.ratio:.2f}",
            share(x.steps, 0),
        )
        for x in a.finding.workers
    )
    if not rows:
        return Section("Who is slow", ("No rank is named.",))
    columns = ("rank", "stage", "replica", "class", "blame", "ratio", "of the steps")
    text = (
        "Ratio is the time of its work over that of the other replicas of its stage; blame the "
        "share of the step that comes back, replayed with the worker at the usual times.",
    )
    return Section("Who is slow", text, Table(columns, rows))


def _why(a: Analysis) -> Section:
    gains, variance = a.finding.gains, a.finding.variance
    plots: list[Plot] = [
        Bars(
            "Share of the step that comes back when this alone is removed",
            tuple(_CAUSES[k] for k in gains),
            tuple(max(0.0, v) for v in gains.values()),
            tuple(share(v) for v in gains.values()),
        ),
        Bars(
            "Where the variation of the work's time comes from",
            tuple(variance),
            tuple(variance.values()),
            tuple(share(v) for v in variance.values()),
        ),
    ]
    return Section("Why", (), None, tuple(plots))


def _heat(a: Analysis) -> Section:
    """Work of each worker by step, over the median of its stage."""
    t = a.trace
    values, names = [], []
    for stage in range(t.rank.shape[0]):
        rows = [i for i, op in enumerate(t.operations) if op.stage == stage and op.kind in COMPUTE]
        work = a.whatif.times[rows].sum(axis=0).T  # [replica, step]
        values.append(work / np.median(work))
        names += [f"{int(r)}" for r in t.rank[stage]]
    plot = heat_map(
        "Time of each rank's work in each step, over the median of its stage",
        np.concatenate(values),
        rows=names,
        columns=[str(s) for s in t.steps.tolist()],
        row_axis="rank",
        column_axis="step",
        show=times,
        relative=True,
    )
    return Section("Work", (), None, (plot,))

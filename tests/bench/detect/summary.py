"""Scores of runs -> cells and floors, as plain numbers for JSON."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.bench.detect import baselines, matrices
from tests.bench.detect.cases import RANK_KINDS, Case
from tests.bench.detect.runs import OURS
from tests.bench.detect.scoring import Score, median, per_hour, wilson

Scores = Mapping[str, Score]
Result = tuple[Case, Scores]

TIMED = ("device", "blocking")
# What the detector promises: name -> (which runs, measure, limit, "least" or "most").
Floor = tuple[Callable[[Case], bool], str, float, str]
FLOORS: dict[str, Floor] = {}


def _floor(which: Callable[[Case], bool], label: str, **limits: tuple[float, str]) -> None:
    for measure, (limit, side) in limits.items():
        FLOORS[f"{label}: {measure}"] = (which, measure, limit, side)


def _of_rank(case: Case) -> bool:
    return case.kind in RANK_KINDS and case.evidence in TIMED


_floor(
    lambda c: _of_rank(c) and c.size >= 4 and c.slowdown >= 1.2,
    "1.2 and above, 4 ranks and more",
    precision=(0.98, "least"),
    recall=(0.98, "least"),
    delay=(3.0, "most"),
)
_floor(
    lambda c: _of_rank(c) and c.size >= 4 and c.slowdown == 1.1,
    "1.1, 4 ranks and more",
    precision=(0.98, "least"),
    recall=(0.9, "least"),
)
_floor(
    lambda c: _of_rank(c) and c.size < 4 and c.slowdown >= 1.2,
    "1.2 and above, 2 and 3 ranks",
    precision=(0.9, "least"),
    recall=(0.9, "least"),
)
_floor(
    lambda c: c.kind in (*RANK_KINDS, "hang"),
    "class where the evidence tells",
    class_accuracy=(0.95, "least"),
)
_floor(lambda c: c.kind == "hang", "hang", recall=(0.98, "least"))
_floor(lambda c: c.kind == "none", "no fault", false=(0.0, "most"))


def pool(results: Iterable[Result]) -> dict[str, Score]:
    """Scores of all the runs together, by detector."""
    pooled: dict[str, Score] = {}
    for _, scores in results:
        for name, score in scores.items():
            pooled.setdefault(name, Score()).add(score)
    return pooled


def figures(s: Score) -> dict[str, Any]:
    """One detector in one cell; each figure [value, low, high], None where there is none."""
    return {
        "n": s.found + s.missed,
        "found": s.found,
        "missed": s.missed,
        "false": s.false,
        "stayed": s.stayed,
        "precision": wilson(s.found, s.found + s.false),
        "recall": wilson(s.found, s.found + s.missed),
        "class_accuracy": wilson(s.class_right, s.class_known),
        "classes": dict(sorted(s.classes.items())),
        "delay": median(s.delays),
        "delay_p90": float(np.quantile(s.delays, 0.9)) if s.delays else None,
        "stay": median(s.stays),
        "stay_p90": float(np.quantile(s.stays, 0.9)) if s.stays else None,
        "hours": s.seconds / 3600,
        "false_per_hour": per_hour(s.false, s.seconds),
    }


def f1(s: Score) -> float:
    """Harmonic mean of precision and recall; 1 where there was nothing to find or to say."""
    of = 2 * s.found + s.missed + s.false
    return 2 * s.found / of if of else 1.0


def ahead(pooled: Scores) -> list[str]:
    """Detectors with a higher F1 than ours."""
    ours = f1(pooled[OURS])
    return [name for name, s in pooled.items() if name != OURS and f1(s) > ours + 1e-12]


def cells(
    results: Sequence[Result], key: Callable[[Case], Hashable], names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """One entry for each value of `key`, a tuple of what `names` says, in order of appearance."""
    groups: dict[Hashable, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result[0]), []).append(result)
    found = []
    for value, group in groups.items():
        pooled = pool(group)
        found.append(
            {
                **dict(zip(names, value, strict=True)),  # type: ignore[call-overload]
                "runs": len(group),
                "detectors": {name: figures(score) for name, score in pooled.items()},
                "ahead": ahead(pooled),
            }
        )
    return found


def floors(results: Sequence[Result]) -> list[dict[str, Any]]:
    """What was promised, over all of its runs and for the worst size."""
    found = []
    for label, (which, measure, limit, side) in FLOORS.items():
        chosen = [r for r in results if which(r[0])]
        value = _value(chosen, measure)
        if value is None:
            continue
        sizes = sorted({c.size for c, _ in chosen})
        by_size = {n: _value([r for r in chosen if r[0].size == n], measure) for n in sizes}
        known = [v for v in by_size.values() if v is not None]
        worst = min(known) if side == "least" else max(known)
        found.append(
            {
                "what": label,
                "limit": limit,
                "side": side,
                "value": value,
                "by_size": by_size,
                "holds": value >= limit if side == "least" else value <= limit,
                "every_size": worst >= limit if side == "least" else worst <= limit,
            }
        )
    return found


def floor_of_days(days: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """No name at all in a day without a fault, whatever the noise; nothing where no day was run."""
    if not days:
        return []
    by_size: dict[int, float] = {}
    for day in days:
        by_size[day["ranks"]] = by_size.get(day["ranks"], 0.0) + day["events"]
    holds = not any(by_size.values())
    return [
        {
            "what": "days without a fault: false",
            "limit": 0.0,
            "side": "most",
            "value": sum(by_size.values()),
            "by_size": by_size,
            "holds": holds,
            "every_size": holds,
        }
    ]


def _value(results: Sequence[Result], measure: str) -> float | None:
    if not results:
        return None
    shown = figures(pool(results)[OURS])[measure]
    value = shown[0] if isinstance(shown, tuple) else shown
    return None if value is None else float(value)


def of_matrices(
    results: Sequence[tuple[matrices.MatrixCase, Scores]],
) -> list[dict[str, Any]]:
    """Cells of the wait matrices, by kind, size, slowdown and number."""
    groups: dict[tuple[str, int, float, str], dict[str, Score]] = {}
    for case, scores in results:
        pooled = groups.setdefault((case.kind, case.size, case.slowdown, case.count), {})
        for name, score in scores.items():
            pooled.setdefault(name, Score()).add(score)
    names = ("kind", "size", "slowdown", "count")
    return [
        {
            **dict(zip(names, key, strict=True)),
            "detectors": {name: figures(score) for name, score in pooled.items()},
            "ahead": ahead(pooled),
        }
        for key, pooled in groups.items()
    ]


def build(
    results: Sequence[Result],
    of_matrix: Sequence[tuple[matrices.MatrixCase, Scores]],
    days: list[dict[str, Any]],
    seeds: str,
) -> dict[str, Any]:
    """Everything that was measured, as JSON holds it."""
    faulty = [r for r in results if r[0].kind != "none"]
    calm = [r for r in results if r[0].kind == "none"]
    of_rank = [r for r in results if r[0].kind in RANK_KINDS]
    by_kind = cells(
        faulty,
        lambda c: (c.kind, c.size, c.slowdown, c.evidence),
        ("kind", "size", "slowdown", "evidence"),
    )
    matrix_cells = of_matrices(of_matrix)
    return {
        "seeds": seeds,
        "runs": len(results),
        "simulated_hours": sum(s[OURS].seconds for _, s in results) / 3600,
        "detectors": [OURS, *baselines.NAMES],
        "floors": floors(results) + floor_of_days(days),
        "cells": by_kind,
        "by_size": cells(of_rank, lambda c: (c.size, c.slowdown), ("size", "slowdown")),
        "by_noise": cells(of_rank, lambda c: (c.noise, c.slowdown), ("noise", "slowdown")),
        "by_kind": cells(faulty, lambda c: (c.kind, c.evidence), ("kind", "evidence")),
        "fault_free": cells(calm, lambda c: (c.noise,), ("noise",)),
        "matrices": matrix_cells,
        "days": days,
        "baseline_ahead": [_named(c) for c in by_kind + matrix_cells if c["ahead"]],
    }


def _named(cell: Mapping[str, Any]) -> str:
    parts = [str(v) for k, v in cell.items() if k not in ("runs", "detectors", "ahead")]
    return f"{' '.join(parts)}: {', '.join(cell['ahead'])}"

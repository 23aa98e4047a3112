"""Traces in the format of ByteDance-Seed/StragglerAnalysis (Parquet) -> who or what is to blame.

One row an operation: dp_rank, stage, rank, step, optype, start_ts and duration (seconds), seq_id
(number among those of its type in the step), mc (model chunk; -1: none), mb_id, gmc. pyarrow reads
the file; it is large, so it is an extra (`replay`) and is imported only here, when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import culprit, schedule, whatif
from lanterne.collector.errors import RecordingError

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

WHOLE = ("dp_rank", "stage", "rank", "step", "seq_id", "mc")
COLUMNS = (*WHOLE, "optype", "start_ts", "duration")
MOST_ROWS = 50_000_000
CLASS = "slow_compute"  # what is compared is the time of work


@dataclass(frozen=True)
class Trace:
    """Times [operation, step, replica] in seconds; `rank` [stage, replica]."""

    operations: tuple[schedule.Operation, ...]
    steps: I64
    steps_left_out: int  # of which not every operation of every replica was there
    rank: I64
    start: F64
    duration: F64


@dataclass(frozen=True)
class Analysis:
    trace: Trace
    whatif: whatif.WhatIf
    finding: culprit.Finding


def analyse(path: Path) -> Analysis:
    """Raises RecordingError."""
    trace = read(path)
    try:
        graph = schedule.build(trace.operations, np.median(trace.start, axis=(1, 2)))
    except ValueError as error:
        raise RecordingError(f"{path}: {error}") from error
    what = whatif.analyse(graph, trace.start, trace.duration)
    return Analysis(trace, what, culprit.find(what))


def read(path: Path) -> Trace:
    """Raises RecordingError: not such a file, or nothing in it that can be analysed."""
    columns = _columns(path)
    try:
        return _trace(columns)
    except ValueError as error:
        raise RecordingError(f"{path}: {error}") from error


def _columns(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise RecordingError(
            "--format straggler-analysis reads Parquet files with pyarrow, which is not installed: "
            "pip install 'lanterne[replay]'"
        ) from error
    try:
        file = parquet.ParquetFile(path)
        missing = [c for c in COLUMNS if c not in file.schema_arrow.names]
        if missing:
            raise RecordingError(f"{path}: has no column {', '.join(missing)}")
        if file.metadata.num_rows > MOST_ROWS:
            raise RecordingError(
                f"{path}: {file.metadata.num_rows} rows, at most {MOST_ROWS} can be analysed: "
                "cut it to fewer steps"
            )
        table = file.read(columns=list(COLUMNS))
        return {
            name: table.column(name).to_numpy()
            if name != "optype"
            else np.array(table.column(name).to_pylist(), dtype=object)
            for name in COLUMNS
        }
    except (OSError, pyarrow.ArrowException) as error:
        raise RecordingError(f"{path}: cannot be read as a Parquet file: {error}") from error


def _trace(columns: dict[str, npt.NDArray[np.generic]]) -> Trace:
    rows = len(columns["step"])
    if rows == 0:
        raise ValueError("holds no operations")
    whole = {name: columns[name].astype(np.int64) for name in WHOLE}
    if (whole["mc"] > 0).any():
        raise ValueError("stages have several model chunks (mc > 0): only one a stage is known")
    kinds, kind = np.unique(columns["optype"].astype(str), return_inverse=True)
    unknown = sorted(set(kinds.tolist()) - set(schedule.OPERATIONS))
    if unknown:
        raise ValueError(
            f"unknown optype {', '.join(unknown)}; known are {', '.join(schedule.OPERATIONS)}"
        )
    start, duration = (columns[name].astype(np.float64) for name in ("start_ts", "duration"))
    if not (np.isfinite(start).all() and np.isfinite(duration).all() and (duration >= 0).all()):
        raise ValueError("start_ts and duration must be finite, and no duration negative")
    return _dense(kinds, kind, whole, start, duration)


def _dense(
    kinds: npt.NDArray[np.generic],
    kind: npt.NDArray[np.intp],
    whole: dict[str, I64],
    start: F64,
    duration: F64,
) -> Trace:
    steps, step = np.unique(whole["step"], return_inverse=True)
    replicas, replica = np.unique(whole["dp_rank"], return_inverse=True)
    stages, stage = np.unique(whole["stage"], return_inverse=True)
    which, operation = np.unique(
        np.stack([kind, stage, whole["seq_id"]]), axis=1, return_inverse=True
    )
    shape = (which.shape[1], len(steps), len(replicas))
    if shape[0] * shape[1] * shape[2] > 4 * len(start) + 1024:
        raise ValueError("most operations are missing in most steps: not one job's trace")
    cell = np.ravel_multi_index((operation, step, replica), shape)
    times = np.full((2, shape[0] * shape[1] * shape[2]), np.nan)
    times[0, cell], times[1, cell] = start, duration
    count = np.bincount(cell, minlength=times.shape[1]).reshape(shape)
    whole_step = (count == 1).all(axis=(0, 2))
    if not whole_step.any():
        raise ValueError("no step has every operation of every rank exactly once")
    rank = np.full((len(stages), len(replicas)), -1, np.int64)
    rank[stage, replica] = whole["rank"]
    dense = times.reshape(2, *shape)[:, :, whole_step]
    return Trace(
        tuple(schedule.Operation(str(kinds[k]), int(s), int(n)) for k, s, n in which.T),
        steps[whole_step],
        int((~whole_step).sum()),
        rank,
        dense[0],
        dense[1],
    )


SENTENCES = {
    "none": "Nothing to gain: the steps take what their operations usually take.",
    "slow_worker": "Slow worker: the named ranks take longer than the other replicas of their "
    "stage, whatever they work on.",
    "microbatch_imbalance": "Imbalance between microbatches (work, not worker): some are more work "
    "in every stage, forward and backward, whoever has them. Usually sequences of unequal length.",
    "stage_imbalance": "Imbalance between stages: their parts of the model are unequal work.",
    "communication": "Communication: transfers take longer than they usually do.",
    "unknown": "Time is lost, and no single cause accounts for it.",
}


def as_json(a: Analysis, path: Path) -> dict[str, object]:
    """What `replay --format straggler-analysis` writes."""
    w, f, t = a.whatif, a.finding, a.trace
    return {
        "format": "straggler-analysis",
        "file": path.name,
        "cause": f.cause,
        "cause_text": SENTENCES[f.cause],
        "recoverable_share": f.recoverable_share,
        "slowdown": w.slowdown,
        "step_seconds": w.now,
        "ideal_step_seconds": w.ideal,
        "verdicts": [
            {
                "rank": int(t.rank[worker.stage, worker.replica]),
                "class": CLASS,
                "blame_share": worker.blame_share,
                "straggler_ratio": worker.ratio,
                "stage": worker.stage,
                "dp_rank": worker.replica,
                "share_of_steps": worker.steps,
            }
            for worker in f.workers
        ],
        "evidence": {
            "steps": len(t.steps),
            "steps_left_out": t.steps_left_out,
            "stages": t.rank.shape[0],
            "replicas": t.rank.shape[1],
            "gain_share_by_cause": dict(f.gains),
            "variance_of_work_by_origin": dict(f.variance),
        },
    }

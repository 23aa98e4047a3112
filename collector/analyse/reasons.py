"""Why waits are absent: a code, which is a label value, and words for people, which may change."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import window as w
from lanterne.collector.analyse.waits import MIN_COVERAGE

EVIDENCE_SHARE = 0.3  # of the symmetric operations; below, what is seen is not the job's waiting

Reason = tuple[str, str]  # code, text

_OF_OUTCOME: dict[int, Reason] = {
    w.ORDER_ONLY: (
        "host_ahead",
        "collectives are enqueued ahead of the GPU (host runs ahead); needs device evidence",
    ),
    w.MIXED: ("mixed_evidence", "evidence differs between the ranks of the same operation"),
    w.MISALIGNED: (
        "misaligned",
        "the ranks' operations do not match at the same sequence number",
    ),
    w.MISSING: (
        "operations_missing",
        "operations missing: not every rank's events came before the deadline",
    ),
    w.FIRST: ("only_first", "only first operations seen, which connect"),
    w.ROOTED: (
        "not_symmetric",
        "no symmetric collective: broadcast, reduce and send/recv have no barrier",
    ),
    w.CAPTURED: (
        "captured",
        "collectives run inside captured CUDA graphs; needs device evidence",
    ),
    w.ALONE: ("one_rank", "one rank: nobody to wait for"),
}


def shown(outcome: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether enough of a span's rows were scored to show waits; `outcome` [..., len(OUTCOMES)].

    In a job that runs ahead one operation a step may still follow a synchronise: its wait is true
    and says nothing about the others.
    """
    unseen = [w.ORDER_ONLY, w.MIXED, w.MISALIGNED, w.CAPTURED, w.MISSING]
    blind = outcome[..., unseen].sum(axis=-1)
    scored = outcome[..., w.SCORED]
    # A row that the clocks cannot decide is a small wait, not a blind one.
    known = scored + outcome[..., w.CLOCK]
    enough: npt.NDArray[np.bool_] = (scored > 0) & (known >= EVIDENCE_SHARE * (known + blind))
    return enough


def absent(
    outcome: npt.NDArray[np.int64],
    *,
    ranks: int,
    seen: int,
    joining: bool,
    clock_error_s: float,
) -> Reason:
    """(code, text) for a span whose waits are not `shown`."""
    if ranks == 1:
        return _OF_OUTCOME[w.ALONE]
    if seen < MIN_COVERAGE * ranks:
        return "ranks_missing", f"ranks missing: {seen} of {ranks} seen"
    if joining:
        text = "the agent met the communicator running: sequence numbers not aligned yet"
        return "late_attached", text
    if not outcome.any():
        return "idle", "no operation in the last windows"
    rows = outcome.copy()
    rows[w.SCORED] = 0
    most = int(rows.argmax())
    if most == w.CLOCK:
        return _clock(clock_error_s)
    return _OF_OUTCOME[most]


def _clock(error_s: float) -> Reason:
    if not np.isfinite(error_s):
        return "clock_unknown", "clocks of the nodes not known yet"
    error = f"{error_s * 1e3:.3g} ms"
    text = f"clock error {error} between nodes exceeds the differences of arrival"
    return "clock_error", text

"""What people want to know first, made from a Snapshot: the worst ranks, and why nothing is named.

Pure. The JSON list of stragglers, `top` and the demo all show these rows. A number that is not
known is None. Shares are 0..1 of the snapshot's span.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lanterne.collector.moe_text import sentences
from lanterne.collector.snapshot import (
    CLASSES,
    EVIDENCE,
    METHODS,
    AdviceView,
    HangView,
    Ranks,
    Snapshot,
)

# A peer counts as waiting for a rank when it loses at least this share of its time, and over
# twice what the rank itself loses: whoever waits as long as its peers is a victim with them.
WAITING_SHARE = 0.01
WAITING_FACTOR = 2.0
MAX_ROWS = 1000
MAX_ADVICE = 20


class RankRow(msgspec.Struct, frozen=True):
    """One rank of one communicator, and what it costs the others."""

    rank: int
    node: str
    gpu: str
    pid: int
    workload: str
    comm: str
    role: str
    straggler: bool
    klass: str  # "none" where not a straggler
    why: str  # the evidence for the class; may be empty
    confidence: float | None
    straggler_ratio: float | None  # own time over the peers' median
    blame_share: float | None
    recoverable_seconds_per_hour: float | None  # if this rank alone were fixed
    blame_seconds: float | None  # the same, total so far
    waiting: int  # peers that wait
    peers: int  # the other ranks of the communicator that reported
    waiting_ranks: str  # "0-4,6", shortened
    others_wait_share: float | None  # mean over the waiting peers
    others_wait_seconds: float | None  # total so far, summed over the waiting peers
    own_wait_share: float | None
    evidence: str
    samples: int
    method: str = "none"  # by which comparison it was found
    found_ratio: float | None = None  # that the comparison found
    score: float | None = None  # its excess over what noise allows
    compared: int = 0  # peers that it was compared with
    windows: int = 0  # since it was named
    pod: str = ""  # NAMESPACE/NAME, where its process is in one


class Message(msgspec.Struct, frozen=True):
    """Why something is not shown; `kind` is hang, blind, graphs, lost, stale, library or empty."""

    kind: str
    subject: str
    text: str


class Totals(msgspec.Struct, frozen=True):
    ranks: int
    nodes: int
    nodes_connected: int
    communicators: int
    stragglers: int
    events_lost: int
    batches_refused: int
    last_window_end: float | None  # UNIX seconds of the newest data of the stalest connected node


class View(msgspec.Struct, frozen=True):
    taken_at: float
    span_seconds: float
    totals: Totals
    rows: tuple[RankRow, ...]
    messages: tuple[Message, ...]
    moe: tuple[str, ...] = ()  # expert load and engines, one sentence each
    advice: tuple[str, ...] = ()  # one sentence each, without those to do nothing
    served_at: float = 0.0  # UNIX seconds, filled in by the HTTP side: this module reads no clock


def view(snapshot: Snapshot, *, limit: int = 20, only_named: bool = False) -> View:
    """The `limit` worst ranks, named stragglers first, then by the time they cost."""
    order = _order(snapshot.ranks, only_named)[: max(0, min(limit, MAX_ROWS))]
    return View(
        taken_at=snapshot.taken_at,
        span_seconds=snapshot.span_seconds,
        totals=_totals(snapshot),
        rows=tuple(_row(snapshot, int(i)) for i in order),
        messages=messages(snapshot),
        moe=sentences(snapshot),
        advice=tuple(_advice(a) for a in snapshot.advice if a.kind != "nothing")[:MAX_ADVICE],
    )


def _advice(piece: AdviceView) -> str:
    warning = f" {piece.warning}" if piece.warning else ""
    return f"{piece.workload or 'experts'}: {piece.text}{warning}"


def _listed(ranks: tuple[int, ...]) -> str:
    return spans(np.array(ranks, dtype=np.int64))


def hang_text(hang: HangView) -> str:
    """Who waits where for whom, and where each rank is, as far as anything tells."""
    where = f"{hang.op} {hang.seq}"
    if hang.missing:
        gone = f" (ended: {_listed(hang.gone)})" if hang.gone else ""
        lead = (
            f"ranks {_listed(hang.arrived)} wait in {where} for {hang.seconds:.0f} s; "
            f"missing {_listed(hang.missing)}{gone}"
        )
    else:
        ranks = _listed(hang.arrived)
        lead = f"ranks {ranks} are all in {where} for {hang.seconds:.0f} s and it does not end"
    return lead + "".join(f". {text[0].upper()}{text[1:]}" for text in hang_states(hang))


def hang_states(hang: HangView) -> list[str]:
    """Where each rank is, a clause for each state; the late ones first."""
    late = set(hang.missing)
    order = sorted(hang.states, key=lambda s: not late.intersection(s.ranks))
    return [
        f"rank{'s' * (len(s.ranks) != 1)} {_listed(s.ranks)}: {s.text}" for s in order if s.text
    ]


def messages(snapshot: Snapshot, *, stale_seconds: float = 10.0) -> tuple[Message, ...]:
    """Everything that keeps a straggler from being named, most important first."""
    found: list[Message] = []
    if not snapshot.nodes:
        text = (
            "No agent has reported yet. Start lanterne-agent on a GPU node, or check its address."
        )
        found.append(Message("empty", "", text))
    elif not snapshot.communicators:
        text = (
            "Agents report, but no collective has been seen: is a job running, and does "
            "`lanterne-agent doctor` list its library?"
        )
        found.append(Message("empty", "", text))
    for comm in snapshot.communicators:
        if comm.hang is not None:
            subject = f"{comm.workload}/{comm.name}" if comm.workload else comm.name
            found.append(Message("hang", subject, hang_text(comm.hang)))
    for comm in snapshot.communicators:
        if comm.absent_reason and comm.n_ranks > 1:  # one rank has nobody to wait for
            subject = f"{comm.workload}/{comm.name}" if comm.workload else comm.name
            found.append(Message("blind", subject, comm.absent_reason))
    for node in snapshot.nodes:
        blind, steps = (int(node.health.get(name, 0)) for name in ("blind_steps", "steps"))
        if blind:
            text = (
                f"{blind} of {steps} steps ran their collectives in CUDA graphs, where only the "
                "profiler plugin sees them"
            )
            found.append(Message("graphs", node.name, text))
        lost = sum(node.events_lost.values())
        if lost:
            causes = ", ".join(f"{k} {v}" for k, v in sorted(node.events_lost.items()) if v)
            found.append(Message("lost", node.name, f"{lost} events lost ({causes})"))
        age = snapshot.taken_at - node.last_window_end
        if not node.connected or age > stale_seconds:
            state = "connected" if node.connected else "not connected"
            found.append(Message("stale", node.name, f"agent {state}, last data {age:.0f} s ago"))
        found += [Message("library", node.name, text) for text in node.libraries_failed]
    return tuple(dict.fromkeys(found))


def _order(ranks: Ranks, only_named: bool) -> npt.NDArray[np.intp]:
    """Row numbers, worst first. A rank without evidence is left out: nothing is known of it."""
    named = ranks.straggler != 0
    shown = named if only_named else named | (ranks.evidence != 0)
    rows = np.flatnonzero(shown)
    worst = np.lexsort(
        (
            ranks.rank[rows],
            -np.nan_to_num(ranks.straggler_ratio[rows], nan=-1.0),
            -np.nan_to_num(ranks.blame_share[rows], nan=-1.0),
            -ranks.straggler[rows],
        )
    )
    return rows[worst]


def _row(snapshot: Snapshot, i: int) -> RankRow:
    ranks = snapshot.ranks
    comm = snapshot.communicators[int(ranks.comm[i])]
    peers = np.flatnonzero(ranks.comm == ranks.comm[i])
    peers = peers[peers != i]
    own = float(ranks.wait_share[i])
    floor = WAITING_SHARE if math.isnan(own) else max(WAITING_SHARE, WAITING_FACTOR * own)
    waiting = peers[np.nan_to_num(ranks.wait_share[peers], nan=-1.0) >= floor]
    blame = float(ranks.blame_share[i])
    named = bool(ranks.straggler[i])
    back = float(ranks.recoverable_share[i]) if len(ranks.recoverable_share) else blame
    place = snapshot.places.get((int(ranks.node[i]), int(ranks.pid[i])))
    return RankRow(
        rank=int(ranks.rank[i]),
        node=snapshot.nodes[int(ranks.node[i])].name,
        gpu=ranks.gpu[i],
        pid=int(ranks.pid[i]),
        workload=comm.workload,
        comm=comm.name,
        role=comm.role,
        straggler=named,
        klass=CLASSES[int(ranks.klass[i])] if named else "none",
        why=ranks.why[i] if named and ranks.why else "",
        confidence=_known(ranks.confidence[i]) if named else None,
        straggler_ratio=_known(ranks.straggler_ratio[i]),
        blame_share=_known(blame),
        recoverable_seconds_per_hour=_known(3600 * (back if named else blame)),
        blame_seconds=_known(ranks.blame_seconds[i]),
        waiting=len(waiting),
        peers=len(peers),
        waiting_ranks=spans(ranks.rank[waiting]),
        others_wait_share=_known(ranks.wait_share[waiting].mean()) if len(waiting) else None,
        others_wait_seconds=_known(np.nansum(ranks.wait_seconds[waiting]))
        if len(waiting)
        else None,
        own_wait_share=_known(own),
        evidence=EVIDENCE[int(ranks.evidence[i])],
        samples=int(ranks.samples[i]),
        pod=f"{place.namespace}/{place.pod}" if place is not None and place.pod else "",
        **(_found(ranks, i) if named and len(ranks.method) else {}),
    )


def _found(ranks: Ranks, i: int) -> dict[str, Any]:
    return {
        "method": METHODS[int(ranks.method[i])],
        "found_ratio": _known(ranks.found_ratio[i]),
        "score": _known(ranks.score[i]),
        "compared": int(ranks.compared[i]),
        "windows": int(ranks.windows[i]),
    }


def _totals(snapshot: Snapshot) -> Totals:
    live = [n.last_window_end for n in snapshot.nodes if n.connected]
    return Totals(
        ranks=len(snapshot.ranks.rank),
        nodes=len(snapshot.nodes),
        nodes_connected=len(live),
        communicators=len(snapshot.communicators),
        stragglers=int(np.count_nonzero(snapshot.ranks.straggler)),
        events_lost=sum(sum(n.events_lost.values()) for n in snapshot.nodes),
        batches_refused=sum(snapshot.refused.values()),
        last_window_end=min(live) if live else None,
    )


def spans(numbers: npt.NDArray[np.int64], *, most: int = 8) -> str:
    """[0, 1, 2, 5] -> "0-2,5"; after `most` parts the rest is "...": 16,383 ranks can wait."""
    values = np.unique(numbers)
    if not len(values):
        return ""
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 2) != 1)
    ends = np.append(starts[1:], len(values)) - 1
    parts = [
        f"{values[a]}" if a == b else f"{values[a]}-{values[b]}"
        for a, b in zip(starts[:most], ends[:most], strict=True)
    ]
    return ",".join(parts) + (",..." if len(starts) > most else "")


def _known(value: float | np.floating[np.typing.NBitBase]) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None

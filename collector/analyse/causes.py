"""Why each named rank is slow, and what it costs: verdicts and matrices of a window, joined."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import attribution, costs
from lanterne.collector.analyse.attribution import Kind
from lanterne.collector.analyse.kinds import KindStats
from lanterne.collector.analyse.load import Loads
from lanterne.collector.analyse.paths import Finding
from lanterne.collector.analyse.registry import Registry
from lanterne.collector.analyse.suspects import DRIFT, OWN_HISTORY
from lanterne.collector.analyse.verdicts import Observed, Verdicts
from lanterne.collector.analyse.witness import Witnesses

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


class Causes:
    """[member] of the last closed window; what holds only for named ranks is 0 for the others."""

    def __init__(self, members: int, registry: Registry) -> None:
        self.named = np.zeros(members, bool)
        self.klass = np.zeros(members, np.int64)
        self.share = np.zeros(members)  # of the time, that comes back with this rank fixed
        self.confidence = np.zeros(members)
        self.why: dict[int, str] = {}  # by member
        self.recoverable: dict[int, float] = {}  # by slot, with every rank at its role's median
        self._registry = registry
        self._witnesses = Witnesses(registry)

    def forget(self, slot: int, base: int, ranks: int) -> None:
        members = slice(base, base + ranks)
        self.named[members] = False
        self.klass[members] = 0
        self.share[members] = self.confidence[members] = 0
        self.recoverable.pop(slot, None)
        for member in [m for m in self.why if base <= m < base + ranks]:
            del self.why[member]

    def close(
        self,
        stats: dict[int, KindStats],
        observed: list[Observed],
        verdicts: Verdicts,
        paths: dict[int, Finding],
        loads: Loads,
        members: int,
        group: I64,
    ) -> None:
        """A window has ended and was judged. `members`: only so many were ever used. group: as
        `Verdicts.update` was given, whom each rank of the observed communicators is compared with.
        """
        self._witnesses.begin()
        self.recoverable = {}
        named = verdicts.named[:members]
        lost = np.flatnonzero(self.named[:members] & ~named)
        self.named[:members] = named
        self.confidence[:members] = verdicts.confidence[:members]
        self.klass[lost], self.share[lost] = 0, 0
        for member in lost.tolist():
            self.why.pop(member, None)
        # Nearly all communicators have nobody to ask about: no array is touched for those.
        asked = np.concatenate([[0], np.cumsum(verdicts.suspected[:members] | named)]).tolist()
        at = 0
        for comm in observed:
            s = stats[comm.slot]
            rows = slice(at, at + comm.ranks)
            at += comm.ranks
            self.recoverable[comm.slot] = costs.share(
                s.recoverable, s.instances, comm.rows, comm.span_ns
            )
            if asked[comm.base + comm.ranks] > asked[comm.base]:
                self._communicator(s, comm, verdicts, loads, group[rows])
        for member, finding in paths.items():
            self._path(member, finding)

    def _communicator(
        self, s: KindStats, comm: Observed, verdicts: Verdicts, loads: Loads, group: I64
    ) -> None:
        members = slice(comm.base, comm.base + comm.ranks)
        named = np.flatnonzero(verdicts.named[members])
        self.share[comm.base + named] = costs.gains(
            s.own, s.instances, named, comm.rows, comm.span_ns
        )
        suspects = np.flatnonzero(verdicts.suspected[members] | verdicts.named[members])
        load = loads.of(comm.base, comm.ranks)
        witness = self._witnesses.of(
            comm.base,
            comm.ranks,
            suspects,
            comm.span_ns * sum(s.instances) / max(comm.rows, 1),
            None if load is None else load.astype(np.float64),
        )
        for rank in named.tolist():
            member = comm.base + rank
            if not verdicts.suspected[member] and self.klass[member] != 0:
                continue  # in hysteresis: this window does not show why
            alike = group == group[rank]
            kinds = _kinds(s, comm, alike, use_mean=verdicts.statistic[member] != 0)
            by_history = verdicts.method[member] in (OWN_HISTORY, DRIFT)
            risen = float(verdicts.excess[member]) if by_history else math.nan
            cause = attribution.classify(kinds, rank, witness, risen)
            if cause.klass == attribution.UNKNOWN != self.klass[member] and self.klass[member]:
                continue  # nothing tells any more (its process has ended, say): what told it stays
            self.klass[member] = cause.klass
            self.why[member] = cause.why

    def texts(self, members: I64, named: npt.NDArray[np.bool_]) -> tuple[str, ...]:
        """[row] why each named member is slow; "" for the others."""
        found = [""] * len(members)
        for row in np.flatnonzero(named).tolist():
            found[row] = self.why.get(int(members[row]), "")
        return tuple(found)

    def _path(self, member: int, finding: Finding) -> None:
        """Own time that is long explains more than a transfer: its class stays."""
        if self.named[member] and self.share[member] >= finding.share:
            return
        self.named[member] = True
        self.klass[member] = finding.klass
        self.share[member] = min(finding.share, 1.0)
        self.confidence[member] = finding.confidence
        slot = int(self._registry.slot_of[member])
        self.recoverable[slot] = max(self.recoverable.get(slot, 0.0), min(finding.share, 1.0))
        self.why[member] = finding.why


def _kinds(
    s: KindStats, comm: Observed, alike: npt.NDArray[np.bool_], *, use_mean: bool
) -> list[Kind]:
    """alike: [rank] those that do the same; what the others do is no measure, and left out."""

    def of_alike(values: F64) -> F64:
        return np.where(alike, values, np.nan)

    found = []
    for k, number in enumerate(s.kind):
        op, role, evidence = comm.kinds[number]
        found.append(
            Kind(
                op=op,
                role=role,
                evidence=evidence,
                instances=s.instances[k],
                own=of_alike((s.mean if use_mean else s.median)[k]),
                mean=of_alike(s.mean[k]),
                blocked=of_alike(s.blocked[k]),
                size=of_alike(s.size[k]),
            )
        )
    return found

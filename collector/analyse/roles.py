"""What each process does in its job: ranks are compared with those of their role.

Pipeline stages, expert groups, prefill and decode differ by design. Two processes of a workload
have the same role where the configured role is the same and their operations are mixed alike: which
operations, in communicators of which kind (name without numbers, or library and size), in which
proportion. The proportions of all processes are cut where neighbouring ones lie far apart, so that
those that are alike stay together whatever the noise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse.registry import Registry
from lanterne.collector.analyse.who import Resolved, Slot
from lanterne.collector.batch import DecodedBatch

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

OPS = 64  # codes of operations, modulo
GAP = 0.1  # of a process's operations
MOST_FEATURES = 256
FIRST, EVERY = 3, 12  # windows: at first in each, then in one of so many
DIGITS = re.compile(r"\d+|0x[0-9a-fA-F]+")


class Roles:
    """[member] numbers of roles; members of one process have the same."""

    def __init__(self, members: int) -> None:
        # Members are set by `forget` when they are given: until then their memory is not touched.
        self._count = np.zeros((members, OPS), np.float32)
        self._configured = np.zeros(members, np.int32)
        self._role = np.zeros(members, np.int64)
        self._first = np.zeros(members, np.int64)  # first member of those that it is compared with
        self._texts: dict[str, int] = {"": 0}
        self._windows = 0

    def forget(self, base: int, ranks: int) -> None:
        members = slice(base, base + ranks)
        self._count[members] = 0
        self._configured[members] = self._role[members] = 0
        self._first[members] = base
        self._windows = 0

    def add(self, group: Sequence[tuple[DecodedBatch, Resolved]]) -> None:
        """Count the operations of batches."""
        flat = self._count.reshape(-1)
        for batch, r in group:
            s = batch.summaries
            if len(s):
                member = r.member[s.communicator]
                good = member >= 0
                cell = member * OPS + s.small[0] % OPS
                np.add.at(flat, cell[good], s.count[good].astype(np.float32))
            if any(batch.communicators.role):
                for member, text in zip(r.member.tolist(), batch.communicators.role, strict=True):
                    if member >= 0 and len(self._texts) < 4096:
                        self._configured[member] = self._texts.setdefault(text, len(self._texts))

    def close(self, registry: Registry) -> I64:
        """End a window -> members that are compared with others than before. That a role has
        another number, because jobs have come or gone, is no such change.
        """
        self._windows += 1
        again = self._windows <= FIRST or self._windows % EVERY == 0
        if not again:
            return np.zeros(0, np.int64)
        live = [(n, s) for n, s in enumerate(registry.slots) if s is not None]
        if not live:
            return np.zeros(0, np.int64)
        members = np.concatenate([np.arange(s.base, s.base + s.ranks) for _, s in live])
        slot = np.repeat(np.arange(len(live)), [s.ranks for _, s in live])
        known = registry.process[members] >= 0
        told = members[known]
        if not len(told):
            return np.zeros(0, np.int64)
        self._role[told] = self._signatures(
            registry.process[told], told, slot[known], [s for _, s in live]
        )
        self._count[told] *= 0.5
        group, _ = within(slot, self._role[members])
        before = self._first[members]
        first = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first, group, members)
        self._first[members] = first[group]
        return members[_regrouped(group, before)]

    def _signatures(
        self, process: npt.NDArray[np.int32], members: I64, slot: I64, slots: list[Slot]
    ) -> I64:
        """[row] a number for what the row's process does."""
        workloads: dict[str, int] = {}
        workload = np.array([workloads.setdefault(s.workload, len(workloads)) for s in slots])
        kinds: dict[tuple[str, str], int] = {}
        kind = np.array([kinds.setdefault((s.workload, kind_of(s)), len(kinds)) for s in slots])
        distinct, index = np.unique(process, return_inverse=True)
        of_process = np.zeros(len(distinct), np.int64)
        of_process[index] = workload[slot]
        found = _hashed(np.zeros(len(distinct), np.uint64), of_process)
        for text in np.unique(self._configured[members]).tolist():
            if text:
                mine = np.zeros(len(distinct), bool)
                mine[index[self._configured[members] == text]] = True
                found[mine] = _hashed(found[mine], text)
        row, op = np.nonzero(self._count[members])
        if not len(row):
            return found[index].astype(np.int64)
        count = self._count[members[row], op].astype(np.float64)
        total = np.maximum(np.bincount(index[row], count, len(distinct)), 1.0)
        feature, number = np.unique(kind[slot[row]] * OPS + op, return_inverse=True)
        share = count / total[index[row]]
        most = np.argsort(-np.bincount(number, share), kind="stable")[:MOST_FEATURES]
        for f in np.sort(most).tolist():  # always in one order, or the hash changes
            chosen = np.flatnonzero(number == f)
            of = np.flatnonzero(of_process == workload[slot[row[chosen[0]]]])
            counted = np.bincount(index[row[chosen]], share[chosen], len(distinct))[of]
            values: F64 = counted.astype(np.float64)
            found[of] = _hashed(found[of], levels(values) + (int(feature[f]) + 1) * 64)
        return found[index].astype(np.int64)

    def groups(self, of: I64, members: I64, slots: list[Slot]) -> tuple[I64, I64, I64]:
        """-> (whom a row is compared with, which rows of its workload do the same, how many of
        those are in its communicator beside it).

        of: [row] index into slots. The first two are any numbers that are equal within a group. A
        communicator in which a rank's role is its own alone stays one group.
        """
        role = self._role[members]
        group, alike = within(of, role)
        kinds: dict[tuple[str, str, int], int] = {}
        kind = np.array(
            [kinds.setdefault((s.workload, kind_of(s), s.ranks), len(kinds)) for s in slots]
        )
        _, pool = np.unique(np.stack([kind[of], role]), axis=1, return_inverse=True)
        return group, pool.reshape(-1), alike


def within(of: I64, role: I64) -> tuple[I64, I64]:
    """-> [row] whom each row is compared with, a number below twice the number of rows; and how
    many of its role there are beside it. of: [row] its communicator, from 0.

    All of a communicator where a role is one rank's alone.
    """
    distinct, number = np.unique(role, return_inverse=True)
    _, group, size = np.unique(of * len(distinct) + number, return_inverse=True, return_counts=True)
    alike: I64 = size[group] - 1
    whole = np.zeros(int(of.max(initial=-1)) + 1, bool)
    whole[of[alike < 1]] = True
    return np.where(whole[of], len(size) + of, group), alike


def _regrouped(group: I64, before: I64) -> npt.NDArray[np.bool_]:
    """[row] whether the rows of its group are not those that were together before."""
    _, old, old_size = np.unique(before, return_inverse=True, return_counts=True)
    _, new, new_size = np.unique(group, return_inverse=True, return_counts=True)
    least, most = np.full(len(new_size), len(before)), np.full(len(new_size), -1)
    np.minimum.at(least, new, old)
    np.maximum.at(most, new, old)
    other = (least != most) | (old_size[least] != new_size)
    moved: npt.NDArray[np.bool_] = other[new]
    return moved


def kind_of(slot: Slot) -> str:
    """Name without numbers, or library and size: what communicators of one purpose share."""
    return DIGITS.sub("#", slot.name) if slot.name else f"{slot.library}-{slot.ranks}"


def levels(values: F64) -> I64:
    """[n] -> number of the cluster that each value is in; clusters lie more than GAP apart."""
    order = np.argsort(values, kind="stable")
    steps = np.diff(values[order]) > GAP
    level = np.zeros(len(values), np.int64)
    level[order[1:]] = np.cumsum(steps)
    return level


def _hashed(value: npt.NDArray[np.uint64], with_: int | I64) -> npt.NDArray[np.uint64]:
    """Numbers that differ where either differs, but by chance of 2^-64 (splitmix64)."""
    x = value ^ (np.asarray(with_).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed

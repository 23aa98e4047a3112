"""Of every communicator, operation and evidence the one operation that was waited in most of late.

It stands behind the figures as an example to look at: which operation, for whom, how long.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import totals
from lanterne.collector.snapshot import LongWait

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

NS = 1e9
HOLD_NS = 15 * 10**9  # then the next one takes its place, though it be shorter

# wait ns of the rank that waited longest, sequence, that rank, the rank that came last, its arrival
Found = tuple[float, int, int, int, int]
Kind = tuple[int, int, int]  # op, role, evidence


class Longest:
    def __init__(self) -> None:
        self._found: dict[int, dict[Kind, Found]] = {}  # by slot

    def add(
        self, keys: I64, code: I64, total: F64, wait: F32, seq: I64, last: I64, arrival: I64
    ) -> None:
        """keys: [K] of `totals.key`; of the J operations: `code` [J] which key each has, `total`
        its wait of all ranks, `wait` [rank, J] ns, `last` who came last, `arrival` when."""
        order = np.lexsort((total, code))
        worst = order[np.flatnonzero(np.diff(code[order], append=-1))]
        waits = np.nan_to_num(wait[:, worst], nan=-1.0)
        longest = waits.max(axis=0)
        for key, *found in zip(
            keys.tolist(),
            longest.tolist(),
            seq[worst].tolist(),
            waits.argmax(axis=0).tolist(),
            last[worst].tolist(),
            arrival[worst].tolist(),
            strict=True,
        ):
            if found[0] > 0:
                self._keep(key, (found[0], found[1], found[2], found[3], found[4]))

    def _keep(self, key: int, found: Found) -> None:
        slot, *kind = totals.unkey(key)
        kinds = self._found.setdefault(slot, {})
        at = (kind[0], kind[1], kind[2])
        before = kinds.get(at)
        if before is None or found[0] > before[0] or found[4] - before[4] > HOLD_NS:
            kinds[at] = found

    def of(self, slot: int, unix: Callable[[int], float]) -> dict[Kind, LongWait]:
        """unix: UNIX time of a time of the collector's clock."""
        return {
            kind: LongWait(wait / NS, seq, rank, last, unix(at))
            for kind, (wait, seq, rank, last, at) in self._found.get(slot, {}).items()
        }

    def forget(self, slot: int) -> None:
        self._found.pop(slot, None)

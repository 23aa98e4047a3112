"""How the tokens of an expert layer are spread over its ranks, from what the combines send back.

A rank sends back exactly what it was sent, up to the factor of the element sizes: the bytes of its
combine are its share of the load. That holds for all-to-alls and for DeepEP's normal mode, whose
combine is told with the tokens that were received. It does not hold for reduce-scatters, whose
buffer is the same on every rank, nor for the low-latency mode and NCCL EP, whose host does not know
what came in.

Tokens: where an agent tells the bytes of one token of all those operations (the hidden size of a
library's call, or PyTorch's split sizes), the bytes are tokens too. Elsewhere only shares are
known: a size is not guessed from what the bytes have in common.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import moe, ops

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

ALIKE = 0.1  # combines beyond the dispatches that the host waited in, at most so many of them


class Loads:
    """Sums of each member over two panes: the closed one, and the one being filled."""

    def __init__(self, members: int) -> None:
        # Rows: bytes of all-to-all combines, bytes and number of a library's combines, and number
        # of its dispatches with a wait on the host, as only the normal mode has.
        # Then the tokens of all-to-all combines and of a library's, and the bytes that they are.
        self._current = np.zeros((8, members), np.int64)
        self._closed = np.zeros((8, members), np.int64)

    def add(
        self, member: I64, op: I64, role: I64, evidence: I64, count: I64, size: I64, token: I64
    ) -> None:
        """Rows of summaries, columns of one length; `member` is -1 where dropped. `token`: bytes of
        one token, 0 where that is not known."""
        good = (member >= 0) & (role != 0)
        if not good.any():
            return
        combine = good & (role == ops.COMBINE)
        back = combine & ((op == ops.ALL_TO_ALL) | (op == ops.ALL_TO_ALL_V))
        calls = combine & (op == ops.COMBINE_CALL)
        waited = good & (op == ops.DISPATCH_CALL) & (evidence == ops.BLOCKING)
        for row, pick, values in (
            (0, back, size), (1, calls, size), (2, calls, count), (3, waited, count)
        ):  # fmt: skip
            np.add.at(self._current[row], member[pick], values[pick])
        for row, pick in ((4, back & (token > 0)), (5, calls & (token > 0))):
            np.add.at(self._current[row], member[pick], size[pick] // token[pick])
            np.add.at(self._current[row + 2], member[pick], size[pick])

    def close(self, members: int) -> None:
        """A window has ended. `members`: only so many were ever used."""
        self._current, self._closed = self._closed, self._current
        self._current[:, :members] = 0

    def forget(self, base: int, ranks: int) -> None:
        self._current[:, base : base + ranks] = 0
        self._closed[:, base : base + ranks] = 0

    def of(self, base: int, ranks: int) -> I64 | None:
        """Bytes that stand for each rank's load in the span; None where they cannot be known."""
        some = slice(base, base + ranks)
        sums: I64 = self._current[:, some] + self._closed[:, some]
        back: I64 = sums[0]
        size: I64 = sums[1]
        calls, waited = sums[2:4]
        if back.any():
            return back
        # Both modes on one communicator: what was received in one of them is not known.
        if not calls.all() or abs(int(calls.sum() - waited.sum())) > ALIKE * int(calls.sum()):
            return None
        return size if size.any() else None

    def tokens(self, base: int, ranks: int) -> I64 | None:
        """Tokens behind `of`, by rank; None where they are not known for every byte of it."""
        size = self.of(base, ranks)
        if size is None:
            return None
        some = slice(base, base + ranks)
        sums: I64 = self._current[:, some] + self._closed[:, some]
        kind = 0 if sums[0].any() else 1
        found: I64 = sums[4 + kind]
        return found if np.array_equal(sums[6 + kind], size) else None


def _per_rank(combined: I64 | None, matrix: I64 | None) -> F64 | None:
    """`combined`: what each rank sent back; without it, what it received of whatever kind."""
    if combined is not None:
        return combined.astype(np.float64)
    if matrix is not None and matrix.any():
        return moe.rank_load(matrix)
    return None


def figures(combined: I64 | None, matrix: I64 | None) -> dict[str, float]:
    """How uneven the load is over ranks; the arguments are `Loads.of` and the traffic matrix."""
    load = _per_rank(combined, matrix)
    if load is None:
        return {}
    return {
        "skew": moe.skew(load),
        "gini": moe.gini(load),
        "balancedness": moe.balancedness(load),
    }


def shares(combined: I64 | None, matrix: I64 | None) -> F64 | None:
    """Share of each rank in the load, which sums to 1; None where nothing is known."""
    load = _per_rank(combined, matrix)
    if load is None or not load.sum() > 0:
        return None
    share: F64 = load / load.sum()
    return share

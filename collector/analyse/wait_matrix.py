"""Who is to blame for a matrix of waits between ranks: senders, receivers, or single paths.

A delay only ever adds. So effects are non-negative, and are taken off one at a time, the one that
explains most first: a median polish that starts from the low end and keeps what it found. A column
that is high on most of its rows is a slow sender, a row that is high in most of its columns a slow
receiver (or incast), and a high cell that is left over a slow path.

Ratios to a mean fail here: with m of n ranks slow the mean of means caps the ratio at n / m. The
base is therefore the median of the low cells, so that half of the ranks may be slow.

A path is one of n^2 cells, so the largest of them that chance brings grows with n: a cell must
exceed what its row and column usually have by sqrt(2 ln n^2) standard deviations of the logarithm,
the expected maximum, and more. A rank's delay is not the same for everybody: cells of a named row
or column may differ by a share of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import straggler

F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

EFFECT_SCORE, EFFECT_RATIO = 3.5, 2.0  # of a row or column: its median cell
CELL_SCORE, CELL_RATIO = 8.0, 3.0  # of one cell: there are n^2 of them, with a long tail
BEYOND = 0.5  # standard deviations above the largest of so many normal cells
LEAST_RANKS = 4  # below that, rows and columns have no usual level of their own
VARIES = 0.1  # of a row's or column's delay: by so much it differs from cell to cell
FLOOR = 0.1  # of the base: a spread near zero inflates no score
DOMINANCE = 0.05  # of the largest finding: less is not what anybody waits for
TIE = 0.1


@dataclass(frozen=True)
class WaitDiagnosis:
    """Ranks and paths that stand out; `slow_paths` are (receiver, sender)."""

    slow_senders: tuple[int, ...] = ()
    slow_receivers: tuple[int, ...] = ()
    slow_paths: tuple[tuple[int, int], ...] = ()
    # What each adds to a cell, in the unit of the matrix, by rank or by (receiver, sender).
    sender_delay: tuple[float, ...] = ()
    receiver_delay: tuple[float, ...] = ()
    path_delay: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.slow_senders or self.slow_receivers or self.slow_paths)


def diagnose_wait_matrix(wait: npt.ArrayLike, node: npt.ArrayLike | None = None) -> WaitDiagnosis:
    """Name the slow senders, receivers and paths of a matrix of waits.

    wait: [n, n]; entry [i, j] is how long receiver i waited for sender j, in any unit; NaN where
    unknown. The diagonal is not looked at. node: [n] the node of each rank; where given, cells are
    compared with those of the same kind, within a node or between nodes.

    With one rank nothing can be said. With two, a row or a column is one cell: what stands out is
    a path. Raises ValueError if `wait` is not square, or `node` does not fit it.
    """
    matrix = np.array(wait, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"wait must be a square matrix, not of shape {matrix.shape}")
    n = len(matrix)
    block = np.zeros((n, n), np.int64)
    if node is not None:
        nodes = np.asarray(node)
        if nodes.shape != (n,):
            raise ValueError(f"node must have one entry for each of {n} ranks, not {nodes.shape}")
        block = (nodes[:, None] != nodes[None, :]).astype(np.int64)
    known = np.isfinite(matrix) & ~np.eye(n, dtype=bool)
    if n < 2 or not known.any():
        return WaitDiagnosis()
    base, scale = _level(matrix, known, block)
    return _Search(np.where(known, matrix - base, np.nan), base, scale).run()


def _usual(matrix: F64, base: F64) -> tuple[F64, float]:
    """-> logarithm of what each cell's row and column have over the base, and by how much more
    the largest cell may be. matrix: [n, n], NaN what is not to be looked at.
    """
    n = len(matrix)
    if n < LEAST_RANKS:
        return np.zeros_like(matrix), 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(np.where((matrix > 0) & (base > 0), matrix / base, np.nan))
    level = (_polished(logs) + _polished(logs.T).T) / 2  # whichever comes first
    left = np.abs(logs - level)[np.isfinite(logs)]
    if not len(left):
        return level, 0.0
    # Levels of rows and columns were fitted to these very cells.
    free = max(len(left) - 2 * n + 1, 1)
    sigma = 1.4826 * float(np.median(left)) * np.sqrt(len(left) / free)
    return level, float(sigma * (np.sqrt(2 * np.log(n * n)) + BEYOND))


def _level(matrix: F64, known: Bool, block: npt.NDArray[np.int64]) -> tuple[F64, F64]:
    """[n, n] base and spread of each cell's block, from its low cells."""
    base, scale = np.zeros_like(matrix), np.zeros_like(matrix)
    for number in (0, 1):
        cells = block == number
        values = np.sort(matrix[cells & known])
        if not len(values):
            continue
        start = values[(len(values) - 1) // 4]
        spread = max(1.4826 * float(np.median(np.abs(values[values <= np.median(values)] - start))),
                     FLOOR * abs(start))  # fmt: skip
        low = values[values <= start + EFFECT_SCORE * spread]
        middle = float(np.median(low))
        base[cells] = middle
        scale[cells] = max(1.4826 * float(np.median(np.abs(low - middle))), FLOOR * abs(middle))
    return base, scale


def _polished(logs: F64) -> F64:
    """Medians of rows, then of columns, twice: what each cell's have above 0."""
    level = np.zeros_like(logs)
    for _ in range(2):
        level += np.nan_to_num(straggler.middle(logs - level), nan=0.0)[:, None]
        level += np.nan_to_num(straggler.middle((logs - level).T), nan=0.0)[None, :]
    return level


@dataclass(frozen=True)
class _Found:
    row: bool  # a receiver; else a sender
    rank: int
    delay: float
    explains: float


class _Search:
    """Effects are taken off `rest` [receiver, sender] as they are found; NaN is unknown."""

    def __init__(self, rest: F64, base: F64, scale: F64) -> None:
        self.rest, self.base, self.scale = rest, base, scale
        self.found: list[_Found] = []

    def run(self) -> WaitDiagnosis:
        for _ in range(2 * len(self.rest)):
            best = self._next(self.rest)
            if best is None:
                break
            self._take(best)
        senders = {f.rank: f.delay for f in self.found if not f.row}
        receivers = {f.rank: f.delay for f in self.found if f.row}
        high = self._high(self.rest, CELL_SCORE, CELL_RATIO)
        high &= self._beyond_usual(high)
        paths = {(int(i), int(j)): float(self.rest[i, j]) for i, j in np.argwhere(high)}
        delays = [*senders.values(), *receivers.values(), *paths.values()]
        least = DOMINANCE * max(delays, default=0.0)
        a = sorted(k for k, delay in senders.items() if delay >= least)
        b = sorted(k for k, delay in receivers.items() if delay >= least)
        c = sorted(k for k, delay in paths.items() if delay >= least)
        return WaitDiagnosis(
            slow_senders=tuple(a),
            slow_receivers=tuple(b),
            slow_paths=tuple(c),
            sender_delay=tuple(senders[k] for k in a),
            receiver_delay=tuple(receivers[k] for k in b),
            path_delay=tuple(paths[k] for k in c),
        )

    def _beyond_usual(self, high: Bool) -> Bool:
        """[n, n] whether a high cell is more than rows, columns and chance explain."""
        delay = np.zeros_like(self.rest)
        for f in self.found:
            line = (f.rank, slice(None)) if f.row else (slice(None), f.rank)
            delay[line] = np.maximum(delay[line], f.delay)
        alone = delay == 0
        normal = np.where(alone, self.rest + self.base, np.nan)
        level, by_chance = _usual(np.where(high, np.nan, normal), self.base)
        allowed = np.maximum(level + by_chance, 0.0)
        with np.errstate(invalid="ignore"):
            beyond = np.where(
                alone,
                normal >= self.base * np.exp(allowed),
                self.rest >= np.maximum(CELL_SCORE * VARIES * delay, self.base * np.expm1(allowed)),
            )
        found: Bool = beyond
        return found

    def _take(self, f: _Found) -> None:
        if f.row:
            self.rest[f.rank] -= f.delay
        else:
            self.rest[:, f.rank] -= f.delay
        self.found.append(f)

    def _high(self, rest: F64, score: float, ratio: float) -> Bool:
        with np.errstate(invalid="ignore"):
            high: Bool = (
                (rest > 0) & (rest >= score * self.scale) & (rest >= (ratio - 1) * self.base)
            )
        return high

    def _next(self, rest: F64) -> _Found | None:
        """The row or column that explains most; None: none left, or it cannot be told which."""
        rows, columns = self._candidates(rest, row=True), self._candidates(rest, row=False)
        if not rows or not columns:
            return max(rows + columns, key=lambda f: f.explains, default=None)
        row, column = (max(c, key=lambda f: f.explains) for c in (rows, columns))
        larger, other = (row, column) if row.explains > column.explains else (column, row)
        if other.explains < (1 - TIE) * larger.explains:
            return larger
        # As good as equal: both are real where either stands without the other, or they are the
        # sides of one block of slow cells (a switch between two groups of ranks).
        stands = [self._stands_without(rest, a, b) for a, b in ((row, column), (column, row))]
        if all(stands):
            return larger
        return None if stands[0] == stands[1] else (row if stands[0] else column)

    def _stands_without(self, rest: F64, this: _Found, other: _Found) -> bool:
        left = rest.copy()
        left[(other.rank, slice(None)) if other.row else (slice(None), other.rank)] = np.nan
        return any(f.rank == this.rank for f in self._candidates(left, row=this.row))

    def _candidates(self, rest: F64, *, row: bool) -> list[_Found]:
        lines = rest if row else rest.T
        high = self._high(rest, EFFECT_SCORE, EFFECT_RATIO)
        high = high if row else high.T
        known = ~np.isnan(lines)
        count, tall = known.sum(axis=1), high.sum(axis=1)
        found = []
        for rank in np.flatnonzero((tall >= 2) & (2 * tall > count)).tolist():
            values = np.sort(lines[rank][known[rank]])
            delay = float(values[(len(values) - 1) // 2])  # the lower of two middles
            if delay > 0 and not any(f.rank == rank and f.row == row for f in self.found):
                found.append(_Found(row, rank, delay, delay * int(tall[rank])))
        return found

"""Load per layer and expert over the last hour, in a ring of buckets: bounded, float32. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

HOUR = 3600
MINUTE = 60
RING_BYTES = 32 << 20  # of one history; larger models get fewer, longer buckets
WIDTHS = (1, 2, 5, 10, 15, 30)  # minutes of a bucket, all of which divide the hour


def bucket_minutes(cells: int) -> int:
    """The shortest bucket with which an hour of `cells` numbers fits into RING_BYTES."""
    for width in WIDTHS:
        if (60 // width + 1) * cells * 4 <= RING_BYTES:
            return width
    return WIDTHS[-1]


class History:
    """Sums of [layers, experts] by time. Times are UNIX seconds; a clock that steps back adds to
    the newest bucket."""

    def __init__(self, layers: int, experts: int, width: int = 0) -> None:
        self.width = width or bucket_minutes(layers * experts)
        buckets = 60 // self.width + 1  # the one being filled, and an hour of full ones
        self.ring: F32 = np.zeros((buckets, layers, experts), np.float32)
        self.stamp: I64 = np.full(buckets, -1, np.int64)  # UNIX time / width of each bucket

    @property
    def nbytes(self) -> int:
        return int(self.ring.nbytes)

    def add(self, load: F64, now: float) -> None:
        stamp = max(self._stamp(now), int(self.stamp.max()))
        at = stamp % len(self.ring)
        if self.stamp[at] != stamp:
            self.ring[at] = 0
            self.stamp[at] = stamp
        self.ring[at] += load

    def hour(self, now: float) -> tuple[F64, float]:
        """-> ([layers, experts] sums, the seconds that they span) of the last hour."""
        newest = self._stamp(now)
        known = (self.stamp >= 0) & (self.stamp > newest - len(self.ring))
        if not known.any():
            return np.zeros(self.ring.shape[1:]), 0.0
        total = self.ring[known].sum(axis=0, dtype=np.float64)
        begin = int(self.stamp[known].min()) * self.width * MINUTE
        return total, max(0.0, min(now - begin, HOUR + self.width * MINUTE))

    def with_layers(self, rows: I64, layers: int) -> History:
        """A copy in which the present layers are the `rows` of `layers`."""
        wide = History(layers, self.ring.shape[2], self.width)
        wide.stamp = self.stamp.copy()
        wide.ring[:, rows] = self.ring
        return wide

    def export(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """-> plain facts and arrays, of the filled buckets only; see `restored`."""
        known = self.stamp >= 0
        return {"width": self.width}, {"ring": self.ring[known], "stamp": self.stamp[known]}

    @classmethod
    def restored(
        cls, facts: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], *, shape: tuple[int, int]
    ) -> History:
        """What `export` gave. Raises ValueError where it cannot have come from there."""
        width, ring, stamp = facts.get("width"), arrays["ring"], arrays["stamp"]
        if width not in WIDTHS or ring.dtype != np.float32 or stamp.dtype != np.int64:
            raise ValueError(f"history of width {width}, {ring.dtype}, {stamp.dtype}")
        made = cls(*shape, width)
        if ring.shape != (len(stamp), *shape) or len(stamp) > len(made.ring):
            raise ValueError(f"history of shape {ring.shape} for {len(stamp)} buckets of {shape}")
        if not np.isfinite(ring).all() or (ring.size and ring.min() < 0) or (stamp < 0).any():
            raise ValueError("history holds values that are no load")
        at = stamp % len(made.ring)
        if len(np.unique(at)) != len(at):
            raise ValueError("history holds a bucket twice")
        made.ring[at], made.stamp[at] = ring, stamp
        return made

    def _stamp(self, now: float) -> int:
        return int(now // (self.width * MINUTE))

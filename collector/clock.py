"""Each node's clock against the collector's, from the four timestamps of every exchange.

As in NTP: offset = ((t1 - t0) + (t2 - t3)) / 2 and round trip = (t3 - t0) - (t2 - t1), with t0, t3
on the agent's and t1, t2 on the collector's CLOCK_MONOTONIC. The true offset lies within half a
round trip of the computed one, so exchanges with the shortest round trips decide. Pure: no IO, no
clock of its own.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

WINDOW = 64  # exchanges remembered, about a minute of them
FIT_SAMPLES = 8
FIT_SPAN_NS = 20 * 10**9
DRIFT_LIMIT = 200e-6  # beyond this a fitted slope is noise: crystals are within 100 ppm
DRIFT_UNKNOWN = 50e-6  # assumed until a slope can be fitted


@dataclass(frozen=True)
class ClockObservation:
    """One finished exchange with a node; nanoseconds."""

    node: str
    agent_sent_ns: int
    collector_received_ns: int
    collector_sent_ns: int
    agent_received_ns: int


@dataclass(frozen=True)
class Estimate:
    """collector time = agent time + offset_ns, at most error_ns wrong."""

    offset_ns: float
    error_ns: float


SAME_CLOCK = Estimate(0.0, 0.0)  # same boot of the same machine: one CLOCK_MONOTONIC


class NodeClock:
    """The offset of one node's clock; bounded memory."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float, int]] = deque(maxlen=WINDOW)
        self._fit: tuple[int, float, float, float, float] | None = None
        self._dirty = False
        self.rejected = 0

    def add(self, o: ClockObservation) -> bool:
        """Take one exchange; False (and counted) when its times contradict each other."""
        stayed = o.collector_sent_ns - o.collector_received_ns
        rtt = o.agent_received_ns - o.agent_sent_ns - stayed
        if stayed < 0 or rtt < 0 or rtt > 60 * 10**9:
            self.rejected += 1
            return False
        # The halves may be odd: keep whole nanoseconds, the error bound covers the half.
        offset = (
            (o.collector_received_ns - o.agent_sent_ns)
            + (o.collector_sent_ns - o.agent_received_ns)
        ) // 2
        if self._samples and self._another_clock(o.agent_received_ns, float(offset), rtt):
            self._samples.clear()
        self._samples.append((o.agent_received_ns, float(offset), rtt))
        self._dirty = True
        return True

    def _another_clock(self, now: int, offset: float, rtt: int) -> bool:
        """Whether one of the two clocks is not the one of the last exchange: its machine was booted
        anew, or stood still in suspend (CLOCK_MONOTONIC stops then)."""
        then, before, rtt_before = self._samples[-1]
        if now < then:
            return True
        # Each true offset is within half a round trip: further apart than both is no drift. What
        # an exchange tells may be as old as its beginning.
        possible = (rtt + rtt_before) / 2 + DRIFT_LIMIT * (now - then + rtt_before) + 1
        return abs(offset - before) > possible

    def estimate(self, at_ns: int) -> Estimate | None:
        """The offset at agent time `at_ns`; None before the first exchange."""
        if not self._samples:
            return None
        if self._dirty:
            self._fit = self._solve()
            self._dirty = False
        if self._fit is None:
            return None
        reference, offset, slope, base_error, slope_error = self._fit
        away = at_ns - reference
        return Estimate(offset + slope * away, base_error + slope_error * abs(away))

    def _solve(self) -> tuple[int, float, float, float, float]:
        """-> (reference time, offset there, slope, error there, error of the slope)."""
        times = np.array([s[0] for s in self._samples], dtype=np.int64)
        offsets = np.array([s[1] for s in self._samples])
        rtts = np.array([s[2] for s in self._samples], dtype=np.float64)
        best = int(np.argmin(rtts))
        shortest = float(rtts[best])
        # As many as a fit needs at least: one lucky exchange alone would decide for as long as it
        # is remembered, and be wrong by the drift of all that time.
        enough = float(np.sort(rtts)[:FIT_SAMPLES][-1])
        good = rtts <= max(1.5 * shortest + 20_000, enough)
        span = int(times[good].max() - times[good].min())
        if int(good.sum()) < FIT_SAMPLES or span < FIT_SPAN_NS:
            return int(times[best]), float(offsets[best]), 0.0, shortest / 2, DRIFT_UNKNOWN
        reference = int(times[good].mean())
        x = (times[good] - reference).astype(np.float64)
        # The offsets of an unsynchronised pair are large: subtract before fitting.
        y = offsets[good] - offsets[best]
        mean = float(y.mean())
        sxx = float((x * x).sum())
        slope = float((x * (y - mean)).sum() / sxx)
        if abs(slope) > DRIFT_LIMIT:
            return int(times[best]), float(offsets[best]), 0.0, shortest / 2, DRIFT_UNKNOWN
        residual = y - mean - slope * x
        sigma = math.sqrt(float((residual * residual).sum()) / (len(x) - 2))
        slope_error = 2 * sigma / math.sqrt(sxx)
        return reference, float(offsets[best]) + mean, slope, enough / 2, slope_error

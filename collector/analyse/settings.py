"""What the engine may hold, and how long it looks back and waits."""

from __future__ import annotations

from dataclasses import dataclass

from lanterne.collector.analyse.rebalance import MIN_GAIN as ADVICE_MIN_GAIN
from lanterne.collector.analyse.straggler import MIN_GAIN


@dataclass(frozen=True)
class EngineConfig:
    """Bounds and spans. Memory is touched only where used; the bounds are the most it can be."""

    window_seconds: float = 5.0  # verdicts are per window; shares slide over the last two
    deadline_seconds: float = 10.0  # an instance is decided at the latest this long after its start
    idle_seconds: float = 300.0  # a silent communicator is forgotten
    ended_seconds: float = 10.0  # one whose processes have ended: two windows
    cells: int = 1 << 24  # rank-events held for alignment, 36 bytes each
    rows: int = 1 << 22
    communicators: int = 1 << 15
    members: int = 1 << 18  # (communicator, rank) pairs
    processes: int = 1 << 17
    nodes: int = 8_192
    own_cells: int = 1 << 24  # own times kept for one window's medians, 12 bytes each
    flush_rows: int = 1 << 17
    flush_batches: int = 512
    max_stride: int = 1024
    min_gain_share: float = MIN_GAIN  # of the time, or a slow rank is not named
    hang_seconds: float = 10.0  # without anything happening while ranks wait in an operation
    advice_seconds: float = 30.0  # loads of experts are planned with in windows of this length
    advice_min_gain: float = ADVICE_MIN_GAIN  # of the busiest GPU's time, or the advice is nothing
    advice_spare_slots: int = 1  # replicas of each layer that a GPU has room for
    expert_bytes: float = 0.0  # weights of one expert of one layer; 0 unknown
    expert_groups: int = 1  # of group-limited routing

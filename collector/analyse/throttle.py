"""GPUs that run slower than they could, from NVML's clocks and reasons.

Supporting evidence only: a GPU that is throttled and whose rank's own time is normal delays nobody.
A power cap that all GPUs of a job are at is how the job runs, so clocks are compared with those of
the peers; where no peer is known, with the GPU's own maximum, and then only heat, a hardware
slowdown or the power brake count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lanterne.collector.readings import Gpu

BELOW_PEERS, BELOW_MAX = 0.95, 0.9
HARD = frozenset({"hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal", "reliability"})
SOFT = frozenset(
    {"sw_power_cap", "applications_clocks", "sync_boost", "display_clock", "board_limit"}
)


def throttled(gpu: Gpu | None, peers: Sequence[Gpu | None]) -> str:
    """Why a GPU's clock is below that of its peers, in words; "" where it is not, or unknown."""
    if gpu is None:
        return ""
    clock = gpu.values.get("sm_clock_hertz", math.nan)
    reasons = [r for r in gpu.throttle_reasons if r in HARD or r in SOFT]
    if not clock > 0 or not reasons:
        return ""
    others = [p.values.get("sm_clock_hertz", math.nan) for p in peers if p is not None]
    others = [c for c in others if c > 0]
    told = ", ".join(reasons)
    if others:
        usual = float(np.median(others))
        if clock <= BELOW_PEERS * usual:
            return f"SM clock {clock / 1e6:.0f} MHz, peers {usual / 1e6:.0f} MHz: {told}"
        return ""
    most = gpu.values.get("sm_clock_max_hertz", math.nan)
    if clock <= BELOW_MAX * most and any(r in HARD for r in reasons):
        return f"SM clock {clock / 1e6:.0f} of {most / 1e6:.0f} MHz: {told}"
    return ""

"""Operations as the collector sees them: codes of the wire, their names, and what they allow.

The codes are those of `probes/layout.py` (Func); a contract test compares the two, because the
collector does not import the probes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NAMES = {
    0: "broadcast",
    1: "reduce",
    2: "all_gather",
    3: "reduce_scatter",
    4: "all_reduce",
    5: "send_recv",
    6: "send",
    7: "recv",
    8: "all_to_all",
    9: "scatter",
    10: "gather",
    11: "all_gather_v",
    12: "put_signal",
    13: "signal",
    14: "wait_signal",
    32: "all_to_all_v",
    33: "barrier",
    34: "p2p_group",
    35: "dispatch",
    36: "combine",
    37: "reduce_scatter_v",
    255: "unknown",
}

ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, ALL_TO_ALL_V, P2P_GROUP = 4, 2, 8, 32, 34
DISPATCH_CALL, COMBINE_CALL = 35, 36  # of a library for expert layers

# No rank can finish before every rank has arrived: only these have a barrier wait. Rooted
# operations and plain send/recv do not; a group of sends and receives does where it is the
# dispatch or combine of an expert layer.
SYMMETRIC: npt.NDArray[np.bool_] = np.zeros(256, dtype=bool)
SYMMETRIC[[2, 3, 4, 8, 11, 32, 33, 35, 36, 37]] = True

# Names of one and the same exchange, as the ranks' own parts in it look.
POINT_TO_POINT: npt.NDArray[np.bool_] = np.zeros(256, dtype=bool)
POINT_TO_POINT[[8, 32, 34]] = True

# Every rank must name the same size: a difference means that different calls were aligned.
EQUAL_BYTES: npt.NDArray[np.bool_] = np.zeros(256, dtype=bool)
EQUAL_BYTES[[ALL_REDUCE, ALL_GATHER]] = True

NO_EVIDENCE, DEVICE, BLOCKING, ENQUEUE = 0, 1, 2, 3
DISPATCH, COMBINE = 1, 2
FLAG_GROUPED, FLAG_CAPTURED, FLAG_FIRST = 1, 2, 4


def name(code: int) -> str:
    """Label value of an operation; a code newer than this table keeps its number."""
    return NAMES.get(code, f"op_{code}")

"""Traffic between ranks, folded to the domains it crosses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

SAME_GPU, SAME_NODE, CROSS_NODE, UNKNOWN = 0, 1, 2, 3
DOMAINS = 4


def domain(
    rank: I64, peer: I64, node: I64, peer_node: I64, gpu: I64, peer_gpu: I64
) -> npt.NDArray[np.int64]:
    """Domain of each (rank, peer) pair: same_gpu 0, same_node 1, cross_node 2, unknown 3.

    node: number of the node, -1 unknown. gpu: number of the (node, GPU), -1 unknown.
    """
    result = np.where(node == peer_node, SAME_NODE, CROSS_NODE)
    result[(node < 0) | (peer_node < 0)] = UNKNOWN
    result[(gpu >= 0) & (gpu == peer_gpu)] = SAME_GPU
    result[rank == peer] = SAME_GPU
    return result.astype(np.int64)


def bus_factor(op: str, ranks: int) -> float:
    """Factor from algorithm to bus bandwidth of an operation over `ranks`; NaN where undefined."""
    if ranks < 2:
        return float("nan")
    share = (ranks - 1) / ranks
    return {
        "all_reduce": 2 * share,
        "reduce_scatter": share,
        "all_gather": share,
        "all_to_all": share,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send": 1.0,
        "recv": 1.0,
    }.get(op, float("nan"))

"""The routing of `rigjob`, again: what every rank must have sent, to the byte.

The same integer arithmetic as rank/routing.c. Floating point enters only through pow() and sqrt(),
which both languages take from the same C library.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tests.rig.config import JobConfig

MASK = (1 << 64) - 1
ELEMENT_BYTES = 2  # bfloat16
NOISE_DIVISOR = 16 * 37837

Counts = npt.NDArray[np.int64]


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _mix_all(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _weights(config: JobConfig, layer: int, step: int) -> list[int]:
    key = _mix((config.seed ^ _mix(layer ^ 0x6C61796572)) & MASK)
    experts = config.expert_count
    order = sorted(range(experts), key=lambda e: (_mix((key + e) & MASK), e))
    out = [0] * experts
    for place, expert in enumerate(order):
        share = math.pow(float(place + 1), -config.zipf)
        out[expert] = max(1, int(share * float(1 << 20)))
    hot = config.hot_expert
    if hot is not None and step >= hot[2] and hot[0] < experts:
        out[hot[0]] = int(float(out[hot[0]]) * hot[1])
    return out


def _settle(row: list[int], tokens: int, total: int, start: int) -> None:
    experts = len(row)
    left = total - sum(row)
    place = 0
    while left:
        expert = (start + place) % experts
        want = left // experts or 1
        row[expert] += (
            change := min(want, tokens - row[expert]) if want > 0 else max(want, -row[expert])
        )
        left -= change
        place += 1


def expert_counts(config: JobConfig, step: int, layer: int) -> Counts:
    """Token copies [source rank, expert] of one layer of one step."""
    if config.mode == "graph":
        step = 0  # one step was captured, and is what every replay does
    weights = _weights(config, layer, step)
    total, experts = config.tokens * config.topk, config.expert_count
    mean = np.array([total * w // sum(weights) for w in weights], dtype=np.int64)
    root = np.sqrt((mean * 256).astype(np.float64)).astype(np.int64)
    out = np.empty((config.ranks, experts), dtype=np.int64)
    for rank in range(config.ranks):
        key = _mix((config.seed + _mix((step + _mix((layer + _mix(rank)) & MASK)) & MASK)) & MASK)
        random = _mix_all(np.uint64(key) + np.arange(experts, dtype=np.uint64))
        bell = np.full(experts, -131070, dtype=np.int64)
        for part in range(4):
            bell += ((random >> np.uint64(16 * part)) & np.uint64(0xFFFF)).astype(np.int64)
        row = np.clip(mean + root * bell // NOISE_DIVISOR, 0, config.tokens).tolist()
        _settle(row, config.tokens, total, key % experts)
        out[rank] = row
    return out


def dispatch_rows(config: JobConfig, step: int, layer: int) -> Counts:
    """Rows (token copies) [source rank, destination rank] of one dispatch."""
    if config.equal_split:
        rows = -(-config.tokens * config.topk // config.ranks)
        return np.full((config.ranks, config.ranks), rows, dtype=np.int64)
    counts = expert_counts(config, step, layer)
    per_rank = config.expert_count // config.ranks
    grouped: Counts = counts.reshape(config.ranks, config.ranks, per_rank).sum(axis=2)
    return grouped


def expected_bytes(config: JobConfig, steps: int, phase: str = "dispatch") -> Counts:
    """Bytes [source rank, destination rank] of all dispatches (or combines) of `steps` steps."""
    if phase not in ("dispatch", "combine"):
        raise ValueError(f"no such phase: {phase}")
    total = np.zeros((config.ranks, config.ranks), dtype=np.int64)
    for step in range(steps):
        for layer in range(config.layers):
            total += dispatch_rows(config, step, layer)
    total *= config.hidden * ELEMENT_BYTES
    return total if phase == "dispatch" else np.ascontiguousarray(total.T)


def expected_calls(config: JobConfig, steps: int, rank: int) -> dict[str, int]:
    """How often a rank calls each function in `steps` steps, without start and end of the job.

    Pairs without tokens are left out of the groups. In graph mode NCCL is called once, while the
    step is captured.
    """
    sends = recvs = 0
    captured = config.mode == "graph"
    called = 1 if captured else steps
    if not config.equal_split:
        for step in range(called):
            for layer in range(config.layers):
                rows = dispatch_rows(config, step, layer)
                both = int(np.count_nonzero(rows[rank])) + int(np.count_nonzero(rows[:, rank]))
                sends += both
                recvs += both
    groups = 0 if config.equal_split else 2 * config.layers * called
    eager = config.mode == "eager"
    paired = config.pipeline and not (rank == config.ranks - 1 and rank % 2 == 0)
    return {
        "ncclSend": sends + (called if paired and rank % 2 == 0 else 0),
        "ncclRecv": recvs + (called if paired and rank % 2 == 1 else 0),
        "ncclGroupStart": groups,
        "ncclGroupEnd": groups,
        "ncclAlltoAll": 2 * config.layers * called if config.equal_split else 0,
        "ncclAllReduce": called * (2 if config.dp_groups else 1),
        "cuLaunchKernelEx": 4 * config.layers * called,
        "cuLaunchKernel": 2 * config.layers * called,
        "cuGraphLaunch": steps if captured else 0,
        # One at the end of each step, one before each dispatch where the host needs the counts,
        # and one before the job ends.
        "cuStreamSynchronize": steps * (1 + (config.layers if eager else 0)) + 1,
    }

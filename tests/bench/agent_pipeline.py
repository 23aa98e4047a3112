"""How many kernel records a second the agent turns into encoded batches, on one core.

Synthetic drains of an expert-parallel job: ranks that exchange by groups of sends and receives,
and all-reduces in between. Prints one JSON object. Nothing is asserted here; `make bench` reports.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from lanterne.agent.comms import Registry
from lanterne.agent.encode import Context, Head
from lanterne.agent.events import Records, Rules
from lanterne.agent.pipeline import Pipeline
from lanterne.agent.process import Processes
from lanterne.probes.layout import COMM_EVENT, RECORD, CommFlag, CommKind, Flag, Func

START_NS = 1_000_000_000


def creations(ranks: int) -> Records:
    """One communicator of `ranks` ranks, each in a process of its own."""
    events = np.zeros(ranks, COMM_EVENT)
    events["time_ns"] = START_NS
    events["comm"] = 0x7F0000001000 + np.arange(ranks, dtype=np.uint64) * 4096
    events["tgid"] = 1000 + np.arange(ranks)
    events["n_ranks"], events["rank"] = ranks, np.arange(ranks)
    events["kind"], events["flags"] = CommKind.INIT, CommFlag.ID | CommFlag.RANK
    events["id"][:] = np.arange(128)
    return events


def records(ranks: int, steps: int, *, grouped: bool, seed: int = 1) -> Records:
    """`steps` layers: dispatch and combine as groups (or as all-to-alls) and one all-reduce."""
    random = np.random.default_rng(seed)
    per_call = 2 * ranks if grouped else 1
    out = np.zeros((steps, 2 * per_call + 1, ranks), RECORD)
    rank = np.arange(ranks)
    out["comm"] = 0x7F0000001000 + rank.astype(np.uint64) * 4096
    out["tgid"] = out["tid"] = 1000 + rank
    out["dtype"], out["peer"] = 9, -1
    step = np.arange(steps)[:, None, None]
    out["enter_ns"] = START_NS + step * 1_000_000 + np.arange(out.shape[1])[None, :, None] * 1000
    out["flags"] = Flag.SYNCED
    last = out[:, -1]
    last["func"], last["count"] = Func.ALL_REDUCE, 4096
    last["seq"] = np.arange(steps)[:, None] * (1 if grouped else 3) + (0 if grouped else 2)
    routing = random.integers(1, 4096, (steps, ranks, ranks))  # from, to
    for half in (0, 1):
        rows = out[:, half * per_call : (half + 1) * per_call]
        if not grouped:
            rows["func"], rows["count"] = Func.ALL_TO_ALL, 4096
            rows["seq"] = (np.arange(steps) * 3 + half)[:, None, None]
            continue
        rows["flags"] |= np.uint8(Flag.P2P | Flag.GROUP)
        rows["seq"] = (np.arange(steps) * 2 + half)[:, None, None]
        rows["group"] = (np.arange(steps) * 2 + half)[:, None, None] * ranks + rank + 1
        rows["peer"] = np.repeat(np.arange(ranks), 2)[None, :, None]
        rows["func"] = np.tile([Func.SEND, Func.RECV], ranks)[None, :, None]
        forth, back = routing.transpose(0, 2, 1), routing
        if half:
            forth, back = back, forth
        rows["count"][:, 0::2] = forth
        rows["count"][:, 1::2] = back
    return out.reshape(-1)


def measure(
    *, ranks: int, grouped: bool, seconds: float = 2.0, drain: int = 1 << 16
) -> dict[str, float]:
    """Feed drains of `drain` records, close a window each second of their time."""
    registry = Registry(libraries=lambda _: (), processes=Processes(Path("/nonexistent")))
    head = Head("bench", 1, "0", "boot")
    pipeline = Pipeline(registry, Rules(), head, START_NS, grace_ns=100_000_000)
    steps = max(1, (1 << 18) // (ranks * (4 * ranks + 1 if grouped else 3)))
    block = records(ranks, steps, grouped=grouped)
    pieces = [block[i : i + drain].copy() for i in range(0, len(block), drain)]
    pipeline.feed(block[:0], creations(ranks), START_NS)
    lanes = (1, 2) if grouped else (3, 0)
    advance = [np.where(p["flags"] & Flag.P2P, lanes[1], lanes[0]) * steps for p in pieces]
    fed = size = batches = round_ = 0
    elapsed = 0.0
    while elapsed < seconds:
        begin = time.process_time()
        for piece in pieces:
            pipeline.feed(piece, block[:0], START_NS)
        round_ += 1
        for _, data in pipeline.close(START_NS + round_ * 10**9, 1, Context):
            size += len(data)
            batches += 1
        elapsed += time.process_time() - begin
        fed += len(block)
        for piece, by in zip(pieces, advance, strict=True):
            piece["seq"] += by.astype(np.uint32)
            piece["group"][piece["group"] != 0] += steps * 2 * ranks
    return {
        "events_per_s": round(fed / elapsed),
        "ns_per_event": round(1e9 * elapsed / fed, 1),
        "bytes_per_event": round(size / fed, 2),
        "batches": batches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--drain", type=int, default=1 << 16)
    arguments = parser.parse_args()
    result = {
        f"{'groups' if grouped else 'collectives'}_{ranks}_ranks": measure(
            ranks=ranks, grouped=grouped, seconds=arguments.seconds, drain=arguments.drain
        )
        for grouped in (True, False)
        for ranks in (8, 64)
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

"""Ranks of one PyTorch job on Gloo, forked from one process that has imported torch.

    gloo_job.py RANKS PORT START_FILE OUT_FILE

Waits for the start file. Then each rank connects (no MASTER_ADDR or MASTER_PORT in its
environment), makes subgroups of two neighbours each, and exchanges unequal parts, which are told in
OUT_FILE with the pids: rank r sends 10 * (r + 1) + q + 1 floats to rank q, and gets them back.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def parts(rank: int, size: int) -> list[int]:
    return [10 * (rank + 1) + peer + 1 for peer in range(size)]


def run(rank: int, size: int, port: int) -> None:
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    mine = pairs[rank // 2]
    sends = parts(rank, size)
    receives = [parts(peer, size)[rank] for peer in range(size)]
    out, back = torch.zeros(sum(sends)), torch.empty(sum(sends))
    inbox = torch.empty(sum(receives))
    for _ in range(3):
        counts = torch.tensor(sends)
        dist.all_to_all_single(torch.empty_like(counts), counts)
        dist.all_to_all_single(inbox, out, receives, sends)
        dist.all_to_all_single(back, inbox, sends, receives)
        dist.all_reduce(torch.zeros(rank // 2 + 1), group=mine)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    size, port = int(sys.argv[1]), int(sys.argv[2])
    start, told = Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            while not start.exists():
                time.sleep(0.02)
            run(rank, size, port)
            # The agent reads a process while it lives.
            while not told.with_suffix(".read").exists():
                time.sleep(0.02)
            os._exit(0)
        pids.append(pid)
    told.write_text(json.dumps({"pids": pids, "sends": [parts(r, size) for r in range(size)]}))
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit(1)


main()

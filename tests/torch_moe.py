"""One rank of a small expert-parallel MoE on real PyTorch with Gloo (CPU).

Per step: attention, router, all-to-all dispatch (unequal splits), experts, all-to-all combine,
all-reduce. Compute is a little real arithmetic plus a sleep, so that several ranks fit on two
cores. The rank times every collective call itself and writes what it saw, so that a test can hold
Lanterne's figures against it.

Run by `tests.torch_job`; reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

HIDDEN = 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="0: until SIGTERM")
    parser.add_argument("--tokens", type=int, default=64, help="per rank and step")
    parser.add_argument("--attention-ms", type=float, default=10.0)
    parser.add_argument("--experts-ms", type=float, default=10.0)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-ms", type=float, default=5.0, help="added per step to attention")
    parser.add_argument("--start-file", type=Path, help="first step only once this file exists")
    parser.add_argument("--ready-file", type=Path, help="created when the group is connected")
    parser.add_argument("--out", type=Path, help="JSON with the rank's own timings")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class Timer:
    """Start and end of every collective call, CLOCK_MONOTONIC ns, in call order."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int]] = []

    def call(self, name: str, function: object, *args: object) -> None:
        start = time.monotonic_ns()
        function(*args)  # type: ignore[operator]
        self.rows.append((name, start, time.monotonic_ns()))


def step(args: argparse.Namespace, timer: Timer, rank: int, n: int, gen: torch.Generator) -> None:
    x = torch.ones(args.tokens, HIDDEN)
    slow = args.slow_ms if rank == args.slow_rank else 0.0
    time.sleep((args.attention_ms + slow) / 1e3)
    # Skewed routing: rank 0's experts are the popular ones.
    weights = 1.0 / torch.arange(1, n + 1, dtype=torch.float32)
    target = torch.multinomial(weights.expand(args.tokens, n), 1, generator=gen).flatten()
    sent = torch.bincount(target, minlength=n)
    received = torch.empty_like(sent)
    timer.call("alltoall", dist.all_to_all_single, received, sent)
    order = torch.argsort(target)
    inbox = torch.empty(int(received.sum()), HIDDEN)
    to, back = sent.tolist(), received.tolist()
    timer.call("alltoallv", dist.all_to_all_single, inbox, x[order], back, to)
    time.sleep(args.experts_ms / 1e3)
    inbox = torch.relu(inbox)
    outbox = torch.empty_like(x)
    timer.call("alltoallv", dist.all_to_all_single, outbox, inbox, to, back)
    loss = outbox.mean()
    timer.call("allreduce", dist.all_reduce, loss)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    stopping = False

    def stop(_signum: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to end
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    # Gloo connects lazily: one collective now keeps that out of what is measured.
    dist.barrier()
    if args.ready_file:
        Path(f"{args.ready_file}.{rank}").touch()
    while args.start_file and not args.start_file.exists() and not stopping:
        time.sleep(0.02)
    gen = torch.Generator().manual_seed(args.seed * 1000 + rank)
    timer = Timer()
    done = 0
    flag = torch.zeros(1)
    while args.steps == 0 or done < args.steps:
        step(args, timer, rank, n, gen)
        done += 1
        if args.steps == 0:
            # All ranks leave at the same step, or the others would wait for ever.
            flag.fill_(float(stopping))
            timer.call("allreduce", dist.all_reduce, flag)
            if flag.item() > 0:
                break
    if args.out:
        rows = {"rank": rank, "pid": os.getpid(), "steps": done, "calls": timer.rows}
        args.out.with_suffix(f".{rank}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

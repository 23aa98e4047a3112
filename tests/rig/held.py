"""A job with one slow rank that makes its first call when a line comes on standard input.

    python -m tests.rig.held

So whoever watches can have its probes in place before. It ends with its standard input.
"""

from __future__ import annotations

import sys

from tests.rig.rig import Job, JobConfig

SLOW = 2


def main() -> None:
    config = JobConfig(
        ranks=4, layers=2, tokens=64, attn_us=4000, seconds=300, faults=(f"slow-rank:{SLOW}:3",)
    )
    with Job(config, hold="start") as job:
        if sys.stdin.readline():
            job.release()
            sys.stdin.read()


if __name__ == "__main__":
    main()

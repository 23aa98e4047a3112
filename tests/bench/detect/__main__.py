"""`make bench-detect`: the detector and the baselines against known faults.

python -m tests.bench.detect [--quick] [--json FILE] [--docs FOLDER] [--seeds tune|report]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.detect import cases, day, document, matrices, runs, summary

MATRIX_REPEATS = 4


def measure(*, quick: bool, seeds: str, workers: int) -> dict[str, Any]:
    """Runs everything -> the JSON object."""
    began = time.monotonic()
    chosen = cases.quick(seeds) if quick else cases.full(seeds)
    # The long ones first, or one worker is left with them at the end.
    ordered = sorted(chosen, key=lambda c: -c.size)
    results = list(zip(ordered, runs.each(runs.measure, ordered, workers), strict=True))
    place = {case: number for number, case in enumerate(chosen)}
    results.sort(key=lambda r: place[r[0]])
    of_matrix = list(matrices.cases(seeds, 1 if quick else MATRIX_REPEATS))
    if quick:
        of_matrix = [c for c in of_matrix if c.size <= 16]
    matrix_scores = runs.each(matrices.measure, of_matrix, 1 if quick else workers)
    days = [] if quick else [day.Day(noise, seeds) for noise in cases.NOISES]
    found = summary.build(
        results,
        list(zip(of_matrix, matrix_scores, strict=True)),
        runs.each(day.run, days, workers),
        seeds,
    )
    return {"quick": quick, "wall_seconds": round(time.monotonic() - began, 1), **found}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute, fewer cells")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--docs", type=Path, help="write tables and plots into this folder")
    parser.add_argument("--seeds", choices=sorted(cases.SEEDS), default="report")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args(argv)
    result = measure(quick=options.quick, seeds=options.seeds, workers=options.workers)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.docs:
        document.write(result, options.docs)
    print(document.overview(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

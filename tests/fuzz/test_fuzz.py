"""Damaged inputs never get further than a declared error: a short run, and what was once found."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from lanterne.collector import recording
from tests.fuzz import corpus
from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.timeout(300)


def test_a_short_run_of_every_reader_finds_nothing(tmp_path: Path) -> None:
    outcome = fuzz(list(TARGETS), inputs=1500, seconds=0.5, folder=tmp_path)
    assert outcome.findings == []
    assert [one["target"] for one in outcome.tallies] == list(TARGETS)
    for one in outcome.tallies:
        assert one["accepted"] > 0, one
        # One that declares no error accepts whatever comes.
        assert (one["refused"] > 0) == bool(TARGETS[one["target"]].declared), one


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ("planted_error", "ValueError at "),
        ("planted_memory", "MemoryError at "),
        ("planted_hang", "one input took "),
        ("planted_crash", "the process ended with -11"),
    ],
)
def test_the_fuzzer_finds_what_is_planted(planted: str, words: str, tmp_path: Path) -> None:
    outcome = fuzz([planted, "cgroup"], inputs=3000, folder=tmp_path, hang_seconds=1.0)
    (found,) = outcome.findings
    assert found["target"] == planted
    assert words in found["finding"]
    assert Path(found["input"]).exists()
    assert outcome.tallies[-1]["target"] == "cgroup", "the rest gets its turn"


def _header(body: bytes) -> bytes:
    return recording.block(recording.HEADER, body)


LINE = b"7f00-7f01 r-xp 00 %s 11 /usr/lib/libnccl.so.2\n"
# What led to a finding, and is accepted or refused since.
FOUND: list[tuple[str, bytes]] = [
    ("maps", LINE.replace(b"7f00", b"7\xff00") % b"fd:01"),
    ("maps", LINE % b"ffffffffffffffffffff:01"),
    ("maps", b"x r-xp 0 7fffffffffff:1 7 /a/libcuda.so\nx\xff r-xp 0 1:1 8 /a/libtorch_cuda.so\n"),
    ("agent_config", b"[window]\nseconds = " + b"9" * 5003),
    ("collector_config", b"[ingest]\nmax_nodes = " + b"9" * 5003),
    ("agent_config", b"[experts]\nengines = " + b"[" * 5000),
    ("collector_config", b"[experts]\nengines = " + b"[" * 5000),
    ("recording", _header(b"[" * 100_000)),
    ("recording", _header(b'{"schema": 1, "boot_id": "", "created_ns": 1e999}')),
    ("engine_page", b"sglang:eplb_balancedness_sum " + b"9" * 400 + b"\n"),
]


@pytest.mark.parametrize(("target", "data"), FOUND)
def test_what_was_once_found(target: str, data: bytes) -> None:
    known: Any = TARGETS[target]
    with contextlib.suppress(*known.declared):
        known.make()(data)


def test_valid_inputs_are_accepted() -> None:
    for name, target in TARGETS.items():
        if name in ("elf", "cuda"):
            continue  # the corpus holds libraries of both kinds
        read = target.make()
        read(target.corpus()[0])
    assert corpus.batches()

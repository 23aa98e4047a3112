"""The journal of acknowledged batches: it outlives kills, torn ends and full disks."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector import acknowledged, journal
from lanterne.collector.journal import Journal
from lanterne.collector.seen import EPOCHS, FORGOTTEN, Seen
from tests.faults.preload import Preload


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)


class Run:
    """One run of a collector, as far as its journal goes."""

    def __init__(self, folder: Path) -> None:
        self.seen = Seen()
        self.journal = Journal(folder, self.seen)

    def __enter__(self) -> Run:
        self.journal.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def take(self, node: str, epoch: int, sequence: int) -> str:
        verdict = self.seen.verdict(node, epoch, sequence)
        if verdict == "new":
            self.seen.add(node, epoch, sequence)
            self.journal.add(node, epoch, sequence)
        return verdict


TAKEN = st.lists(
    st.tuples(st.sampled_from(["a", "b", "knoten-ä"]), st.integers(1, 30), st.integers(1, 9)),
    max_size=120,
)


@settings(max_examples=100, deadline=None)
@given(TAKEN, st.integers(0, 120))
def test_what_is_packed_is_known_again(taken: list[tuple[str, int, int]], cut: int) -> None:
    """Snapshot after `cut` batches, the rest one by one: as if there had been no restart."""
    seen, data = Seen(), b""
    for n, key in enumerate(taken):
        if n == min(cut, len(taken) - 1):
            data = acknowledged.pack(seen)
        if seen.verdict(*key) == "new":
            seen.add(*key)
            if data:
                data += acknowledged.pack_batch(*key)
    again = Seen()
    assert acknowledged.unpack(data or acknowledged.pack(seen), again) == len(
        data or acknowledged.pack(seen)
    )
    for node in ("a", "b", "knoten-ä"):
        for epoch in range(1, 32):
            for sequence in (1, 5, 9, 10):
                key = (node, epoch, sequence)
                assert again.verdict(*key) == seen.verdict(*key), key


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(1, 255))
def test_damage_never_crashes_nor_invents(tail: bytes, at: int, flip: int) -> None:
    seen = Seen()
    for n in range(1, 6):
        seen.add("node", 3, n)
    data = bytearray(acknowledged.pack(seen) + acknowledged.pack_batch("node", 3, 6) + tail)
    data[at % len(data)] ^= flip
    again = Seen()
    try:
        acknowledged.unpack(bytes(data), again)
    except ValueError:
        return
    known = {n for n in range(1, 20) if again.verdict("node", 3, n) == "duplicate"}
    assert known <= set(range(1, 7))


def test_a_restart_knows_what_was_acknowledged(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        for n in (1, 2, 3, 7):
            assert run.take("n", 10, n) == "new"
        for epoch in range(11, 12 + EPOCHS):
            run.take("many", epoch, 1)
    with Run(tmp_path) as run:
        assert [run.take("n", 10, n) for n in (1, 2, 3, 4, 7)] == [
            "duplicate", "duplicate", "duplicate", "new", "duplicate",
        ]  # fmt: skip
        assert run.take("many", 11, 2) == "stale"
        assert run.take("many", 12, 1) == "duplicate"
        assert not any(run.journal.errors().values())
    with Run(tmp_path) as run:
        assert run.take("n", 10, 4) == "duplicate"
    assert stat.S_IMODE((tmp_path / journal.NAME).stat().st_mode) == 0o600


def test_the_last_record_torn_at_any_byte(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        for n in range(1, 4):
            run.take("n", 1, n)
    path = tmp_path / journal.NAME
    data = path.read_bytes()
    size = len(acknowledged.pack_batch("n", 1, 3))
    for cut in range(len(data) - size, len(data)):
        path.write_bytes(data[:cut])
        with Run(tmp_path) as run:
            assert [run.take("n", 1, n) for n in (1, 2, 3)] == ["duplicate", "duplicate", "new"]
            assert run.journal.errors()["journal_corrupt"] == (cut > len(data) - size)
        with Run(tmp_path) as run:  # what came after the torn end is not lost behind it
            assert run.take("n", 1, 3) == "duplicate"


def test_another_file_in_its_place_is_replaced(tmp_path: Path) -> None:
    (tmp_path / journal.NAME).write_bytes(b"something else entirely, and longer than the head")
    with Run(tmp_path) as run:
        assert run.journal.errors()["journal_corrupt"] == 1
        run.take("n", 1, 1)
    with Run(tmp_path) as run:
        assert run.take("n", 1, 1) == "duplicate"


def test_it_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "GROWTH_BYTES", 20_000)
    path = tmp_path / journal.NAME
    largest = 0
    with Run(tmp_path) as run:
        for n in range(1, 20_001):
            run.take(f"n{n % 7}", 1, n)
            if n % 500 == 0:
                until(lambda: run.journal.kept == n)  # noqa: B023
                largest = max(largest, path.stat().st_size)
        assert largest < 100_000
    with Run(tmp_path) as run:
        assert all(run.take(f"n{n % 7}", 1, n) == "duplicate" for n in range(1, 20_001))
        until(lambda: path.stat().st_size < 60_000)


KILLED = """
import sys
import time
from pathlib import Path
from lanterne.collector import journal
from lanterne.collector.journal import Journal
from lanterne.collector.seen import Seen
journal.GROWTH_BYTES = 5000
seen = Seen()
kept = Journal(Path(sys.argv[1]), seen)
kept.open()
start = next(n for n in range(1, 1 << 30) if seen.verdict("n", 1, n) == "new")
for n in range(start, 1 << 30):
    seen.add("n", 1, n)
    position = kept.add("n", 1, n)
    while n % 25 == 0 and kept.kept < position:
        time.sleep(0.001)
    if n % 25 == 0:
        print(n, flush=True)
"""


def test_killed_at_any_moment_it_knows_all_that_was_acknowledged(tmp_path: Path) -> None:
    answered = 0
    for kill in range(6):
        goal = answered + 137 * (kill + 1)
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                answered = int(line)
                if answered >= goal:
                    break
            process.kill()
            for line in process.stdout:
                if line.endswith("\n"):
                    answered = int(line)
        with Run(tmp_path) as run:
            assert run.seen.verdict("n", 1, answered) == "duplicate"
            assert run.seen.verdict("n", 1, 1) == "duplicate"
            later = [run.seen.verdict("n", 1, answered + n) for n in range(1, 52)]
            assert later[-1] == "new"  # of the last few it may know, without holes
            assert later == sorted(later)


def test_two_collectors_do_not_share_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Run(tmp_path) as first, Run(tmp_path) as second:
        assert "another collector uses that folder" in caplog.text
        assert second.journal.errors()["journal_unwritable"] == 1
        assert second.take("n", 1, 1) == "new"
        assert second.take("n", 1, 1) == "duplicate"
        assert first.take("n", 1, 1) == "new"
    with Run(tmp_path) as run:
        assert run.take("n", 1, 1) == "duplicate"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_costs_a_line_and_is_used_again(
    small_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(journal, "IDLE_SECONDS", 0.05)
    sequence = 0
    with caplog.at_level(logging.INFO), Run(small_disk) as run:
        filler = small_disk / "filler"
        filler.write_bytes(bytes(48 << 10))

        def more() -> int:
            nonlocal sequence
            sequence += 1
            assert run.take("n" * 100, 1, sequence) == "new"
            return run.journal.errors()["journal_unwritable"]

        until(lambda: more() > 0)
        assert run.take("n" * 100, 1, 1) == "duplicate"  # memory knows
        filler.unlink()
        until(lambda: more() and "kept again" in caplog.text)
        assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1
    with Run(small_disk) as run:
        known = [run.seen.verdict("n" * 100, 1, n) for n in range(1, sequence + 1)]
        assert known == ["duplicate"] * sequence


def test_a_clock_set_back_makes_no_epoch_stale() -> None:
    """Restarts before and after CLOCK_REALTIME went back an hour."""
    seen, hour = Seen(), 3600 * 10**9
    start = 1_700_000_000 * 10**9
    epochs = [start + n * 10**9 for n in range(3 * EPOCHS)]
    epochs += [start - hour + n * 10**9 for n in range(3 * EPOCHS)]
    epochs += [start + hour + n * 10**9 for n in range(3)]
    for epoch in epochs:
        for sequence in (1, 2):
            assert seen.verdict("n", epoch, sequence) == "new"
            seen.add("n", epoch, sequence)
            assert seen.verdict("n", epoch, sequence) == "duplicate"
    assert seen.verdict("n", epochs[0], 1) == "stale"  # cannot be told from a duplicate
    assert len(next(iter(seen.items()))[1].forgotten) == len(epochs) - EPOCHS


def test_what_is_remembered_of_forgotten_epochs_is_bounded() -> None:
    seen = Seen()
    for epoch in range(1, EPOCHS + FORGOTTEN + 100):
        seen.add("n", epoch, 1)
    ((_, entry),) = seen.items()
    assert (len(entry.epochs), len(entry.forgotten), entry.floor) == (EPOCHS, FORGOTTEN, 99)
    assert [seen.verdict("n", e, 2) for e in (50, 99, 100, EPOCHS + FORGOTTEN + 99)] == [
        "stale", "stale", "stale", "new",
    ]  # fmt: skip


STALLED = """
import sys, time
from pathlib import Path
from lanterne.collector import journal, slow_disk
from lanterne.collector.journal import Journal
from lanterne.collector.seen import Seen
slow_disk.SLOW_SECONDS, journal.GIVE_UP_SECONDS = 0.2, 2.0
seen = Seen()
kept = Journal(Path(sys.argv[1]), seen)
kept.open()

def add(n):
    seen.add("n", 1, n)
    return kept.add("n", 1, n)

def until(condition):
    while not condition():
        kept.errors()
        time.sleep(0.01)

def say(*what):
    print(*what, kept.errors()["journal_stalled"], kept.errors()["journal_unwritable"], flush=True)
    sys.stdin.readline()

first = add(1)
until(lambda: kept.kept == first)
say("kept")
second, third = add(2), add(3)
until(lambda: kept.errors()["journal_stalled"])
say("stalled", kept.kept == first, kept.position("n", 1, 2) == second, kept.position("n", 1, 1))
until(lambda: kept.kept == third)
say("given up", kept.position("n", 1, 3))
until(lambda: kept._written == third)
fourth = add(4)
until(lambda: kept.kept == fourth)
kept.close()
say("well")
"""


def test_a_disk_that_stalls_for_long_counts_as_one_that_fails(tmp_path: Path) -> None:
    """Held back first; memory alone knows then; on the disk in the end."""
    folder = tmp_path / "state"
    folder.mkdir()
    slow = Preload(tmp_path, slow=folder)
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **slow.env},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        answers = []
        for stall in (600_000, 600_000, 0, 0):
            answers.append(process.stdout.readline().strip())
            slow.set(sync_ms=stall)
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.wait(60) == 0
    slow.close()
    assert answers == ["kept 0 0", "stalled True True 0 1 0", "given up 0 1 1", "well 1 1"]
    with Run(folder) as run:
        assert [run.take("n", 1, n) for n in (1, 2, 3, 4)] == ["duplicate"] * 4

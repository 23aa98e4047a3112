"""The spool on a real file system: what was written is found again, whatever was torn."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.agent import segments
from lanterne.agent import spool as spools
from lanterne.agent.errors import SpoolError
from lanterne.agent.segments import BATCH, DONE
from lanterne.agent.spool import SMALLEST_SEGMENT, Place, Spool

Key = tuple[int, int]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def opened(folder: Path, max_bytes: int = 1 << 20) -> tuple[Spool, dict[Key, Place]]:
    spool = Spool(folder, max_bytes)
    return spool, dict(spool.open())


def batches(*sequences: int, epoch: int = 7, size: int = 100) -> list[tuple[Key, bytes]]:
    return [((epoch, n), (b"%d," % n) * size) for n in sequences]


def contents(spool: Spool, places: dict[Key, Place]) -> dict[Key, bytes | None]:
    return {key: spool.read(key, place) for key, place in places.items()}


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


# -- framing -------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=6), st.data())
def test_one_changed_byte_costs_one_record(payloads: list[bytes], data: st.DataObject) -> None:
    frames = [segments.frame(BATCH, 1, n, p) for n, p in enumerate(payloads)]
    whole = bytearray(b"".join(frames))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    hit = next(n for n in range(len(frames)) if at < sum(map(len, frames[: n + 1])))
    scan = segments.scan(bytes(whole))
    assert [r.sequence for r in scan.records] == [n for n in range(len(frames)) if n != hit]
    assert scan.damaged == 1
    assert scan.end == (len(whole) if hit < len(frames) - 1 else len(whole) - len(frames[-1]))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000))
def test_garbage_is_no_record(garbage: bytes) -> None:
    scan = segments.scan(garbage + segments.frame(BATCH, 1, 2, b"x") + garbage)
    assert [(r.epoch, r.sequence) for r in scan.records] == [(1, 2)]


def test_a_record_within_a_damaged_batch_is_not_believed() -> None:
    inner = segments.frame(BATCH, 1, 99, b"written by a job")
    outer = bytearray(segments.frame(BATCH, 1, 1, inner + b"tail"))
    outer[-1] ^= 1
    scan = segments.scan(bytes(outer) + segments.frame(BATCH, 1, 2, b"y"))
    assert [r.sequence for r in scan.records] == [2]


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 40))))
def test_what_is_done_is_told_in_ranges(keys: set[Key]) -> None:
    record = segments.done(keys)
    if not keys:
        assert record == b""
        return
    (found,) = segments.scan(record).records
    assert found.kind == DONE
    ranges = segments.ranges_of(record[segments.HEAD_BYTES :])
    assert {(e, n) for e, low, high in ranges for n in range(low, high + 1)} == keys
    assert sum(high - low + 1 for _, low, high in ranges) == len(keys)


# -- over a restart ------------------------------------------------------------------------


def test_what_was_appended_is_found_again_in_order(folder: Path) -> None:
    spool, found = opened(folder)
    assert found == {}
    first, second = batches(3, 4, epoch=9), batches(1, 2, epoch=5)
    assert spool.append(first).error is None
    places = spool.append(second).places
    assert contents(spool, places) == dict(second)
    spool.close()
    again, found = opened(folder)
    assert list(found) == [(9, 3), (9, 4), (5, 1), (5, 2)]
    assert contents(again, found) == dict(first + second)
    assert again.damaged == 0
    again.close()


def test_what_is_acknowledged_does_not_come_back(folder: Path) -> None:
    spool, _ = opened(folder)
    places = spool.append(batches(1, 2, 3, 4)).places
    spool.append([], [(k, places[k]) for k in ((7, 1), (7, 2), (7, 4))])
    spool.close()
    spool, found = opened(folder)
    assert list(found) == [(7, 3)]
    spool.append([], list(found.items()))
    assert segment_files(folder) == []  # nothing is wanted: nothing is on the disk
    assert (spool.disk_bytes, spool.batches) == (0, 0)
    spool.close()


def test_a_run_that_was_not_ended_in_order_is_told_by_the_next(folder: Path) -> None:
    first, _ = opened(folder)
    assert not first.unclean
    os.close(first._lock_fd)  # as the kernel does with a killed process
    second, _ = opened(folder)
    assert second.unclean
    second.close()
    third, _ = opened(folder)
    assert not third.unclean
    third.close()


@pytest.mark.parametrize("last", ["batch", "done"])
def test_the_last_record_torn_at_any_byte(folder: Path, tmp_path: Path, last: str) -> None:
    spool, _ = opened(folder)
    places = spool.append(batches(1, 2, size=4)).places
    whole = segment_files(folder)[0].stat().st_size
    if last == "batch":
        spool.append(batches(3, size=4))
    else:
        spool.append([], [((7, 1), places[7, 1])])
    spool.close()
    data = segment_files(folder)[0].read_bytes()
    for cut in range(whole, len(data) + 1):
        torn = tmp_path / f"torn{cut}"
        torn.mkdir()
        (torn / segment_files(folder)[0].name).write_bytes(data[:cut])
        spool, found = opened(torn)
        complete = cut == len(data)
        expected = {"batch": [1, 2] + [3] * complete, "done": [2] if complete else [1, 2]}[last]
        assert [n for _, n in found] == expected, cut
        assert spool.damaged == (whole < cut < len(data))
        assert contents(spool, found) == dict(batches(*expected, size=4))
        # What is written from now on is behind what was cut, and found as well.
        assert spool.append(batches(9, size=4)).error is None
        spool.close()
        spool, found = opened(torn)
        assert [n for _, n in found] == [*expected, 9]
        assert spool.damaged == 0
        spool.close()


def test_a_power_loss_that_leaves_zeros_costs_what_was_not_synced(folder: Path) -> None:
    spool, _ = opened(folder)
    spool.append(batches(1, 2))
    spool.close()
    with segment_files(folder)[0].open("ab") as file:
        file.write(bytes(5000))
    spool, found = opened(folder)
    assert [n for _, n in found] == [1, 2]
    assert spool.damaged == 1
    spool.close()


KILLED = """
import sys
from pathlib import Path
from lanterne.agent.spool import Spool
spool = Spool(Path(sys.argv[1]), 1 << 20)
start = max((n for _, n in dict(spool.open())), default=0)
for n in range(start + 1, 1 << 30):
    result = spool.append([((1, n), b"x" * 3000)])
    assert result.error is None
    print(n, flush=True)
"""


def test_killed_while_writing_it_keeps_all_that_it_said_is_safe(folder: Path) -> None:
    safe = 0
    for kill in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                safe = int(line)
                if safe >= 20 * (kill + 1) + kill:
                    break
            process.kill()
            for line in process.stdout:
                safe = int(line)
        spool, found = opened(folder)
        sequences = [n for _, n in found]
        assert sequences[-1] in (safe, safe + 1)
        assert sequences == list(range(1, sequences[-1] + 1))
        spool.close()


# -- bounds --------------------------------------------------------------------------------


def test_the_oldest_goes_first_and_is_told(folder: Path) -> None:
    spool, _ = opened(folder, 1 << 20)
    size = 10_000
    kept: dict[Key, Place] = {}
    evicted: list[Key] = []
    for n in range(1, 301):
        result = spool.append([((1, n), bytes(size))])
        assert result.error is None
        assert not result.too_large
        kept |= result.places
        evicted += result.evicted
        assert spool.disk_bytes <= 1 << 20
        assert sum(p.stat().st_size for p in segment_files(folder)) == spool.disk_bytes
    assert evicted == [(1, n) for n in range(1, len(evicted) + 1)]
    assert len(evicted) < 300 - (1 << 20) // (size + 100) + SMALLEST_SEGMENT // size + 1
    for key in evicted:
        assert spool.read(key, kept[key]) is None
    left = {k: p for k, p in kept.items() if k not in set(evicted)}
    assert None not in contents(spool, left).values()
    assert spool.batches == len(left)
    spool.close()


def test_batches_are_bounded_in_number_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "MOST_BATCHES", 1000)
    spool, _ = opened(folder)
    evicted: list[Key] = []
    for n in range(0, 3000, 50):
        evicted += spool.append(batches(*range(n + 1, n + 51), size=1)).evicted
        assert spool.batches <= 1000
    assert [n for _, n in evicted] == list(range(1, len(evicted) + 1))
    assert len(evicted) >= 2000
    assert len(evicted) + spool.batches == 3000
    spool.close()


def test_a_batch_larger_than_the_spool_is_told_and_costs_no_other(folder: Path) -> None:
    spool, _ = opened(folder, 1 << 20)
    result = spool.append([((1, 1), b"a"), ((1, 2), bytes(2 << 20)), ((1, 3), b"c")])
    assert result.too_large == [(1, 2)]
    assert list(result.places) == [(1, 1), (1, 3)]
    assert result.evicted == []
    spool.close()


def test_a_damaged_copy_is_not_sent(folder: Path) -> None:
    spool, _ = opened(folder)
    places = spool.append(batches(1, 2)).places
    path = segment_files(folder)[0]
    data = bytearray(path.read_bytes())
    data[places[7, 1].at + 60] ^= 1
    path.write_bytes(data)
    assert spool.read((7, 1), places[7, 1]) is None
    assert spool.read((7, 2), places[7, 2]) == dict(batches(2))[7, 2]
    assert spool.read((7, 1), places[7, 2]) is None  # another batch's place
    spool.close()


# -- the folder ----------------------------------------------------------------------------


def test_nobody_else_may_look_or_write(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    spool, _ = opened(folder)
    spool.append(batches(1))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    spool.close()


def test_a_link_or_a_folder_of_another_user_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpoolError, match="must be a folder that belongs"):
        opened(folder)
    if os.geteuid() == 0:
        folder.unlink()
        folder.mkdir()
        os.chown(folder, 1234, 1234)
        with pytest.raises(SpoolError, match="must be a folder that belongs"):
            opened(folder)


def test_two_agents_do_not_share_a_spool(folder: Path) -> None:
    spool, _ = opened(folder)
    with pytest.raises(SpoolError, match="used by another agent"):
        opened(folder)
    spool.close()
    opened(folder)[0].close()


# -- a full disk ---------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=False
    )
    if mounted.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_loses_nothing_that_was_safe_and_is_used_again(small_disk: Path) -> None:
    spool, _ = opened(small_disk / "spool", 1 << 20)
    safe: dict[Key, Place] = {}
    result = spool.append([])
    for n in range(1, 100):
        result = spool.append([((1, n), bytes(10_000))])
        if result.error is not None:
            break
        safe |= result.places
    assert result.error is not None
    assert result.places == {}
    assert 10 < len(safe) < 26
    assert None not in contents(spool, safe).values()
    spool.append([], list(safe.items())[:15])  # acknowledged: a segment is free again
    result = spool.append([((1, 1000), bytes(10_000))])
    assert result.error is None
    spool.close()
    spool, found = opened(small_disk / "spool", 1 << 20)
    assert spool.damaged == 0
    assert (1, 1000) in found
    assert set(list(safe)[15:]) <= set(found)
    spool.close()

"""Recordings: what is written is read, however the file ends, and within its bounds."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector import recording
from lanterne.collector.errors import RecordingError
from lanterne.collector.recorder import Recorder
from lanterne.collector.recording import Damage, Header, Received

HEADER = Header("boot", 10**18, 10**15, "0.1", {"window_seconds": 5.0})


def frames(n: int, size: int = 100) -> list[Received]:
    rng = random.Random(1)
    return [Received(10**15 + i, 1 + i % 3, rng.randbytes(size)) for i in range(n)]


def recorder(path: Path, *, max_bytes: int = 1 << 30, files: int = 4) -> Recorder:
    return Recorder(path, max_bytes=max_bytes, files=files, sync_seconds=5.0, header=lambda: HEADER)


def written(path: Path, received: list[Received], **bounds: int) -> Recorder:
    kept = recorder(path, **bounds)
    for item in received:
        assert kept.take(item)
    kept.close()
    return kept


def read(path: Path) -> tuple[list[Received], Damage]:
    damage = Damage()
    return list(recording.read(path, damage)), damage


def blocks_of(groups: list[list[Received]]) -> bytes:
    """A whole file, one block a group."""
    made = [recording.frames_block(map(recording.record, group)) for group in groups]
    return recording.header_block(HEADER) + b"".join(made)


def test_what_is_taken_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "r"
    items = frames(500)
    kept = written(path, items)
    found, damage = read(path)
    assert found == items
    assert not damage
    assert recording.read_header(path) == HEADER
    assert recording.is_recording(path)
    assert kept.counts()["recorded_frames"] == 500
    assert kept.counts()["recorded_bytes"] < path.stat().st_size
    assert path.stat().st_mode & 0o077 == 0


def test_frames_that_repeat_take_little_room(tmp_path: Path) -> None:
    path = tmp_path / "r"
    written(path, [Received(i, 2, b"the same window of a node" * 40) for i in range(1000)])
    assert path.stat().st_size < 1000 * 1000 / 20


def test_a_torn_tail_costs_the_last_block_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "r"
    groups = [frames(3), frames(4), frames(5)]
    whole = blocks_of(groups)
    last = len(whole) - len(recording.frames_block(map(recording.record, groups[2])))
    for end in range(last + 1, len(whole)):
        path.write_bytes(whole[:end])
        found, damage = read(path)
        assert found == groups[0] + groups[1]
        assert (damage.torn_bytes, damage.blocks) == (end - last, 0)
    path.write_bytes(whole[:last])
    assert read(path) == (groups[0] + groups[1], Damage())


def test_a_damaged_block_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "r"
    groups = [frames(3), frames(40), frames(5)]
    whole = bytearray(blocks_of(groups))
    second = len(blocks_of(groups[:1]))
    for at in (
        second,
        second + 4,
        second + 9,
        second + 17,
        second + 60,
    ):  # magic, length, checksum, body
        broken = whole.copy()
        broken[at] ^= 0xFF
        path.write_bytes(broken)
        found, damage = read(path)
        assert found == groups[0] + groups[2], at
        assert damage.blocks >= 1


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_no_bytes_whatever_break_the_reader(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    path = tmp_path_factory.mktemp("r") / "r"
    whole = blocks_of([frames(2, 20), frames(2, 20)])
    path.write_bytes(whole[:at] + noise + whole[at:])
    found, _ = read(path)
    assert len(found) <= 4
    with_header = recording.is_recording(path)
    if with_header and not noise:
        assert recording.read_header(path) == HEADER


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "r"
    stored = zlib.compress(bytes(recording.MOST_BODY + 100), 9)
    head = recording._BLOCK.pack(
        recording.MAGIC,
        recording.FRAMES,
        100,
        len(stored),
        recording._checksum(recording.FRAMES, 100, stored),
    )
    path.write_bytes(recording.header_block(HEADER) + head + stored)
    found, damage = read(path)
    assert found == []
    assert damage.blocks == 1


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text("something else")
    assert not recording.is_recording(path)
    with pytest.raises(RecordingError, match=r"not a recording.*lanterne-collector record"):
        recording.parts(path)
    with pytest.raises(RecordingError, match="cannot be read"):
        recording.parts(tmp_path / "absent")
    later = recording.header_block(HEADER)
    values = zlib.decompress(later[20:]).replace(b'"schema": 1', b'"schema": 9')
    path.write_bytes(recording.block(recording.HEADER, values))
    with pytest.raises(RecordingError, match="recording of format 9, this version reads 1"):
        recording.read_header(path)


def test_files_and_their_sizes_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "r"
    limit = 2_000_000
    kept = recorder(path, max_bytes=limit, files=3)
    items = frames(500, 20_000)  # random: does not shrink
    for item in items:
        while not kept.take(item):
            pass
    kept.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r", "r.1", "r.2"]
    sizes = [p.stat().st_size for p in tmp_path.iterdir()]
    assert max(sizes) <= limit
    found = [item for part in recording.parts(path) for item in read(part)[0]]
    assert found == items[-len(found) :]
    assert len(found) < len(items)
    assert [p.name for p in recording.parts(path)] == ["r.2", "r.1", "r"]


def test_an_older_recording_moves_on(tmp_path: Path) -> None:
    path = tmp_path / "r"
    first, second = frames(3), frames(5)
    written(path, first)
    written(path, second)
    assert read(path)[0] == second
    assert read(tmp_path / "r.1")[0] == first
    assert len(recording.parts(path)) == 2
    # That of another boot has another clock, and is not read with it.
    other = Header("another boot", 1, 1, "0.1")
    (tmp_path / "r.1").write_bytes(recording.header_block(other))
    assert recording.parts(path) == [path]


def test_one_file_is_kept_where_one_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "r"
    written(path, frames(3), files=1)
    written(path, frames(5), files=1)
    assert [p.name for p in tmp_path.iterdir()] == ["r"]
    assert read(path)[0] == frames(5)


def test_two_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "r"
    kept = recorder(path)
    with pytest.raises(RecordingError, match="another collector is writing it"):
        recorder(path)
    kept.take(frames(1)[0])
    kept.close()
    assert read(path)[0] == frames(1)
    with pytest.raises(RecordingError, match="no recording can be begun there"):
        recorder(tmp_path / "no" / "r")


DISK = """
import logging, resource, signal, sys, time
from pathlib import Path
from lanterne.collector import recording
from lanterne.collector.recorder import Recorder
from lanterne.collector.recording import Header, Received
logging.basicConfig(level="INFO", stream=sys.stderr)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
header = Header("boot", 1, 1, "0.1")
kept = Recorder(path, max_bytes=1 << 30, files=2, sync_seconds=1, header=lambda: header)

def flush(n, tag):
    before = sum(kept.counts().values())
    for i in range(n):
        kept.take(Received(i, 2, (tag + str(i)).encode() * 50))
    while kept._waiting_bytes:
        time.sleep(0.01)

flush(20, "before")
full = path.stat().st_size + 10
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (full, hard))
flush(20, "while")
flush(20, "while")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
flush(20, "after")
kept.close()
print(kept.counts())
"""


def test_a_full_disk_is_counted_said_once_and_got_over(tmp_path: Path) -> None:
    """The kernel refuses to let the file grow, as a full disk would."""
    path = tmp_path / "r"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DISK), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'recorded_frames': 40" in done.stdout
    assert "'recording_dropped_disk': 40" in done.stdout
    assert done.stderr.count("recording has stopped") == 1
    assert done.stderr.count("recording goes on") == 1
    found, damage = read(path)
    assert not damage
    assert [f.frame[:6] for f in found] == [b"before"] * 20 + [
        (f"after{i}".encode() * 2)[:6] for i in range(20)
    ]


def test_what_the_queue_cannot_hold_is_counted(tmp_path: Path) -> None:
    kept = recorder(tmp_path / "r")
    kept._waiting_bytes = 1 << 40
    assert not kept.has_room()
    assert not kept.take(frames(1)[0])
    kept._waiting_bytes = 0
    kept.close()
    assert kept.counts()["recording_dropped_queue"] == 1

"""Views of one file through overlay mounts: real mounts, where root may mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lanterne.agent.inodes import on_overlay, real_file, same_file


@contextmanager
def overlay(folder: Path, lower: Path) -> Iterator[Path]:
    """A mount of its own over a shared layer, as a container's root is."""
    parts = {name: folder / name for name in ("upper", "work", "merged")}
    for part in parts.values():
        part.mkdir(parents=True)
    options = f"lowerdir={lower},upperdir={parts['upper']},workdir={parts['work']}"
    done = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(parts["merged"])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no overlay mount here: {done.stderr.strip()}")
    try:
        yield parts["merged"]
    finally:
        subprocess.run(["umount", "-l", str(parts["merged"])], check=True)


def look(path: Path) -> tuple[bool, tuple[int, ...], os.stat_result]:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        return on_overlay(file.fileno()), real_file(file.fileno(), status), status


def test_two_mounts_of_one_layer_show_one_file(tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    lower.mkdir()
    (lower / "a").write_bytes(b"same")
    shutil.copy2(lower / "a", lower / "b")
    with ExitStack() as held:
        first = held.enter_context(overlay(tmp_path / "1", lower))
        second = held.enter_context(overlay(tmp_path / "2", lower))
        (here, real, status), (there, other, again) = look(first / "a"), look(second / "a")
        assert here
        assert there
        assert status.st_dev != again.st_dev
        assert real == other
        assert look(first / "b")[1] != real, "a copy is another inode"
        with (second / "a").open("ab") as file:
            file.write(b"!")  # copied up into the second mount's own layer
        assert look(second / "a")[1] != real


def test_a_plain_file_goes_by_device_and_number(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    overlaid, real, status = look(tmp_path / "a")
    if overlaid:
        pytest.skip("the tests' own folder is on overlay")
    assert real == (status.st_dev, status.st_ino) == look(tmp_path / "b")[1]


def test_the_layer_in_high_bits_makes_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    status = (tmp_path / "a").stat()
    assert same_file(status, (0, status.st_ino | 1 << 62))
    assert not same_file(status, (0, status.st_ino + 1))

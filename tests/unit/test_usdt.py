"""USDT notes of the profiler plugin, read as the agent does, and of files that are broken."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lanterne.agent import library, usdt
from lanterne.agent.discover import kind_of
from lanterne.agent.elf import ElfFile
from lanterne.agent.errors import ElfError
from tests.plugin import notes
from tests.plugin.build import build

FIRST = {"x86_64": b"8@%rdi", "aarch64": b"8@x0"}[platform.machine()]
OTHER = {"x86_64": b"8@%rsi", "aarch64": b"8@x1"}[platform.machine()]


@pytest.fixture(scope="module")
def plugin() -> Path:
    return build().library


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def examined(path: Path) -> library.AttachedLibrary:
    with opened(path) as fd:
        return library.examine(fd, "profiler", str(path), str(path))


def test_every_probe_as_another_reader_finds_it(plugin: Path) -> None:
    with opened(plugin) as fd:
        found = usdt.probes(ElfFile(fd, str(plugin)), "lanterne")
    expected = notes.read(plugin)
    assert {p.name for p in found} == set(expected)
    for probe in found:
        note = expected[probe.name]
        assert (probe.address, probe.offset) == (note.address, note.offset)
        assert probe.semaphore == note.semaphore_offset


def test_only_op_done_is_probed(plugin: Path) -> None:
    found = examined(plugin)
    assert (found.state, found.error) == ("attached", "")
    (site,) = found.sites
    assert site.what.symbol == "lanterne:op_done"
    assert site.semaphore


def test_another_provider_has_no_probes(plugin: Path, tmp_path: Path) -> None:
    other = tmp_path / "libnccl-profiler.so"
    other.write_bytes(plugin.read_bytes().replace(b"lanterne\0op_done", b"somebody\0op_done"))
    found = examined(other)
    assert found.state == "nothing_to_probe"
    assert "without Lanterne's probes" in found.error


def test_sections_that_were_moved_later(plugin: Path, tmp_path: Path) -> None:
    """The base in the note is lower by 16 than where .stapsdt.base is: all addresses are, too."""
    data = bytearray(plugin.read_bytes())
    at = data.index(b"lanterne\0op_done") - 24
    for field in (0, 8, 16):
        value = int.from_bytes(data[at + field : at + field + 8], "little") - 16
        data[at + field : at + field + 8] = value.to_bytes(8, "little")
    moved = tmp_path / "libnccl-profiler.so"
    moved.write_bytes(data)
    assert examined(moved).sites == examined(plugin).sites


def test_an_argument_elsewhere_is_refused(plugin: Path, tmp_path: Path) -> None:
    other = tmp_path / "libnccl-profiler.so"
    data = plugin.read_bytes()
    at = data.index(b"lanterne\0op_done")
    other.write_bytes(data[:at] + data[at:].replace(FIRST, OTHER, 1))
    with pytest.raises(ElfError, match="build the plugin"):
        examined(other)


@pytest.mark.parametrize("field", [0, 4, 8])
def test_a_note_of_nonsense_lengths_ends_soon(plugin: Path, tmp_path: Path, field: int) -> None:
    data = bytearray(plugin.read_bytes())
    at = data.index(b"stapsdt\0", data.index(b"lanterne\0") - 64) - 12
    data[at + field : at + field + 4] = b"\xff\xff\xff\x7f"
    broken = tmp_path / "libnccl-profiler.so"
    broken.write_bytes(data)
    try:
        found = examined(broken)
    except ElfError:
        return
    assert len(found.sites) <= 1


def test_names_of_the_plugin() -> None:
    assert kind_of("/opt/libnccl-profiler-lanterne.so") == "profiler"
    assert kind_of("/opt/libnccl-profiler.so.1") == "profiler"
    assert kind_of("/opt/libnccl-net.so") is None
    assert kind_of("/opt/libnccl.so.2") == "nccl"

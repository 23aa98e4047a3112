"""A process that maps something broken under a library's name: reported, and the rest goes on."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.stub import Caller, compile_stub

pytestmark = pytest.mark.kernel


def broken(good: bytes) -> dict[str, bytes]:
    """File contents by what is wrong with them."""
    sections = bytearray(good)
    struct.pack_into("<H", sections, 60, 0xFFFF)
    machine = bytearray(good)
    struct.pack_into("<H", machine, 18, 8)  # MIPS
    behind = bytearray(good)
    struct.pack_into("<Q", behind, 40, 1 << 62)
    return {
        "empty of sense": b"\0" * 4096,
        "no ELF": b"#!/bin/sh\nexit 1\n",
        "truncated header": good[:40],
        "truncated": good[: len(good) // 3],
        "huge section count": bytes(sections),
        "other architecture": bytes(machine),
        "sections behind the end": bytes(behind),
    }


def test_each_is_reported_and_the_good_one_attached(either: Any, tmp_path: Path) -> None:
    good = compile_stub(tmp_path / "good", "nccl", enqueue=False)
    contents = broken(good.read_bytes())
    with Caller(good) as caller, either.attacher(tmp_path) as attacher:
        for index, content in enumerate(contents.values()):
            path = tmp_path / f"bad{index}" / "libnccl.so.2"
            path.parent.mkdir()
            path.write_bytes(content)
            caller.map_file(path)
        scan = attacher.scan()
        states = {library.path: library.state for library in scan.new_libraries}
        assert states.pop(str(good)) == "attached"
        assert set(states.values()) == {"failed"}
        assert len(states) == len(contents) == len(scan.failed)
        for library in scan.new_libraries:
            assert (library.state == "failed") == bool(library.error)
        caller.call("call_all_gather", 3, 0x5550)
        assert len(either.records(caller.pid)) == 3
        assert not attacher.scan().failed  # not again at every scan


def test_file_replaced_by_a_fifo_or_a_dangling_link(either: Any, tmp_path: Path) -> None:
    """The process keeps its inode; what lies at the path now must not make the agent hang."""
    first = compile_stub(tmp_path / "a", "nccl", enqueue=False)
    second = compile_stub(tmp_path / "b", "nccl", enqueue=False)
    with Caller(first) as one, Caller(second) as two, either.attacher(tmp_path) as attacher:
        first.unlink()
        os.mkfifo(first)
        second.unlink()
        second.symlink_to(tmp_path / "nowhere")
        scan = attacher.scan()
        assert {library.state for library in scan.new_libraries} == {"attached"}
        for caller in (one, two):
            caller.call("call_all_gather", 1, 0x5550)
            # Reading for one drops the other's record: ask in the order of the calls.
            assert len(either.records(caller.pid)) == 1


def test_library_without_known_functions(either: Any, tmp_path: Path) -> None:
    path = compile_stub(tmp_path / "lib", "cuda")
    renamed = path.with_name("libnccl.so.2")
    path.rename(renamed)
    with Caller(renamed), either.attacher(tmp_path) as attacher:
        (library,) = attacher.scan().new_libraries
        assert library.state == "nothing_to_probe"
        assert library.error

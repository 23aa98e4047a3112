"""Parsing /proc, and scans of a made-up one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lanterne.agent.discover import (
    Discovery,
    Mapped,
    kind_of,
    other_files,
    parse_maps,
    parse_stat,
    wanted,
)

MAPS = b"""\
55d0-55d1 r--p 00000000 fd:01 100 /usr/bin/python3.11
7f00-7f01 r--p 00000000 fd:01 7001 /opt/a dir/libnccl.so.2
7f01-7f02 r-xp 00001000 fd:01 7001 /opt/a dir/libnccl.so.2
7f03-7f04 r-xp 00001000 fd:01 7002 /tmp/libcuda.so.1 (deleted)
7f05-7f06 rw-p 00000000 00:00 0
7f07-7f08 rw-p 00000000 00:00 0 [heap]
7f09-7f0a r-xp 00000000 zz:01 7003 /x/libtorch_cpu.so
garbage libnccl.so.2
7f0b-7f0c r-xp 00000000 fd:01 7004 /x/libnccl-net.so
7ffc-7ffd r-xp 00000000 103:1a 7005 /x/libtorch_cpu.so
"""
STAT = b"42 (a) b (c)) S 1 " + b" ".join(str(i).encode() for i in range(5, 53))


def test_maps() -> None:
    nccl, cuda, gloo = parse_maps(MAPS)
    assert (nccl.kind, nccl.path, nccl.range) == ("nccl", "/opt/a dir/libnccl.so.2", "7f00-7f01")
    assert nccl.key == (os.makedev(0xFD, 1), 7001)
    assert (cuda.kind, cuda.path, cuda.deleted) == ("cuda", "/tmp/libcuda.so.1", True)
    assert gloo.key == (os.makedev(0x103, 0x1A), 7005)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/x/libnccl.so.2", "nccl"),
        ("/x/libnccl.so.2.28.9", "nccl"),
        ("/x/libnccl-2.28.so", "nccl"),
        ("/x/librccl.so.1", "nccl"),
        ("/x/libtorch_cpu.so", "gloo"),
        ("/x/libcuda.so.550.163.01", "cuda"),
        ("/x/libcudart.so.12", None),
        ("/x/libnccl-net.so", None),
        ("/x/libnccl-profiler-x.so", "profiler"),
        ("/x/libnccl_ep.so", "nccl_ep"),
        ("/x/libtorch_cuda.so", None),
        ("/x/mylibnccl.so.2", None),
    ],
)
def test_kinds(path: str, kind: str | None) -> None:
    assert kind_of(path) == kind


def test_start_and_size_behind_a_name_with_brackets() -> None:
    assert parse_stat(STAT) == (22, 23, 28)


def test_candidate_in_the_last_line_and_twice_in_one() -> None:
    (found,) = parse_maps(b"1-2 r-xp 0 fd:01 8 /x\n3-4 r-xp 0 fd:01 9 /x/libnccl/libnccl.so.2")
    assert (found.path, found.range) == ("/x/libnccl/libnccl.so.2", "3-4")
    assert not parse_maps(b"3-4 r-xp 0 fd:01 9 /x/libnccl/other")


def test_globs() -> None:
    assert wanted("/a/libnccl.so.2", (), ())
    assert wanted("/a/libnccl.so.2", ("/a/*",), ())
    assert not wanted("/b/libnccl.so.2", ("/a/*",), ())
    assert not wanted("/a/libnccl.so.2", ("/a/*",), ("*/libnccl*",))


def make(
    proc: Path, pid: int, maps: bytes, start: int = 22, size: int | None = None, stack: int = 28
) -> None:
    """A process whose address space is as large as its maps are long, unless ``size`` says."""
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "maps").write_bytes(maps)
    fields = [str(i) for i in range(4, 53)]
    fields[18], fields[19] = str(start), str(4096 + len(maps) if size is None else size)
    fields[24] = str(stack)
    (folder / "stat").write_text(f"{pid} (x y) S " + " ".join(fields))


def test_scans(tmp_path: Path) -> None:
    make(tmp_path, 10, MAPS)
    make(tmp_path, 11, b"")
    (tmp_path / "12").mkdir()  # has vanished: no stat
    (tmp_path / "self").mkdir()
    discovery = Discovery(tmp_path, (), ())
    found = discovery.scan()
    assert set(found.processes) == {10}
    assert found.gone == ()
    make(tmp_path, 11, MAPS)  # opened later
    assert set(discovery.scan().processes) == {10, 11}
    make(tmp_path, 11, b"", start=99)  # another process with the number
    found = discovery.scan()
    assert found.gone == (11,)
    assert set(found.processes) == {10}
    (tmp_path / "10" / "stat").unlink()
    found = discovery.scan()
    assert found.gone == (10,)
    assert not found.processes


def test_exec_ends_what_was_there(tmp_path: Path) -> None:
    """Pid and start stay; the stack moves. Where it cannot be read, nothing is concluded."""
    make(tmp_path, 10, MAPS)
    discovery = Discovery(tmp_path, (), ())
    discovery.scan()
    make(tmp_path, 10, MAPS, stack=4711)
    found = discovery.scan()
    assert found.gone == (10,)
    assert set(found.processes) == {10}
    make(tmp_path, 10, MAPS, stack=0)
    assert discovery.scan().gone == ()
    make(tmp_path, 10, MAPS, stack=4711)
    assert discovery.scan().gone == ()


def test_exec_of_a_process_without_libraries_ends_nothing(tmp_path: Path) -> None:
    """A child seen between fork and exec: its program may have made its first calls already."""
    make(tmp_path, 10, b"")
    discovery = Discovery(tmp_path, (), ())
    discovery.scan()
    make(tmp_path, 10, MAPS, stack=4711)
    found = discovery.scan()
    assert found.gone == ()
    assert set(found.processes) == {10}


CUDA = b"7f03-7f04 r-xp 00001000 fd:01 7002 /x/libcuda.so.1\n"
OTHERS = b"""\
1-2 r-xp 00000000 fd:01 1 /opt/program
3-4 r--p 00000000 fd:01 2 /opt/data.so
5-6 r-xp 00001000 fd:01 3 /opt/a b/libtorch_cuda.so (deleted)
7-8 r-xp 00001000 fd:01 3 /opt/a b/libtorch_cuda.so (deleted)
9-a rwxs 00000000 00:05 4 /dev/nvidia0
b-c r-xs 00000000 00:05 5 /dev/nvidiactl
d-e r-xp 00000000 00:00 0 [vdso]
f-10 r-xp 00000000 fd:01 6 /opt/nccl/libnccl.so.2
"""


def test_other_files_of_a_process_with_a_gpu() -> None:
    hinted, program = other_files(OTHERS + CUDA)
    assert (hinted.path, hinted.deleted, hinted.range) == ("/opt/a b/libtorch_cuda.so", True, "5-6")
    assert (program.path, program.kind) == ("/opt/program", "nccl")
    assert [one.path for one in other_files(OTHERS)] == ["/opt/a b/libtorch_cuda.so"]
    assert not other_files(b"1-2 r-xp 00000000 fd:01 1 /opt/program\n")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("program",), ["/opt/program"]),
        (("prog*", "libtorch_cud[aA].so"), ["/opt/a b/libtorch_cuda.so", "/opt/program"]),
        (("*",), ["/opt/a b/libtorch_cuda.so", "/opt/program"]),
        (("gram",), []),  # of whole names
        (("/opt/*",), []),  # without their folders
        ((), []),
    ],
)
def test_names_to_look_into(patterns: tuple[str, ...], expected: list[str]) -> None:
    """Without a GPU driver in the process only these are looked into."""
    assert sorted(one.path for one in other_files(OTHERS, patterns)) == expected


def test_what_is_not_looked_into_yet_is_asked_about_again(tmp_path: Path) -> None:
    make(tmp_path, 10, OTHERS + CUDA)
    answers: dict[str, str | None] = {"/opt/program": None, "/opt/a b/libtorch_cuda.so": ""}
    asked: list[str] = []

    def holds(pid: int, mapped: Mapped) -> str | None:
        assert pid == 10
        asked.append(mapped.path)
        return answers[mapped.path]

    discovery = Discovery(tmp_path, (), (), holds)

    def kinds() -> list[str]:
        _, mapped = discovery.scan().processes[10]
        return [one.path for one in mapped]

    named = ["/x/libcuda.so.1", "/opt/nccl/libnccl.so.2"]
    assert sorted(kinds()) == sorted(named)
    assert asked == ["/opt/a b/libtorch_cuda.so", "/opt/program"]
    answers["/opt/program"] = "torch"
    assert sorted(kinds()) == sorted([*named, "/opt/program"])
    assert asked[2:] == ["/opt/program"]
    _, mapped = discovery.scan().processes[10]
    assert {one.path: one.kind for one in mapped}["/opt/program"] == "torch"
    assert len(asked) == 3


def test_no_proc_at_all(tmp_path: Path) -> None:
    assert not Discovery(tmp_path / "none", (), ()).scan().processes


def test_quiet_processes_are_read_again_in_turns(tmp_path: Path) -> None:
    for pid in range(100, 160):
        make(tmp_path, pid, b"1-2 r-xp 0 fd:01 1 /bin/sleep\n")
    discovery = Discovery(tmp_path, (), ())
    for _ in range(40):
        discovery.scan()
    make(tmp_path, 130, MAPS)
    assert any(discovery.scan().processes for _ in range(8))


class Reads:
    """Counts what is read below one /proc, through the names of the files that were opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        opened = os.open

        def counted(path: str, *arguments: int) -> int:
            self.paths.append(path)
            return opened(path, *arguments)

        monkeypatch.setattr(os, "open", counted)

    def take(self, name: str) -> int:
        """Files of this name since the last call."""
        found = sum(path.endswith("/" + name) for path in self.paths)
        self.paths.clear()
        return found


def test_maps_are_read_again_when_the_size_changes_or_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 10, MAPS, size=5000)
    discovery, reads = Discovery(tmp_path, (), ()), Reads(monkeypatch)
    discovery.scan()
    assert reads.take("maps") == 1
    for _ in range(30):
        assert set(discovery.scan().processes) == {10}
        assert reads.take("maps") == 0
    discovery.scan()
    assert reads.take("maps") == 1
    make(tmp_path, 10, b"", size=5001)
    assert not discovery.scan().processes
    assert reads.take("maps") == 1


def test_kernel_threads_are_left_alone_but_not_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in range(100, 160):
        make(tmp_path, pid, b"", size=0)
    discovery, reads = Discovery(tmp_path, (), ()), Reads(monkeypatch)
    assert not discovery.scan().processes
    assert reads.take("stat") == 60
    for _ in range(10):
        discovery.scan()
        assert reads.take("stat") <= 16
        assert reads.take("maps") == 0
    make(tmp_path, 130, MAPS)  # the number is a process's now
    assert any(discovery.scan().processes for _ in range(5))
    assert set(discovery.scan().processes) == {130}


def test_process_whose_main_thread_has_ended_is_not_gone(tmp_path: Path) -> None:
    make(tmp_path, 10, MAPS)
    discovery = Discovery(tmp_path, (), ())
    discovery.scan()
    make(tmp_path, 10, b"", size=0)
    assert discovery.scan().gone == ()

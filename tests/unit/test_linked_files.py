"""What is looked for in files that are no NCCL by name: bounded, remembered, not to be harmed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lanterne.agent import linked
from lanterne.agent.discover import Mapped
from lanterne.agent.linked import Linked
from lanterne.probes import splits
from lanterne.probes.catalog import Library

BOTH = "int pncclGroupEnd(void){return 0;} int pncclAllReduce(void){return 0;}"


def compiled(path: Path, text: str, *flags: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(text)
    subprocess.run(["gcc", "-w", "-fPIC", "-o", str(path), str(source), *flags], check=True)
    return path


def mapped(proc: Path, path: Path, pid: int = 7) -> Mapped:
    """As a process with this number would map it."""
    root = proc / str(pid) / "root"
    root.parent.mkdir(parents=True, exist_ok=True)
    if not root.exists():
        root.symlink_to("/")
    status = path.stat()
    return Mapped((status.st_dev, status.st_ino), "nccl", str(path), "1-2", False)


def kind(proc: Path, path: Path) -> str | None:
    looker = Linked(proc)
    looker.begin()
    return looker.holds(7, mapped(proc, path))


def holds(proc: Path, path: Path) -> bool:
    return kind(proc, path) == "nccl"


VERSION = 'const char version[] = "NCCL version 2.28.9+cuda12.9";'
KERNELS = '__attribute__((section(".nv_fatbin"))) int kernels[4] = {1};'
CALLER = "int ncclGroupEnd(void); int g(void){return ncclGroupEnd();}"
ADVICE = 'const char advice[] = "needs NCCL version 2.17.1 or later";'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VERSION + KERNELS, True),
        (VERSION, False),  # a tool that prints it
        (KERNELS + ADVICE, False),
        (VERSION + KERNELS + CALLER, False),  # its libnccl is another file
    ],
)
def test_a_copy_without_symbols(tmp_path: Path, text: str, expected: bool) -> None:
    path = compiled(tmp_path / "lib/x.so", text, "-shared", "-s", "-fvisibility=hidden")
    assert holds(tmp_path, path) is expected


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (BOTH, ("-shared",), True),
        (BOTH, ("-shared", "-s"), True),
        (BOTH, ("-shared", "-fvisibility=hidden"), True),
        (BOTH, ("-shared", "-fvisibility=hidden", "-s"), False),
        (BOTH + "int main(void){return 0;}", (), True),
        (BOTH + "int main(void){return 0;}", ("-static",), True),
        ("int pncclGroupEnd(void){return 0;}", ("-shared",), False),
        ("int pncclGroupEnd(void); int f(void){return pncclGroupEnd();}", ("-shared",), False),
        ('const char *f(void){return "pncclGroupEnd";}', ("-shared",), False),
    ],
)
def test_defined_names_decide(
    tmp_path: Path, text: str, flags: tuple[str, ...], expected: bool
) -> None:
    assert holds(tmp_path, compiled(tmp_path / "lib/x.so", text, *flags)) is expected


def test_broken_files_are_no_library(tmp_path: Path) -> None:
    good = compiled(tmp_path / "lib/x.so", BOTH, "-shared").read_bytes()
    sections_at = int.from_bytes(good[40:48], "little")
    broken = {
        "empty": b"",
        "short": good[:40],
        "no sections": good[:sections_at],
        "headers at the end of the world": good[:40] + b"\xff" * 8 + good[48:],
        "32 bit": good[:4] + b"\x01" + good[5:],
        "many": good[:60] + b"\xff\xff" + good[62:],
        "every size is huge": good[:sections_at]
        + good[sections_at:].replace(b"\0" * 8, b"\xff" * 7 + b"\0"),
    }
    for name, content in broken.items():
        path = tmp_path / "broken"
        path.write_bytes(content)
        assert holds(tmp_path, path) is False, name


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert holds(tmp_path, tmp_path / "fifo") is False


def test_each_inode_is_looked_at_once_and_a_scan_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linked, "MAX_FILES", 2)
    files = [compiled(tmp_path / f"lib/{n}.so", BOTH, "-shared") for n in range(3)]
    looker = Linked(tmp_path)
    looker.begin()
    views = [mapped(tmp_path, path) for path in files]
    assert [looker.holds(7, view) for view in views] == ["nccl", "nccl", None]
    looker.begin()
    assert [looker.holds(7, view) for view in views] == ["nccl"] * 3
    for path in files:
        path.unlink()
    assert [looker.holds(8, view) for view in views] == ["nccl"] * 3, "remembered"


def test_another_file_at_the_path_is_not_taken_for_it(tmp_path: Path) -> None:
    path = compiled(tmp_path / "lib/x.so", BOTH, "-shared")
    view = mapped(tmp_path, path)
    compiled(tmp_path / "lib/y.so", BOTH, "-shared").replace(path)
    looker = Linked(tmp_path)
    looker.begin()
    assert looker.holds(7, view) == ""


SPLITS = f"""
#define NAME __asm__("{splits.symbols(Library.TORCH)[1]}")
int all_to_all(void) NAME;
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALLER + SPLITS + "int all_to_all(void) { return g(); }", "torch"),
        (SPLITS + "int all_to_all(void) { return 0; }", ""),  # calls no NCCL
        (CALLER + SPLITS + "int f(void) { return all_to_all(); }", ""),  # another library's
        (BOTH + CALLER + SPLITS + "int all_to_all(void) { return g(); }", "nccl"),
    ],
)
def test_process_groups_that_call_nccl(tmp_path: Path, text: str, expected: str) -> None:
    assert kind(tmp_path, compiled(tmp_path / "lib/x.so", text, "-shared")) == expected

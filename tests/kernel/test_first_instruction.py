"""What the kernel does with the instruction at a probe: emulates it, or single-steps it elsewhere.

Shown by the kernel itself: a process has a "[uprobes]" mapping from the first instruction that
was stepped out of line in it, and none as long as all were emulated.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lanterne.agent import bpf, code
from lanterne.agent.attach import Attacher
from lanterne.probes.catalog import Library
from lanterne.probes.layout import CommKind
from tests.kernel.stub import NAMES, Caller, source

pytestmark = pytest.mark.kernel

# Name: (the function's text, whether it is stepped: None where kernels differ or may refuse it).
# Each returns 42.
BODIES = {
    "x86_64": {
        "push": ("push %rbp; mov $42, %eax; pop %rbp; ret", False),
        "push_r15": ("push %r15; mov $42, %eax; pop %r15; ret", False),
        "jump": ("jmp 1f; ud2; 1: mov $42, %eax; ret", False),
        "sub": ("sub $8, %rsp; mov $42, %eax; add $8, %rsp; ret", True),
        "move": ("mov $42, %eax; ret", True),
        "endbr": ("endbr64; mov $42, %eax; ret", True),
        "nop": ("nop; mov $42, %eax; ret", False),
        "nop5": ("nopl 0(%rax,%rax,1); mov $42, %eax; ret", None),
    },
    "aarch64": {
        "stp": ("stp x29, x30, [sp, #-16]!; mov w0, 42; ldp x29, x30, [sp], #16; ret", None),
        "sub": ("sub sp, sp, #16; mov w0, 42; add sp, sp, #16; ret", True),
        "move": ("mov w0, 42; ret", True),
        "paciasp": ("paciasp; mov w0, 42; autiasp; ret", True),
        "bti": ("bti c; mov w0, 42; ret", True),
        "nop": ("nop; mov w0, 42; ret", None),
        "branch": ("b 1f; brk 1; 1: mov w0, 42; ret", False),
        "compare": ("cbz xzr, 1f; brk 1; 1: mov w0, 42; ret", False),
        "test": ("tbz xzr, #3, 1f; brk 1; 1: mov w0, 42; ret", False),
        "adrp": ("adrp x1, 1f; 1: mov w0, 42; ret", False),
        "literal": ("ldr w0, 1f; ret; 1: .word 42", None),
    },
}[platform.machine()]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("instructions")
    text = folder / "bodies.S"
    extensions = ".arch armv8.5-a\n" if platform.machine() == "aarch64" else ""
    text.write_text(extensions + "".join(
        f".text\n.balign 64\n.globl {name}\n.type {name}, %function\n{name}:\n"
        + "\n".join(part.strip() for part in body.split(";"))
        + f"\n.size {name}, .-{name}\n"
        for name, (body, _) in BODIES.items()
    ) + '.section .note.GNU-stack,"",%progbits\n')  # fmt: skip
    target = folder / "libbodies.so"
    subprocess.run(["gcc", "-shared", "-o", str(target), str(text)], check=True, timeout=60)
    return target


@pytest.fixture
def probe() -> Iterator[Callable[[Path, int], None]]:
    """Places an empty program at a file offset, by a perf event."""
    folder = Path("/sys/bus/event_source/devices/uprobe")
    if not folder.exists():
        pytest.skip("this kernel has no uprobe perf event")
    fds = [bpf.load_empty()]

    def place(path: Path, offset: int) -> None:
        fds.append(bpf.open_uprobe(int((folder / "type").read_text()), 0, str(path), offset))
        fds.append(bpf.link_perf_event(fds[0], fds[-1], 1))

    yield place
    for fd in reversed(fds):
        os.close(fd)


def offset_of(library: Path, name: str) -> int:
    """Of a function: the text segment of a library this small has file offset = address."""
    text = subprocess.check_output(["nm", str(library)], text=True)
    return next(int(line.split()[0], 16) for line in text.splitlines() if line.endswith(f" {name}"))


@pytest.mark.parametrize("name", BODIES)
def test_instruction(name: str, library: Path, probe: Callable[[Path, int], None]) -> None:
    offset = offset_of(library, name)
    place = code.choose_site(library.read_bytes()[offset : offset + 32], offset)
    with Caller(library) as caller:
        try:
            probe(library, offset)
        except OSError:
            assert BODIES[name][1] is None
            print(f"{name}: refused")
            return
        assert caller.call(name) == 42
        stepped = "[uprobes]" in Path(f"/proc/{caller.pid}/maps").read_text()
    print(f"{name}: {'single-stepped' if stepped else 'emulated'}")
    expected = BODIES[name][1]
    assert expected is None or stepped == expected
    if place.cheap and place.skip == 0:
        assert not stepped, f"{place.instruction}: said to be emulated"


def test_functions_with_landing_pads(either: Any, tmp_path: Path) -> None:
    """Branch protection: endbr64 on x86-64; bti and signed return addresses on aarch64, where a
    return probe must replace the address before it is signed."""
    protection = {
        "x86_64": "-fcf-protection=full",
        "aarch64": "-mbranch-protection=standard",
    }[platform.machine()]
    text, target = tmp_path / "stub.c", tmp_path / NAMES["nccl"]
    text.write_text(source(Library.NCCL, enqueue=False))
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-w", protection, "-o", str(target), str(text)],
        check=True, timeout=60,
    )  # fmt: skip
    with Caller(target) as caller, Attacher(either.programs, include=[f"{tmp_path}/*"]) as attacher:
        (found,) = attacher.scan().new_libraries
        assert found.state == "attached", found.error
        either.events(caller.pid)
        slot = caller.memory(bytes(8))
        for rank in range(3):
            assert caller.call("pncclCommInitRank", slot, 16, "ab" * 128, rank, 0) == 0
        assert caller.call("pncclGroupEnd") == 0
        events = either.events(caller.pid)
    assert events["kind"].tolist() == [CommKind.INIT] * 3
    assert events["rank"].tolist() == [0, 1, 2]
    assert {bytes(one) for one in events["id"]} == {b"\xab" * 128}

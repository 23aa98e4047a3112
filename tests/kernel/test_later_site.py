"""Probes behind a first instruction that the kernel would single-step: what is read there is what
is read at the entry."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lanterne.agent import library
from lanterne.agent.library import AttachedLibrary
from lanterne.agent.links import Closer, Links
from lanterne.probes.catalog import Library
from tests.kernel.conftest import Loaded
from tests.kernel.stub import NAMES, Caller, source

pytestmark = pytest.mark.kernel

CALLS = [f"pnccl{name}" for name in
         ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "Send", "Recv")
        ]  # fmt: skip
# No two arguments are alike, and none has only zeros above its 32 bits.
ARGUMENTS = [(17 + 13 * place) | (place + 1) << 33 for place in range(8)]
SAME = ("comm", "count", "stream", "seq", "peer", "func", "dtype", "flags", "rc")


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """A libnccl whose functions all begin with a landing pad."""
    text, target = tmp_path / "stub.c", tmp_path / NAMES["nccl"]
    text.write_text(source(Library.NCCL, enqueue=False))
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O0", "-fcf-protection=branch", "-w", "-o", str(target),
         str(text)], check=True, timeout=60,
    )  # fmt: skip
    return target


def examined(target: Path) -> AttachedLibrary:
    with target.open("rb") as file:
        return library.examine(file.fileno(), "nccl", str(target), str(target))


@contextmanager
def placed(loaded: Loaded, target: Path, *, at_entry: bool) -> Iterator[None]:
    sites = [
        replace(site, offset=site.offset - site.skip) if at_entry else site
        for site in examined(target).sites
    ]
    closer = Closer()
    links = Links(loaded.programs, closer)
    links.add(str(target), sites)
    try:
        yield
    finally:
        links.close()
        closer.wait(30)


def called(loaded: Loaded, target: Path, *, at_entry: bool) -> tuple[np.ndarray, bool]:
    """-> (what was read, whether an instruction was single-stepped)."""
    with Caller(target) as caller, placed(loaded, target, at_entry=at_entry):
        loaded.ring.drain(1 << 20)
        for symbol in CALLS:
            caller.call(symbol, *ARGUMENTS)
        stepped = "[uprobes]" in Path(f"/proc/{caller.pid}/maps").read_text()
        return loaded.records(caller.pid)[list(SAME)], stepped


@pytest.mark.skipif(platform.machine() != "x86_64", reason="on aarch64 probes stay at the entry")
@pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)
def test_arguments_are_those_at_the_entry(loaded: Any, padded: Path) -> None:
    sites = {site.symbol: site for site in examined(padded).sites}
    assert {sites[symbol].skip for symbol in CALLS} == {4}  # endbr64
    assert all(sites[symbol].cheap for symbol in CALLS)
    later, stepped_later = called(loaded, padded, at_entry=False)
    first, stepped_first = called(loaded, padded, at_entry=True)
    assert len(first) == len(CALLS)
    assert later.tolist() == first.tolist()
    assert stepped_first
    assert not stepped_later


# Literals are 8 bytes behind each function. Only the first one's may be passed over.
LITERALS = """
.text
.macro literal name, register
.balign 16
.globl \\name
.type \\name, %function
\\name:
    ldr \\register, 1f
    mov w0, 0
    ret
    nop
1:  .quad 0
.size \\name, . - \\name
.endm
literal pncclAllReduce, x16
literal pncclBroadcast, x0
literal pncclGroupStart, x17
literal pncclGroupEnd, x17
.section .note.GNU-stack,"",%progbits
"""


@pytest.mark.skipif(platform.machine() != "aarch64", reason="instructions of aarch64")
@pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)
def test_a_literal_costs_one_function_at_most(loaded: Any, tmp_path: Path) -> None:
    """The kernel takes no probe at such an instruction, and one of them would fail them all."""
    text, target = tmp_path / "literals.S", tmp_path / NAMES["nccl"]
    text.write_text(LITERALS)
    subprocess.run(["gcc", "-shared", "-o", str(target), str(text)], check=True, timeout=60)
    with Caller(target) as caller, loaded.attacher(tmp_path) as attacher:
        (found,) = attacher.scan().new_libraries
        assert found.state == "attached", found.error
        (dropped,) = found.dropped
        assert "pncclBroadcast" in dropped
        assert {site.skip for site in found.sites} == {4}
        loaded.ring.drain(1 << 20)
        caller.call("pncclAllReduce", *ARGUMENTS)
        (record,) = loaded.records(caller.pid)
        assert (record["comm"], record["count"]) == (ARGUMENTS[5], ARGUMENTS[2])

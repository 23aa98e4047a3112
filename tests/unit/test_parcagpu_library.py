"""The stand-in for parcagpu's library, as the agent examines it: where the arguments are."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from lanterne.agent import library, usdt
from lanterne.agent.discover import kind_of, parse_maps
from lanterne.agent.elf import ElfFile
from lanterne.agent.errors import ElfError
from lanterne.agent.usdt import Probe
from lanterne.probes.catalog import Source
from lanterne.probes.rows import SourceKind
from tests.parcagpu.build import build

WORD, MEMORY, CONSTANT = SourceKind.WORD, SourceKind.WORD_MEMORY, SourceKind.CONSTANT


def examined(path: Path) -> library.AttachedLibrary:
    fd = os.open(path, os.O_RDONLY)
    try:
        return library.examine(fd, "parcagpu", str(path), str(path))
    finally:
        os.close(fd)


@pytest.mark.parametrize("flags", [("-O2",), ("-O0",), ("-O3", "-fomit-frame-pointer")])
def test_both_probes_of_every_build(flags: tuple[str, ...]) -> None:
    found = examined(build(flags=flags))
    assert (found.state, found.error, found.kind) == ("attached", "", "parcagpu")
    symbols = [site.what.symbol for site in found.sites]
    assert symbols == ["parcagpu:cuda_correlation", "parcagpu:kernel_executed"]
    assert all(site.semaphore and site.cheap for site in found.sites)
    assert len({site.semaphore for site in found.sites}) == 2
    assert [len(site.what.fields) for site in found.sites] == [0, 8]


def test_another_provider_has_no_probes() -> None:
    found = examined(build(provider="somebody"))
    assert found.state == "nothing_to_probe"
    assert "has no probes cuda_correlation and kernel_executed" in found.error


def test_one_probe_alone_is_none(tmp_path: Path) -> None:
    """Without cuda_correlation the library tells nothing, and nothing could be checked."""
    other = tmp_path / "libparcagpucupti.so"
    data = build().read_bytes()
    other.write_bytes(data.replace(b"parcagpu\0cuda_correlation", b"parcagpu\0cuda_corrElation"))
    assert examined(other).state == "nothing_to_probe"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="operands of the notes are x86-64's")
def test_arguments_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    data = build().read_bytes()
    good, scaled = b"8@(%rdi) 8@8(%rdi)", b"8@(%rdi,%rax,8) 8@"
    assert data.count(good) == 1
    other = tmp_path / "libparcagpucupti.so"
    other.write_bytes(data.replace(good, scaled))
    with pytest.raises(ElfError, match=r"argument 8@\(%rdi,%rax,8\) of kernel_executed cannot be"):
        examined(other)


class Machine(ElfFile):
    def __init__(self, architecture: str) -> None:
        self.path = "lib.so"
        self._architecture = architecture

    @property
    def architecture(self) -> str:  # type: ignore[override]
        return self._architecture


def parsed(architecture: str, text: str) -> list[Source]:
    return usdt.operands(Machine(architecture), Probe("p", 0, 0, 0, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8@%rdi", Source(WORD, 14, 8)),
        ("8@%r15", Source(WORD, 0, 8)),
        ("4@%edi", Source(WORD, 14, 4)),
        ("4@%r8d", Source(WORD, 9, 4)),
        ("-4@%eax", Source(WORD, 10, 4)),
        ("2@%ax", Source(WORD, 10, 2)),
        ("1@%al", Source(WORD, 10, 1)),
        ("1@%r10b", Source(WORD, 7, 1)),
        ("1@%sil", Source(WORD, 13, 1)),
        ("8@%rsp", Source(WORD, 19, 8)),
        ("8@(%rbx)", Source(MEMORY, 5, 8, 0)),
        ("4@24(%rbx)", Source(MEMORY, 5, 4, 24)),
        ("4@-20(%rbp)", Source(MEMORY, 4, 4, -20)),
        ("8@$0", Source(CONSTANT, 0, 8, 0)),
        ("-4@$-5", Source(CONSTANT, 0, 4, -5)),
    ],
)
def test_operands_on_x86(text: str, expected: Source) -> None:
    assert parsed("x86_64", text) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8@x0", Source(WORD, 0, 8)),
        ("4@w21", Source(WORD, 21, 4)),
        ("8@sp", Source(WORD, 31, 8)),
        ("8@[x19]", Source(MEMORY, 19, 8, 0)),
        ("8@[x19, 16]", Source(MEMORY, 19, 8, 16)),
        ("4@[sp, 44]", Source(MEMORY, 31, 4, 44)),
        ("4@[x29, -8]", Source(MEMORY, 29, 4, -8)),
        ("4@5", Source(CONSTANT, 0, 4, 5)),
    ],
)
def test_operands_on_arm(text: str, expected: Source) -> None:
    assert parsed("aarch64", text) == [expected]


def test_all_arguments_of_one_note() -> None:
    text = "8@[x19, 16] 8@[x19, 24] 4@[x19, 92] 4@w2 4@w3 4@[sp, 4] 8@x5 8@[x19, 104]"
    assert [s.kind for s in parsed("aarch64", text)] == [MEMORY] * 3 + [WORD] * 2 + [
        MEMORY, WORD, MEMORY,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        ("x86_64", "8@foo(%rip)"),
        ("x86_64", "8@(%rax,%rbx,8)"),
        ("x86_64", "8@%xmm0"),
        ("x86_64", "8@$99999999999"),
        ("x86_64", "3@%rax"),
        ("x86_64", "8@-(%rax)"),
        ("x86_64", "8@rax"),
        ("x86_64", "8@x0"),
        ("aarch64", "8@[x1, x2]"),
        ("aarch64", "8@d0"),
        ("aarch64", "8@x31"),
        ("aarch64", "8@%rdi"),
    ],
)
def test_other_operands_are_refused(architecture: str, text: str) -> None:
    with pytest.raises(ElfError, match="cannot be read"):
        parsed(architecture, text)


def test_found_in_maps() -> None:
    path = "/opt/parca/libparcagpucupti.so"
    line = f"7f00-7f01 r-xp 0000 08:01 77 {path}\n".encode()
    (mapped,) = parse_maps(line)
    assert (mapped.kind, mapped.path) == ("parcagpu", path)
    assert kind_of("/usr/lib/libparcagpucupti-0.9.so.1") == "parcagpu"
    assert kind_of("/usr/lib/libparca.so") is None

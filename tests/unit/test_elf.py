"""ELF files, good, broken and made to harm."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanterne.agent import code, elf, libnccl
from lanterne.agent.elf import ElfFile
from lanterne.agent.errors import ElfError
from lanterne.agent.library import examine
from lanterne.agent.symbols import code_of, functions

SOURCE = """
const char banner[] = "NCCL version 2.28.9+cuda12.9";
struct comm { char before[0x1044d0]; int rank, ranks, device; };
int pncclCommUserRank(struct comm *c, int *out) { *out = c->rank; return 0; }
int pncclCommCount(struct comm *c, int *out) { *out = c->ranks; return 0; }
int pncclCommCuDevice(struct comm *c, int *out) { *out = c->device; return 0; }
int pncclAllReduce(void) { return 0; }
int ncclAllReduce(void) __attribute__((weak, alias("pncclAllReduce")));
static __attribute__((used, noinline)) int check(void) __asm__("_Z16ncclEnqueueCheckP8ncclInfo");
static int check(void) { return 3; }
int data_not_code = 1;
"""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 machine code")


def build(folder: Path, source: str, *flags: str) -> Path:
    text, target = folder / "lib.c", folder / "libnccl.so.2"
    text.write_text(source)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-Wl,--build-id", *flags, "-o", target, text],
        check=True,
        timeout=60,
    )
    return target


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("elf"), SOURCE)


@pytest.fixture(scope="module")
def stripped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only .dynsym: in other files a name may also be found in .symtab."""
    return build(tmp_path_factory.mktemp("stripped"), SOURCE, "-s")


def opened(path: Path) -> ElfFile:
    return ElfFile(elf.open_regular(path), str(path))


def test_symbols(library: Path) -> None:
    file = opened(library)
    wanted = {"pncclAllReduce", "AllReduce", "ncclAllReduc", "data_not_code"}
    found = functions(file, wanted, {"_Z16ncclEnqueueCheckP8ncclInfo"})
    # Only whole names, and only functions; the local one comes from .symtab.
    assert set(found) == {"pncclAllReduce", "_Z16ncclEnqueueCheckP8ncclInfo"}
    nm = subprocess.check_output(["nm", library], text=True)
    for name, symbol in found.items():
        (line,) = [one for one in nm.splitlines() if one.split()[-1] == name]
        assert symbol.address == int(line.split()[0], 16)
        content = library.read_bytes()[symbol.offset : symbol.offset + symbol.size]
        assert code_of(file, symbol) == content


def test_stripped_library_has_only_exports(stripped: Path) -> None:
    found = functions(opened(stripped), {"pncclAllReduce"}, {"_Z16ncclEnqueueCheckP8ncclInfo"})
    assert set(found) == {"pncclAllReduce"}


def test_build_id(library: Path) -> None:
    text = subprocess.check_output(["readelf", "-n", library], text=True)
    assert f"Build ID: {opened(library).build_id()}\n" in text


def test_version_from_the_banner(library: Path) -> None:
    assert libnccl.version_of(opened(library), {}) == 22809


@pytest.mark.parametrize(
    ("version", "number"), [((2, 28, 9), 22809), ((2, 8, 4), 2804), ((2, 9, 6), 20906)]
)
def test_version_code(version: tuple[int, int, int], number: int) -> None:
    assert libnccl.version_code(*version) == number


def test_offsets_from_the_getters(library: Path) -> None:
    file = opened(library)
    symbols = functions(file, libnccl.GETTERS, ())
    offsets = libnccl.comm_offsets(file, symbols, 22809)
    assert offsets is not None
    assert offsets.rank == 0x1044D0
    assert (offsets.comm_hash, offsets.n_ranks) == (0x1044C8, 0x1044D4)
    assert (offsets.cuda_dev, offsets.bus_id) == (0x1044D8, 0x1044D0 + 32)
    assert (offsets.has_magic, offsets.source) == (True, "getters")
    old = libnccl.comm_offsets(file, symbols, 21803)
    assert old is not None
    assert not old.has_magic


def test_getters_that_disagree_give_nothing(tmp_path: Path) -> None:
    source = SOURCE.replace("int rank, ranks, device;", "int rank, x, ranks, device;")
    file = opened(build(tmp_path, source))
    assert libnccl.comm_offsets(file, functions(file, libnccl.GETTERS, ()), 22809) is None


def patched(good: bytes, at: int, kind: str, value: int) -> bytes:
    content = bytearray(good)
    struct.pack_into(kind, content, at, value)
    return bytes(content)


def section_field(good: bytes, wanted: int, field: int) -> int:
    """File offset of a field of the first section header of a type."""
    start, count = struct.unpack_from("<Q", good, 40)[0], struct.unpack_from("<H", good, 60)[0]
    for index in range(count):
        if struct.unpack_from("<I", good, start + 64 * index + 4)[0] == wanted:
            return int(start + 64 * index + field)
    raise AssertionError(wanted)


def first_section(good: bytes, field: int) -> int:
    return int(struct.unpack_from("<Q", good, 40)[0]) + field


Maker = Callable[[bytes], bytes]
BROKEN: dict[str, tuple[Maker, str]] = {
    "not ELF": (lambda good: b"hello" * 100, "not an ELF file"),
    "empty": (lambda good: b"", "outside the file"),
    "header cut": (lambda good: good[:30], "outside the file"),
    "cut in the middle": (lambda good: good[: len(good) // 2], "outside the file"),
    "32-bit": (lambda good: patched(good, 4, "B", 1), "64-bit"),
    "big-endian": (lambda good: patched(good, 5, "B", 2), "little-endian"),
    "aarch64": (lambda good: patched(good, 18, "<H", 183), "architecture aarch64"),
    "65535 sections": (lambda good: patched(good, 60, "<H", 0xFFFF), "65535 sections"),
    "65534 segments": (lambda good: patched(good, 56, "<H", 0xFFFE), "65534 segments"),
    "more sections than the header can say": (
        lambda good: patched(patched(good, 60, "<H", 0), first_section(good, 32), "<Q", 1 << 60),
        f"{1 << 60} sections",
    ),
    "more segments than the header can say": (
        lambda good: patched(
            patched(good, 56, "<H", 0xFFFF), first_section(good, 44), "<I", 0xFFFFFFFF
        ),
        f"{0xFFFFFFFF} segments",
    ),
    "number of segments nowhere": (
        lambda good: patched(patched(good, 56, "<H", 0xFFFF), 40, "<Q", 0),
        "a section that it has not",
    ),
    "sections far away": (lambda good: patched(good, 40, "<Q", 1 << 63), "outside the file"),
    "no executable segment": (lambda good: patched(good, 56, "<H", 0), "no executable segment"),
    "endless symbols": (
        lambda good: patched(good, section_field(good, 11, 32), "<Q", 1 << 50),
        "symbols",
    ),
    "symbols of size 0": (
        lambda good: patched(good, section_field(good, 11, 56), "<Q", 0),
        "symbols of 0 bytes",
    ),
    "string table nowhere": (
        lambda good: patched(good, section_field(good, 11, 40), "<I", 5000),
        "does not exist",
    ),
    "no symbol table": (
        lambda good: patched(
            patched(good, section_field(good, 11, 4), "<I", 1),
            section_field(good, 2, 4), "<I", 1,
        ),
        "no symbol table",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_file_is_refused_with_the_reason(what: str, library: Path, tmp_path: Path) -> None:
    make, reason = BROKEN[what]
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(make(library.read_bytes()))
    fd = elf.open_regular(path)
    with pytest.raises(ElfError, match=reason):
        examine(fd, "nccl", str(path), str(path))
    os.close(fd)


def test_symbol_outside_the_code_is_left_out(stripped: Path, tmp_path: Path) -> None:
    content = bytearray(stripped.read_bytes())
    start = struct.unpack_from("<Q", content, section_field(bytes(content), 11, 24))[0]
    size = struct.unpack_from("<Q", content, section_field(bytes(content), 11, 32))[0]
    for at in range(start, start + size, 24):
        struct.pack_into("<Q", content, at + 8, 1 << 60)
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(content)
    assert not functions(opened(path), {"pncclAllReduce"}, ())


def test_name_with_two_addresses_is_left_out(stripped: Path, tmp_path: Path) -> None:
    """Overlapping symbols: which one is meant cannot be known."""
    content = bytearray(stripped.read_bytes())
    strings = content.index(b"\0pncclAllReduce\0") + 1
    table = struct.unpack_from("<Q", content, section_field(bytes(content), 11, 24))[0]
    link = struct.unpack_from("<I", content, section_field(bytes(content), 11, 40))[0]
    sections = struct.unpack_from("<Q", content, 40)[0]
    base = struct.unpack_from("<Q", content, sections + 64 * link + 24)[0]
    size = struct.unpack_from("<Q", content, section_field(bytes(content), 11, 32))[0]
    names = [struct.unpack_from("<I", content, at)[0] for at in range(table, table + size, 24)]
    other = content.index(b"\0pncclCommCount\0") + 1 - base
    struct.pack_into("<I", content, table + 24 * names.index(other), strings - base)
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(content)
    assert not functions(opened(path), {"pncclAllReduce"}, ())


def test_fifo_directory_and_dangling_link(tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(tmp_path / "nowhere")
    for path in (fifo, tmp_path, link):
        with pytest.raises(ElfError):
            elf.open_regular(path)


MOST_MEMORY = 32 << 20  # bytes; the file is some 16 kB

damages = st.lists(st.tuples(st.integers(0, 20000), st.binary(min_size=1, max_size=8)), max_size=6)
# Where numbers of headers, sizes and offsets stand: most random damage hits none of them.
headers = st.lists(
    st.tuples(
        st.integers(0, 1 << 12),
        st.sampled_from(
            [b"\0", b"\xff", b"\xff" * 2, b"\xff" * 4, b"\xff" * 8, b"\0" * 8, b"\x7f"]
        ),
    ),
    min_size=1,
    max_size=4,
)


def examined(content: bytes, path: Path) -> None:
    """Raises nothing but ElfError whatever the file holds, and takes little memory for it."""
    path.write_bytes(content)
    fd = elf.open_regular(path)
    said = str(path)
    tracemalloc.start()
    try:
        examine(fd, "nccl", str(path), str(path))
    except ElfError as error:
        said = str(error)
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        os.close(fd)
    assert str(path) in said
    assert most < MOST_MEMORY


fuzz = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@fuzz
@given(damages, st.one_of(st.none(), st.integers(0, 20000)))
def test_damage_never_gets_further_than_an_error(
    library: Path, tmp_path: Path, damage: list[tuple[int, bytes]], cut: int | None
) -> None:
    content = bytearray(library.read_bytes())
    for at, what in damage:
        at %= len(content)
        content[at : at + len(what)] = what
    examined(bytes(content[:cut]), tmp_path / "libnccl.so.2")


@fuzz
@given(headers, st.booleans())
def test_damaged_headers_never_get_further_than_an_error(
    library: Path, tmp_path: Path, damage: list[tuple[int, bytes]], in_sections: bool
) -> None:
    content = bytearray(library.read_bytes())
    (sections,) = struct.unpack_from("<Q", content, 40)
    for at, what in damage:
        at += sections if in_sections else 16
        at = at % (len(content) - 8)
        content[at : at + len(what)] = what
    examined(bytes(content), tmp_path / "libnccl.so.2")


def test_file_that_claims_a_huge_note_costs_nothing(library: Path, tmp_path: Path) -> None:
    """Notes are read by the size that they state: here 4 GB, in a file that has them."""
    content = bytearray(library.read_bytes())
    note = content.index(b"GNU\0", struct.unpack_from("<Q", content, 32)[0]) - 12
    struct.pack_into("<I", content, note + 4, 0xFFFFFFFF)
    path = tmp_path / "libnccl.so.2"
    examined(bytes(content), path)
    os.truncate(path, 8 << 30)
    with path.open("rb") as file:
        tracemalloc.start()
        found = ElfFile(file.fileno(), str(path))
        assert not found.build_id() or len(found.build_id()) == 40
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("hex_code", "skip", "cheap"),
    [
        ("554889e5", 0, True),  # push rbp
        ("4154", 0, True),  # push r12
        ("90c3", 0, True),  # nop
        ("e900000000", 0, True),  # jmp
        ("833d1122334400 7405 ff2500000000", 7, True),  # libcuda: cmp [rip], 0; je
        ("f30f1efa554889e5", 4, True),  # endbr64; push rbp
        ("488b07c3", 0, False),  # mov rax, [rdi]; ret: no emulated one before the end
        ("4889f755", 0, False),  # mov rdi, rsi changes an argument
        ("4883ec1855", 0, False),  # sub rsp changes the stack pointer
        ("48897c240855", 0, False),  # a store to the stack
        ("31c055", 2, True),  # xor eax, eax; push rbp
        ("31d255", 0, False),  # xor edx, edx changes rdx
        ("4531c055", 0, False),  # xor r8d, r8d changes r8
        ("31c09075fd", 2, True),  # jumps back to the nop itself: see below
    ],
)
def test_probe_site(hex_code: str, skip: int, cheap: bool) -> None:
    machine_code = bytes.fromhex(hex_code)
    place = code.choose_site(machine_code, 0x1000, machine="x86_64")
    if hex_code.endswith("75fd"):  # a site that a jump of the function's own reaches counts twice
        skip, cheap = 0, False
    assert (place.skip, place.cheap) == (skip, cheap)
    assert place.instruction


def test_probe_site_elsewhere_is_the_entry() -> None:
    assert code.choose_site(b"\xfd\x7b\xbf\xa9", 0, machine="aarch64").skip == 0


@pytest.mark.parametrize(
    ("hex_code", "offset"),
    [
        ("893789570489 4f08", 0),  # rank, size, base at 0, 4, 8
        ("660fd607897424 0c894f08", 0),  # torch 2.13: rank and size in one store, base at 8
        ("8977088957 0c894f10", 8),  # behind a virtual table
        ("c3", None),
    ],
)
def test_gloo_constructor(hex_code: str, offset: int | None) -> None:
    assert code.gloo_rank_offset(bytes.fromhex(hex_code), 0) == offset

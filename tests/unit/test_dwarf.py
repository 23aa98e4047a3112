"""Offsets of a structure's members from debugging information, also where it is broken."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from lanterne.agent import dwarf
from lanterne.agent.dwarf import member_offsets
from lanterne.agent.elf import ElfFile
from lanterne.agent.errors import ElfError
from lanterne.agent.libnccl import comm_offsets

SOURCE = """
struct other { int rank; };
struct ncclComm {
  unsigned long startMagic; char pad[1000]; unsigned long commHash; int rank, nRanks, cudaDev;
  long busId; unsigned flag : 3;
};
struct other o;
int f(struct ncclComm *c) { return c->rank; }
"""
EXPECTED = {"startMagic": 0, "commHash": 1008, "rank": 1016, "nRanks": 1020, "cudaDev": 1024,
            "busId": 1032}  # fmt: skip


def compiled(folder: Path, *flags: str) -> Path:
    (folder / "x.c").write_text(SOURCE)
    target = folder / "x.so"
    command = ["gcc", "-shared", "-fPIC", *flags, "-o", str(target), str(folder / "x.c")]
    subprocess.run(command, check=True)
    return target


def offsets(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        return member_offsets(ElfFile(file.fileno(), str(path)), "ncclComm")


@pytest.mark.parametrize("flags", [("-g",), ("-gdwarf-4",), ("-gdwarf-5",), ("-g1",), ()])
def test_members(tmp_path: Path, flags: tuple[str, ...]) -> None:
    found = offsets(compiled(tmp_path, *flags))
    if flags in ((), ("-g1",)):
        assert found == {}
    else:
        assert {name: found[name] for name in EXPECTED} == EXPECTED


def test_compressed_information_is_left_alone(tmp_path: Path) -> None:
    """A few bytes may claim to be many when they are unpacked."""
    assert offsets(compiled(tmp_path, "-g", "-gz=zlib")) == {}


def test_third_source(tmp_path: Path) -> None:
    path = compiled(tmp_path, "-g")
    with path.open("rb") as file:
        found = comm_offsets(ElfFile(file.fileno(), str(path)), {}, 22809)
    assert found is not None
    assert (found.comm_hash, found.rank, found.n_ranks) == (1008, 1016, 1020)
    assert (found.cuda_dev, found.bus_id, found.has_magic) == (1024, 1032, True)
    assert found.source == "dwarf"


def test_reading_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dwarf, "MAX_READS", 20)
    with pytest.raises(ElfError, match="more debugging information"):
        offsets(compiled(tmp_path, "-g"))


def test_broken_information_ends_in_an_error_or_in_nothing(tmp_path: Path) -> None:
    path = compiled(tmp_path, "-g")
    whole = path.read_bytes()
    with path.open("rb") as file:
        sections = ElfFile(file.fileno(), str(path)).sections_named(
            (".debug_info", ".debug_abbrev", ".debug_str")
        )
    for seed in range(300):
        content, rng = bytearray(whole), random.Random(seed)
        for section in sections.values():
            for _ in range(rng.randint(1, 8)):
                content[section.offset + rng.randrange(section.size)] = rng.randrange(256)
        path.write_bytes(content)
        assert all(isinstance(value, int) for value in whatever(path).values())


def whatever(path: Path) -> dict[str, int]:
    try:
        return offsets(path)
    except ElfError:
        return {}

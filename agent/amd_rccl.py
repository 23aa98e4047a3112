"""RCCL in a file: its functions under NCCL's names, and the rows by which each call counts once.

What it does otherwise than NCCL, and where that was seen, is told in probes/rccl.py.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from lanterne.probes import rccl
from lanterne.probes.catalog import Program, Row

from . import code
from .elf import ElfFile
from .symbols import Symbol, code_of

_JUMPS = (".plt", ".plt.sec", ".plt.got")


def is_one(file: ElfFile) -> bool:
    return bool(file.sections_named((rccl.DEVICE_CODE,)))


def names(exported: Collection[str]) -> frozenset[str]:
    """What to look for: each pncclX under either name."""
    wanted = {*exported, rccl.BCAST}
    return frozenset(wanted | {rccl.own_name(name) for name in wanted})


def strong(found: Mapping[str, Symbol]) -> dict[str, Symbol]:
    """All functions as pncclX, whichever of the names they have."""
    return {rccl.strong_name(name): symbol for name, symbol in found.items()} | {
        name: symbol for name, symbol in found.items() if name == rccl.strong_name(name)
    }


def rows(file: ElfFile, chosen: tuple[Row, ...], symbols: Mapping[str, Symbol]) -> tuple[Row, ...]:
    """Not those that are made of others, and ncclBcast where it is not."""
    kept = tuple(
        row
        for row in chosen
        if row.program is not Program.COLLECTIVE or row.func not in rccl.MADE_OF_SENDS
    )
    whole, short = symbols.get(rccl.BROADCAST), symbols.get(rccl.BCAST)
    if whole is None or short is None or os.uname().machine != "x86_64":
        return kept
    if not any(row.symbol == rccl.BROADCAST for row in kept):
        return kept  # ncclEnqueueCheck sees both
    # Both call ncclEnqueueCheck themselves; what goes through the jump table is anybody's.
    both, other = (code.called(code_of(file, one, 4096), one.address) for one in (whole, short))
    jumps = file.sections_named(_JUMPS).values()
    inside = {
        target
        for target in both & other
        if not any(part.address <= target < part.address + part.size for part in jumps)
    }
    return (*kept, rccl.bcast()) if inside else kept

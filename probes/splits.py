"""PyTorch's split sizes as a probe point: ProcessGroupGloo::alltoall_base in libtorch_cpu.so.

The call returns an intrusive_ptr by value, so x86-64 has the address of the result in the first
register and `this` in the second; aarch64 has it in x8 and `this` in x0. Rank and size are members
of c10d::Backend, the first base of every backend: where they are is read from its constructor
(agent.code.backend_offsets), and without that there is no row.

ProcessGroupWrapper, a debugging layer, calls the backend's own: no row for it.
"""

from __future__ import annotations

from .catalog import Arch, Library, Place, Program, Row, Source
from .layout import Func
from .rows import Field, SourceKind

SYMBOL = (
    "_ZN4c10d16ProcessGroupGloo13alltoall_baseERN2at6TensorES3_RSt6vectorIlSaIlEES7_"
    "RKNS_15AllToAllOptionsE"
)
CONSTRUCTOR = "_ZN4c10d7BackendC2Eii"  # (this, int rank, int size)
_THIS, _RECEIVES, _SENDS = 0, 3, 4  # of the method's own arguments, `this` among them
_HIDDEN = {Arch.X86_64: 1, Arch.AARCH64: 0}  # registers before `this`


def _place(index: int, offset: int | None = None) -> Place:
    """An argument, or a 32-bit member of what it points to."""
    sources = (
        Source(SourceKind.REGISTER, index + _HIDDEN[arch])
        if offset is None
        else Source(SourceKind.MEMORY, index + _HIDDEN[arch], 4, offset)
        for arch in Arch
    )
    return Place(*sources)


def row(rank_offset: int, size_offset: int) -> Row:
    """Without an id: it is given when the row is placed."""
    return Row(
        0,
        Library.GLOO,
        SYMBOL,
        Program.SPLITS,
        Func.SPLITS,
        fields={
            Field.COMM: _place(_THIS),
            Field.RANK: _place(_THIS, rank_offset),
            Field.N_RANKS: _place(_THIS, size_offset),
            Field.VECTOR: _place(_SENDS),
            Field.RECEIVE_VECTOR: _place(_RECEIVES),
        },
    )

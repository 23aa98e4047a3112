"""PyTorch's split sizes as a probe point: alltoall_base of its process groups, which release 2.14
renamed to all_to_all_single: ProcessGroupGloo in libtorch_cpu.so, ProcessGroupNCCL (two of them) in
libtorch_cuda.so or libtorch_hip.so.

The call returns an intrusive_ptr by value, so x86-64 has the address of the result in the first
register and `this` in the second; aarch64 has it in x8 and `this` in x0. Of Gloo, whose exchange
runs in another thread, rank and size are read, too: members of c10d::Backend, the first base of
every backend. Where they are is read from its constructor (agent.code.backend_offsets), and without
that there is no row. NCCL's sends follow in the thread of the call, which tells the communicator.

ProcessGroupWrapper, a debugging layer, calls the backend's own: no row for it.
"""

from __future__ import annotations

from collections.abc import Collection

from .catalog import Arch, Library, Place, Program, Row, Source
from .layout import Func
from .rows import Field, SourceKind

_GROUPS = {
    Library.GLOO: ("4c10d16ProcessGroupGloo",),
    Library.TORCH: ("4c10d16ProcessGroupNCCL", "4c10d5nccl216ProcessGroupNCCL"),
}
_METHODS = ("17all_to_all_single", "13alltoall_base")
CONSTRUCTOR = "_ZN4c10d7BackendC2Eii"  # (this, int rank, int size)
_THIS, _RECEIVES, _SENDS = 0, 3, 4  # of the method's own arguments, `this` among them
_HIDDEN = {Arch.X86_64: 1, Arch.AARCH64: 0}  # registers before `this`


def _symbol(group: str, method: str) -> str:
    """(at::Tensor&, at::Tensor&, std::vector<long>&, std::vector<long>&, AllToAllOptions const&):
    what is abbreviated has other numbers where one more namespace stands before it."""
    tensor, vector = ("S4_", "S8_") if "nccl2" in group else ("S3_", "S7_")
    arguments = f"ERN2at6TensorE{tensor}RSt6vectorIlSaIlEE{vector}RKNS_15AllToAllOptionsE"
    return f"_ZN{group}{method}{arguments}"


def symbols(library: Library) -> tuple[str, ...]:
    """Names to look for in a library."""
    return tuple(_symbol(g, m) for g in _GROUPS[library] for m in _METHODS)


def select(library: Library, found: Collection[str]) -> tuple[str, ...]:
    """Those of `symbols` to probe: one of each process group, since one name may call the other."""
    names = ([_symbol(g, m) for m in _METHODS] for g in _GROUPS[library])
    first = (next((name for name in mine if name in found), None) for mine in names)
    return tuple(name for name in first if name is not None)


def _place(index: int, offset: int | None = None) -> Place:
    """An argument, or a 32-bit member of what it points to."""
    sources = (
        Source(SourceKind.REGISTER, index + _HIDDEN[arch])
        if offset is None
        else Source(SourceKind.MEMORY, index + _HIDDEN[arch], 4, offset)
        for arch in Arch
    )
    return Place(*sources)


def row(symbol: str, members: tuple[int, int] | None = None) -> Row:
    """Without an id: it is given when the row is placed. ``members``: offsets of rank and size in
    the process group; without them the length of the vectors is the size, and the rank is -1."""
    fields = {
        Field.COMM: _place(_THIS),
        Field.VECTOR: _place(_SENDS),
        Field.RECEIVE_VECTOR: _place(_RECEIVES),
    }
    if members is not None:
        fields |= {
            Field.RANK: _place(_THIS, members[0]),
            Field.N_RANKS: _place(_THIS, members[1]),
        }
    library = Library.TORCH if members is None else Library.GLOO
    return Row(0, library, symbol, Program.SPLITS, Func.SPLITS, fields=fields)

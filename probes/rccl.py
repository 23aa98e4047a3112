"""What RCCL, the NCCL for AMD GPUs, does otherwise.

Facts of Debian's librccl1 5.4.3 (2.13.4) and of its sources up to 2.21.5: it has NCCL's functions,
enumerations, ncclInfo and the 128-byte id, but

- built as AMD and Debian build it, no pncclX: the calls are probed under their own names;
- gather, scatter and both all-to-alls are sends and receives of its own, through their entries;
- ncclBcast may have the code of ncclBroadcast in it rather than call it;
- before 2.18 a communicator keeps no hash, and before 2.21 no NVML number of its device, which is
  why the bus id lies 8 bytes nearer.
"""

from __future__ import annotations

from .catalog import Library, Program, Row, argument
from .layout import Func
from .rows import Field

DEVICE_CODE = ".hip_fatbin"  # section of a file with AMD kernels linked in
BROADCAST, BCAST = "pncclBroadcast", "pncclBcast"
BUS_ID_NEARER_UNTIL = 22100
# Of each pair one is reached through the other.
MADE_OF_SENDS = (Func.GATHER, Func.SCATTER, Func.ALL_TO_ALL)


def own_name(name: str) -> str:
    """Of a pncclX: the name that RCCL has."""
    return name.removeprefix("p") if name.startswith("pnccl") else name


def strong_name(name: str) -> str:
    """Of an ncclX: the name that NCCL's catalog has."""
    return f"p{name}" if name.startswith("nccl") else name


def bcast() -> Row:
    """The deprecated broadcast in place, which PyTorch calls."""
    a = argument
    fields = {
        Field.COUNT: a(1),
        Field.DTYPE: a(2, 4),
        Field.PEER: a(3, 4),
        Field.COMM: a(4),
        Field.STREAM: a(5),
    }
    return Row(0, Library.NCCL, BCAST, Program.COLLECTIVE, Func.BROADCAST, fields=fields)

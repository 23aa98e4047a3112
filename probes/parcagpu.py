"""The probes of parcagpu, a library that a job loads with CUDA_INJECTION64_PATH and that tells of
every kernel that CUPTI has timed.

Provider, names and arguments are those of its public probe definitions: cuda_correlation(u32
correlation, int callback, name) at the end of a launch, kernel_executed(u64 start, u64 end, u32
correlation, u32 device, u32 stream, u32 graph, u64 node, name) some time after a kernel has run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .catalog import Library, Place, Program, Row, Source
from .rows import Field

PROVIDER = "parcagpu"
CORRELATION = "cuda_correlation"
EXECUTED = "kernel_executed"
ARGUMENTS = 8  # of kernel_executed
NAME_BYTES = 256

# Mirrors of bpf/kernel.h.
KERNEL = np.dtype(
    [
        ("told_ns", "<u8"),
        ("start_ns", "<u8"),
        ("end_ns", "<u8"),
        ("name", "<u8"),
        ("node", "<u8"),
        ("tgid", "<u4"),
        ("correlation", "<u4"),
        ("device", "<u4"),
        ("stream", "<u4"),
        ("graph", "<u4"),
        ("seq", "<u4"),
    ]
)
TOLD = np.dtype(
    [
        ("launches", "<u8"),
        ("base", "<u8"),
        ("missed", "<u8"),
        ("whole_ns", "<u8"),
        ("kernels", "<u8"),
        ("based", "<u8"),
    ]
)


def correlation() -> Row:
    """Its arguments are not read: that it fires is what counts."""
    return Row(0, Library.PARCAGPU, f"{PROVIDER}:{CORRELATION}", Program.CORRELATION)


def executed(operands: Sequence[Source]) -> Row:
    """A row for one place of the probe, from where its note says that the arguments are.

    The fields of such a row are its arguments by number, whatever their names in `Field` are."""
    if len(operands) != ARGUMENTS:
        raise ValueError(f"{EXECUTED} has {len(operands)} arguments, not {ARGUMENTS}")
    fields = {Field(i): Place(operand, operand) for i, operand in enumerate(operands)}
    symbol = f"{PROVIDER}:{EXECUTED}"
    return Row(0, Library.PARCAGPU, symbol, Program.KERNEL, fields=fields)

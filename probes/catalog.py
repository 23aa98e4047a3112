"""The probe points: one frozen row of data each.

A row says which symbol of which library is probed, which program handles it, and where each field
of the record is found, for x86-64 and for aarch64. The programs read the row through the attach
cookie, which is the row's id. A new symbol costs one row here and one test.

Argument positions are those of the C prototypes in the public headers (nccl.h, cuda.h, gloo);
offsets in gloo's option structs were read in torch 2.13.0 (libstdc++, both architectures LP64).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from .layout import CommKind, Flag, Func
from .rows import MAX_ROWS, ROW, ContextCall, Field, SourceKind, Trait


class Library(StrEnum):
    NCCL = "nccl"
    GLOO = "gloo"
    CUDA = "cuda"
    DEEPEP = "deepep"
    NCCL_EP = "nccl_ep"
    PROFILER = "profiler"
    PARCAGPU = "parcagpu"
    TORCH = "torch"


class Program(StrEnum):
    """Which BPF programs handle a row; PROGRAMS names them."""

    ENQUEUE = "enqueue"
    COLLECTIVE = "collective"
    PAIR = "pair"
    COMM = "comm"
    COMM_CALL = "comm_call"
    CONNECT = "connect"
    GROUP_START = "group_start"
    GROUP_END = "group_end"
    LAUNCH = "launch"
    GRAPH_LAUNCH = "graph_launch"
    SYNC = "sync"
    CAPTURE_BEGIN = "capture_begin"
    CAPTURE_END = "capture_end"
    CONTEXT = "context"
    SPLITS = "splits"
    MOE = "moe"
    MOE_NOTIFY = "moe_notify"
    DEVICE = "device"
    CORRELATION = "correlation"
    KERNEL = "kernel"


# Program -> (BPF function at entry, BPF function at return).
PROGRAMS: Mapping[Program, tuple[str | None, str | None]] = {
    Program.ENQUEUE: ("enqueue_check", None),
    Program.COLLECTIVE: ("collective_entry", None),
    Program.PAIR: ("pair_entry", "pair_return"),
    Program.COMM: ("comm_entry", "comm_return"),
    Program.COMM_CALL: ("comm_call", None),
    Program.CONNECT: ("connect_entry", "connect_return"),
    Program.GROUP_START: ("group_start", None),
    Program.GROUP_END: ("group_end", "group_end_return"),
    Program.LAUNCH: ("launch", None),
    Program.GRAPH_LAUNCH: ("graph_launch", None),
    Program.SYNC: ("sync_entry", "sync_return"),
    Program.CAPTURE_BEGIN: (None, "capture_begin"),
    Program.CAPTURE_END: ("capture_end", None),
    Program.CONTEXT: ("context_entry", "context_return"),
    Program.SPLITS: ("alltoall_splits", None),
    Program.MOE: ("moe_entry", None),
    Program.MOE_NOTIFY: (None, "moe_notified"),
    Program.DEVICE: ("op_done", None),
    Program.CORRELATION: ("cuda_correlation", None),
    Program.KERNEL: ("kernel_executed", None),
}


class Arch(StrEnum):
    X86_64 = "x86_64"
    AARCH64 = "aarch64"


@dataclass(frozen=True, slots=True)
class Source:
    """Where one value is found; offsets in bytes, width 4 or 8."""

    kind: SourceKind
    reg: int = 0
    width: int = 8
    first: int = 0
    second: int = 0


_REGISTERS = {Arch.X86_64: 6, Arch.AARCH64: 8}
# Offset of the first stack argument from the stack pointer at entry: x86-64 has the return
# address there, aarch64 has it in x30.
_STACK_BASE = {Arch.X86_64: 8, Arch.AARCH64: 0}


@dataclass(frozen=True, slots=True)
class Place:
    """One value on both architectures."""

    x86_64: Source
    aarch64: Source

    def on(self, arch: Arch) -> Source:
        return self.x86_64 if arch is Arch.X86_64 else self.aarch64


def _argument_source(arch: Arch, index: int, width: int) -> Source:
    registers = _REGISTERS[arch]
    if index < registers:
        return Source(SourceKind.REGISTER, index, width)
    return Source(SourceKind.STACK, 0, width, _STACK_BASE[arch] + 8 * (index - registers))


def argument(index: int, width: int = 8) -> Place:
    """The index-th integer or pointer argument of a C function, from 0."""
    return Place(*(_argument_source(arch, index, width) for arch in Arch))


def memory(index: int, offset: int, width: int = 8) -> Place:
    """``*(argument + offset)``; the argument must be in a register."""
    source = Source(SourceKind.MEMORY, index, width, offset)
    return Place(source, source)


def chain(index: int, offset: int, then: int, width: int = 8) -> Place:
    """``*(*(argument + offset) + then)``."""
    source = Source(SourceKind.CHAIN, index, width, offset, then)
    return Place(source, source)


def constant(value: int) -> Place:
    source = Source(SourceKind.CONSTANT, first=value)
    return Place(source, source)


NO_FLAGS = Flag(0)
NO_TRAITS = Trait(0)


@dataclass(frozen=True, slots=True)
class Row:
    """One probe point. ``local``: only in .symtab, never exported. ``id`` 0: derived from a name of
    the library itself; it gets its number when it is placed."""

    id: int
    library: Library
    symbol: str
    program: Program
    func: int = 0
    flags: Flag = NO_FLAGS
    traits: Trait = NO_TRAITS
    local: bool = False
    fields: Mapping[Field, Place] = field(default_factory=dict)


# ---------------------------------------------------------------- NCCL and RCCL

ENQUEUE_CHECK_ID = 1
_ENQUEUE = Row(
    ENQUEUE_CHECK_ID,
    Library.NCCL,
    "_Z16ncclEnqueueCheckP8ncclInfo",
    Program.ENQUEUE,
    func=Func.UNKNOWN,
    local=True,
    # For readers; the program has these offsets built in, because it is the busiest one.
    fields={
        Field.COMM: memory(0, 56),
        Field.COUNT: memory(0, 32),
        Field.DTYPE: memory(0, 40, 4),
        Field.PEER: memory(0, 48, 4),
        Field.STREAM: memory(0, 64),
    },
)


def _call(
    row_id: int, symbol: str, func: Func, places: Mapping[str, Place], flags: Flag = NO_FLAGS
) -> Row:
    fields = {Field[name.upper()]: place for name, place in places.items()}
    return Row(row_id, Library.NCCL, symbol, Program.COLLECTIVE, func, flags, fields=fields)


def _collectives() -> tuple[Row, ...]:
    """The exported collectives. The deprecated ncclBcast calls ncclBroadcast: no row for it.

    Neither for RCCL's ncclAllToAllv and ncclAllToAll: they call the library's own ncclSend and
    ncclRecv in a group, whose probes see every peer's bytes; a row would count the call twice.
    A Config variant (2.31+) is its base with one more argument at the end.
    """
    a = argument
    plain = {"count": a(2), "dtype": a(3, 4), "comm": a(5), "stream": a(6)}
    rooted = {"count": a(2), "dtype": a(3, 4), "peer": a(4, 4), "comm": a(5), "stream": a(6)}
    short = {"count": a(2), "dtype": a(3, 4), "comm": a(4), "stream": a(5)}
    reduce = {"count": a(2), "dtype": a(3, 4), "peer": a(5, 4), "comm": a(6), "stream": a(7)}
    point = {"count": a(1), "dtype": a(2, 4), "peer": a(3, 4), "comm": a(4), "stream": a(5)}
    put = {"count": a(1), "dtype": a(2, 4), "peer": a(3, 4), "comm": a(9), "stream": a(10)}
    bases = (
        (2, "AllReduce", Func.ALL_REDUCE, plain),
        (3, "ReduceScatter", Func.REDUCE_SCATTER, plain),
        (4, "Broadcast", Func.BROADCAST, rooted),
        (5, "Gather", Func.GATHER, rooted),
        (6, "Scatter", Func.SCATTER, rooted),
        (7, "Reduce", Func.REDUCE, reduce),
        (8, "AllGather", Func.ALL_GATHER, short),
        (9, "AlltoAll", Func.ALL_TO_ALL, short),
    )
    rows = [_call(i, f"pnccl{name}", func, places) for i, name, func, places in bases]
    rows += [_call(i + 10, f"pnccl{name}Config", func, places) for i, name, func, places in bases]
    rows += [
        _call(30, "pncclSend", Func.SEND, point, Flag.P2P),
        _call(31, "pncclRecv", Func.RECV, point, Flag.P2P),
        _call(32, "pncclPutSignal", Func.PUT_SIGNAL, put, Flag.P2P),
        _call(
            33,
            "pncclSignal",
            Func.SIGNAL,
            {"count": constant(0), "peer": a(0, 4), "comm": a(4), "stream": a(5)},
            Flag.P2P,
        ),
        _call(
            34,
            "pncclWaitSignal",
            Func.WAIT_SIGNAL,
            {"count": constant(0), "comm": a(2), "stream": a(3)},
            Flag.P2P,
        ),
    ]
    return tuple(rows)


# ncclCommInitRank(comm *, nranks, ncclUniqueId by value, rank): x86-64 copies the 128 bytes to the
# stack and rank is the third register; aarch64 passes their address in x2 and rank in w3.
_ID_BY_VALUE = Place(Source(SourceKind.STACK_ADDRESS, first=8), Source(SourceKind.REGISTER, reg=2))
_RANK_BEHIND_ID = Place(
    Source(SourceKind.REGISTER, reg=2, width=4), Source(SourceKind.REGISTER, reg=3, width=4)
)
_CONFIG_BEHIND_ID = Place(Source(SourceKind.REGISTER, reg=3), Source(SourceKind.REGISTER, reg=4))


def _life(row_id: int, name: str, kind: CommKind, **places: Place) -> Row:
    fields = {Field[key.upper()]: place for key, place in places.items()}
    return Row(row_id, Library.NCCL, f"pnccl{name}", Program.COMM, kind, fields=fields)


def _end(row_id: int, name: str, kind: CommKind, traits: Trait = NO_TRAITS) -> Row:
    return Row(
        row_id,
        Library.NCCL,
        f"pnccl{name}",
        Program.COMM_CALL,
        kind,
        traits=traits,
        fields={Field.COMM: argument(0)},
    )


def _communicators() -> tuple[Row, ...]:
    """ncclCommInitAll works through an internal function, so it is not counted twice."""
    a = argument
    by_value = {
        "slot": a(0),
        "n_ranks": a(1, 4),
        "id": _ID_BY_VALUE,
        "rank": _RANK_BEHIND_ID,
    }
    return (
        _life(50, "CommInitRank", CommKind.INIT, **by_value),
        _life(51, "CommInitRankConfig", CommKind.INIT, **by_value, config=_CONFIG_BEHIND_ID),
        _life(
            52,
            "CommInitRankScalable",
            CommKind.INIT,
            slot=a(0),
            n_ranks=a(1, 4),
            rank=a(2, 4),
            id=a(4),  # the hash is that of the first id
            config=a(5),
        ),
        _life(53, "CommInitAll", CommKind.INIT_ALL, slot=a(0), n_ranks=a(1, 4)),
        _life(
            54,
            "CommSplit",
            CommKind.SPLIT,
            comm=a(0),
            color=a(1, 4),
            key=a(2, 4),
            slot=a(3),
            config=a(4),
        ),
        _life(55, "CommShrink", CommKind.SHRINK, comm=a(0), color=a(2, 4), slot=a(3), config=a(4)),
        _life(
            56,
            "CommGrow",
            CommKind.GROW,
            comm=a(0),
            n_ranks=a(1, 4),
            id=a(2),
            rank=a(3, 4),
            slot=a(4),
            config=a(5),
        ),
        _end(60, "CommDestroy", CommKind.DESTROY, Trait.FREES),
        _end(61, "CommAbort", CommKind.ABORT, Trait.FREES),
        _end(62, "CommFinalize", CommKind.FINALIZE),
        _end(63, "CommRevoke", CommKind.REVOKE),
    )


_GROUPS = (
    Row(65, Library.NCCL, "pncclGroupStart", Program.GROUP_START),
    Row(66, Library.NCCL, "pncclGroupEnd", Program.GROUP_END),
    # Closes the group like ncclGroupEnd, without launching it.
    Row(67, Library.NCCL, "pncclGroupSimulateEnd", Program.GROUP_END),
)

# ---------------------------------------------------------------- Gloo in libtorch_cpu.so


def _gloo(
    row_id: int,
    symbol: str,
    func: Func,
    places: Mapping[str, Place],
    traits: Trait = NO_TRAITS,
) -> Row:
    """The options struct is the only argument; its first member is a shared_ptr<Context>."""
    fields = {Field[name.upper()]: place for name, place in places.items()}
    return Row(
        row_id,
        Library.GLOO,
        symbol,
        Program.PAIR,
        func,
        Flag.BLOCKING | Flag.BYTES,
        Trait.GLOO | traits,
        fields={Field.COMM: memory(0, 0), **fields},
    )


def _gloo_rows() -> tuple[Row, ...]:
    """Bytes as NCCL counts elements: per rank for gathers, per peer for all-to-all.

    torch has no reduce-scatter of gloo: it calls gloo::allreduce, and so it is told. An
    UnboundBuffer has its size in bytes at 16. allgatherv keeps one count per rank in a vector:
    its count is left out (0).
    """
    elements = {"count": memory(0, 32), "scale": memory(0, 40)}
    in_size = chain(0, 16, 16)
    nothing = {"count": constant(0)}
    rooted = {**elements, "peer": memory(0, 48, 4)}
    # alltoallv: count is all that this rank sends, to itself included. Behind the two buffers at 16
    # and 24 come four vectors of 24 bytes: offsets and lengths in, offsets and lengths out.
    vector = {"count": in_size, "vector": memory(0, 56), "receive_vector": memory(0, 104)}
    reduced = {"count": memory(0, 80), "scale": memory(0, 88)}
    gathered = {"count": in_size, "peer": memory(0, 40, 4)}
    scattered = {"count": chain(0, 40, 16), "peer": memory(0, 56, 4)}
    gather_v = "_ZN4gloo10allgathervERNS_17AllgathervOptionsE"
    to_all = "_ZN4gloo8alltoallERNS_15AlltoallOptionsE"
    to_all_v = "_ZN4gloo9alltoallvERNS_16AlltoallvOptionsE"
    rows = (
        _gloo(70, "_ZN4gloo9allreduceERKNS_16AllreduceOptionsE", Func.ALL_REDUCE, reduced),
        _gloo(
            71, "_ZN4gloo9allgatherERNS_16AllgatherOptionsE", Func.ALL_GATHER, {"count": in_size}
        ),
        _gloo(72, gather_v, Func.ALL_GATHER_V, nothing),
        _gloo(
            73,
            to_all,
            Func.ALL_TO_ALL,
            {"count": in_size},
            Trait.PER_PEER,
        ),
        _gloo(74, to_all_v, Func.ALL_TO_ALL_V, vector),
        _gloo(75, "_ZN4gloo9broadcastERNS_16BroadcastOptionsE", Func.BROADCAST, rooted),
        _gloo(76, "_ZN4gloo7barrierERNS_14BarrierOptionsE", Func.BARRIER, nothing),
        _gloo(77, "_ZN4gloo6reduceERNS_13ReduceOptionsE", Func.REDUCE, rooted),
        _gloo(78, "_ZN4gloo6gatherERNS_13GatherOptionsE", Func.GATHER, gathered),
        _gloo(79, "_ZN4gloo7scatterERNS_14ScatterOptionsE", Func.SCATTER, scattered),
    )
    connect = (
        "_ZN4gloo10rendezvous7Context15connectFullMeshE"
        "St10shared_ptrINS0_5StoreEERS2_INS_9transport6DeviceEE"
    )
    return (
        *rows,
        # gloo::Context is a base of rendezvous::Context: 8 bytes in, behind its virtual table, or
        # at 0 in releases where gloo::Context has the virtual table itself. See `gloo_connect`.
        *(
            Row(
                row_id,
                Library.GLOO,
                connect,
                Program.CONNECT,
                CommKind.CONNECT,
                traits=Trait.GLOO,
                fields={Field.COMM: argument(0), Field.SCALE: constant(inside)},
            )
            for row_id, inside in ((80, 8), (81, 0))
        ),
    )


# The constructor gloo::Context::Context(rank, size, base): where it stores rank tells the layout.
GLOO_CONSTRUCTOR = "_ZN4gloo7ContextC2Eiii"
_CONNECT_BY_RANK_OFFSET = {0: 80, 8: 81}

# ---------------------------------------------------------------- CUDA driver


def _cuda(row_id: int, symbol: str, program: Program, stream: Place | None = None) -> Row:
    """`stream`: where the call has it; None: it names none."""
    per_thread = Trait.PER_THREAD if symbol.endswith(("_ptsz", "_ptds")) else NO_TRAITS
    fields = {} if stream is None else {Field.STREAM: stream}
    return Row(row_id, Library.CUDA, symbol, program, traits=per_thread, fields=fields)


def _context(row_id: int, symbol: str, call: ContextCall, **places: Place) -> Row:
    fields = {Field[name.upper()]: place for name, place in places.items()}
    return Row(row_id, Library.CUDA, symbol, Program.CONTEXT, call, fields=fields)


def _cuda_rows() -> tuple[Row, ...]:
    """A copy to the host waits on its default stream; an event and a context name no stream."""
    a = argument
    launch = Program.LAUNCH
    return (
        _cuda(90, "cuLaunchKernel", launch, a(8)),
        _cuda(91, "cuLaunchKernel_ptsz", launch, a(8)),
        _cuda(92, "cuLaunchKernelEx", launch, memory(0, 32)),
        _cuda(93, "cuLaunchKernelEx_ptsz", launch, memory(0, 32)),
        _cuda(108, "cuLaunchCooperativeKernel", launch, a(8)),
        _cuda(109, "cuLaunchCooperativeKernel_ptsz", launch, a(8)),
        _cuda(94, "cuGraphLaunch", Program.GRAPH_LAUNCH, a(1)),
        _cuda(95, "cuGraphLaunch_ptsz", Program.GRAPH_LAUNCH, a(1)),
        _cuda(96, "cuStreamSynchronize", Program.SYNC, a(0)),
        _cuda(97, "cuStreamSynchronize_ptsz", Program.SYNC, a(0)),
        _cuda(98, "cuEventSynchronize", Program.SYNC),
        _cuda(99, "cuCtxSynchronize", Program.SYNC),
        _cuda(100, "cuMemcpyDtoH_v2", Program.SYNC, constant(0)),
        _cuda(101, "cuMemcpyDtoH_v2_ptds", Program.SYNC, constant(0)),
        _cuda(102, "cuStreamBeginCapture_v2", Program.CAPTURE_BEGIN),
        _cuda(103, "cuStreamBeginCapture_v2_ptsz", Program.CAPTURE_BEGIN),
        _cuda(104, "cuStreamBeginCaptureToGraph", Program.CAPTURE_BEGIN),
        _cuda(105, "cuStreamBeginCaptureToGraph_ptsz", Program.CAPTURE_BEGIN),
        _cuda(106, "cuStreamEndCapture", Program.CAPTURE_END),
        _cuda(107, "cuStreamEndCapture_ptsz", Program.CAPTURE_END),
        _context(114, "cuDevicePrimaryCtxRetain", ContextCall.MADE, slot=a(0), rank=a(1, 4)),
        _context(115, "cuCtxCreate_v2", ContextCall.ENTERED, slot=a(0), rank=a(2, 4)),
        _context(116, "cuCtxCreate_v3", ContextCall.ENTERED, slot=a(0), rank=a(4, 4)),
        _context(117, "cuCtxCreate_v4", ContextCall.ENTERED, slot=a(0), rank=a(3, 4)),
        _context(118, "cuCtxSetCurrent", ContextCall.SET, comm=a(0)),
        _context(119, "cuCtxPushCurrent_v2", ContextCall.PUSHED, comm=a(0)),
        _context(120, "cuCtxPopCurrent_v2", ContextCall.POPPED),
        _context(121, "cuCtxDestroy_v2", ContextCall.ENDED, comm=a(0)),
        _context(122, "cuCtxGetDevice", ContextCall.ASKED, slot=a(0)),
    )


_CUDA = _cuda_rows()

# ---------------------------------------------------------------- expert-parallel libraries


def in_struct(index: int, offset: int, width: int = 4) -> Place:
    """A member of a structure passed by value as the index-th argument, too large for registers:
    x86-64 copies it to the stack, where it is the only such one; aarch64 passes its address."""
    base = _STACK_BASE[Arch.X86_64]
    return Place(
        Source(SourceKind.STACK, 0, width, base + offset),
        Source(SourceKind.MEMORY, index, width, offset),
    )


def _elastic(row_id: int, name: str, func: Func, members: Mapping[str, int], unit: int) -> Row:
    fields = {Field[which.upper()]: in_struct(2, offset) for which, offset in members.items()}
    # CUlaunchConfig: six extents and the shared memory's size come before the stream.
    fields |= {Field.STREAM: memory(1, 32), Field.UNIT: constant(unit)}
    symbol = f"_ZN7deep_ep7elastic{name}11launch_implERKP9CUfunc_stRK17CUlaunchConfig_stNS1_4ArgsE"
    traits = Trait.EXPERTS
    return Row(row_id, Library.DEEPEP, symbol, Program.MOE, func, Flag.BYTES, traits, fields=fields)


def _experts() -> tuple[Row, ...]:
    """DeepEP's elastic buffer and NCCL EP. The rows of DeepEP's launchers are derived (deepep.py).

    Offsets in the elastic Args: DWARF of sgl-deep-ep 0.1.2.post1. The program takes no row whose
    rank and size make no sense, so another layout is a counted loss and not a wrong number.
    NCCL EP: nccl_ep.h of nccl-extensions 0.1.0, whose public structs are append-only; the handle
    begins with its group and the group with its ncclComm_t, number of ranks and rank (DWARF).
    """
    dispatch = {
        "out_ranks": 20, "n_ranks": 24, "scale": 28, "top_k": 44, "count": 152, "out_rank": 208,
        "rank": 212,
    }  # fmt: skip
    combine = {
        "out_ranks": 12, "n_ranks": 16, "scale": 20, "top_k": 32, "out_rank": 128, "rank": 132,
        "count": 136,
    }  # fmt: skip
    group = {
        Field.COMM: chain(0, 0, 0),
        Field.N_RANKS: chain(0, 0, 8, 4),
        Field.RANK: chain(0, 0, 12, 4),
        Field.TOP_K: memory(0, 68, 4),
    }

    def call(row_id: int, name: str, func: Func, tokens: Place, stream: int) -> Row:
        fields = {**group, Field.COUNT: tokens, Field.STREAM: argument(stream)}
        return Row(
            row_id, Library.NCCL_EP, name, Program.MOE, func, traits=Trait.TENSOR, fields=fields
        )

    return (
        _elastic(110, "15DispatchRuntime", Func.DISPATCH, dispatch, 1),
        _elastic(111, "14CombineRuntime", Func.COMBINE, combine, 2),
        # The tokens that this rank contributes: inputs->tokens of a dispatch, and of a combine
        # outputs->tokens, because its inputs are as large as the receive buffer.
        call(112, "ncclEpDispatch", Func.DISPATCH, memory(1, 8), 5),
        call(113, "ncclEpCombine", Func.COMBINE, memory(2, 8), 4),
    )


# The profiler plugin: a USDT probe, found by its note rather than by a symbol.
OP_DONE = Row(127, Library.PROFILER, "lanterne:op_done", Program.DEVICE)

COLLECTIVES = _collectives()
ROWS: tuple[Row, ...] = (
    _ENQUEUE,
    *COLLECTIVES,
    *_communicators(),
    *_GROUPS,
    *_gloo_rows(),
    *_CUDA,
    *_experts(),
    OP_DONE,
)
BY_ID: Mapping[int, Row] = {row.id: row for row in ROWS}

# One probe with one layout for every call of every release, against arguments that mostly lie in
# registers and are cheaper to take (see `make bench`). Flip it and the tests still pass.
PREFER_ENQUEUE_CHECK = True


def symbols(library: Library) -> tuple[frozenset[str], frozenset[str]]:
    """Names to look for in a library: (exported, local)."""
    rows = [row for row in ROWS if row.library is library]
    extra = {GLOO_CONSTRUCTOR} if library is Library.GLOO else set()
    return (
        frozenset({row.symbol for row in rows if not row.local} | extra),
        frozenset(row.symbol for row in rows if row.local),
    )


def select(
    library: Library,
    found: Collection[str],
    *,
    gloo_rank_offset: int | None = None,
    prefer_enqueue_check: bool | None = None,
) -> tuple[Row, ...]:
    """The rows to attach, given the symbols that the library has.

    Never two rows that see one call: ncclEnqueueCheck excludes the exported collectives, and only
    one row of gloo's connectFullMesh is taken (torch 2.13's layout if the offset is unknown).
    """
    if prefer_enqueue_check is None:
        prefer_enqueue_check = PREFER_ENQUEUE_CHECK
    exported = {row.id for row in COLLECTIVES if row.symbol in found}
    if _ENQUEUE.symbol in found and (prefer_enqueue_check or not exported):
        left_out = exported
    else:
        left_out = {ENQUEUE_CHECK_ID}
    connect = _CONNECT_BY_RANK_OFFSET.get(gloo_rank_offset or 0, 80)
    left_out |= set(_CONNECT_BY_RANK_OFFSET.values()) - {connect}
    return tuple(
        row
        for row in ROWS
        if row.library is library and row.symbol in found and row.id not in left_out
    )


def pack(arch: Arch) -> np.ndarray:
    """All rows as the programs read them: (MAX_ROWS,) of rows.ROW, index = row id."""
    packed = np.zeros(MAX_ROWS, ROW)
    for row in ROWS:
        packed[row.id] = pack_row(row, arch)
    return packed


def pack_row(row: Row, arch: Arch) -> np.void:
    """One row as the programs read it."""
    packed: np.void = np.zeros(1, ROW)[0]
    packed["func"], packed["flags"], packed["traits"] = row.func, row.flags, row.traits
    for which, place in row.fields.items():
        source = place.on(arch)
        packed["source"][which] = (
            source.kind, source.reg, source.width, 0, source.first, source.second
        )  # fmt: skip
    return packed

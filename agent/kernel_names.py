"""What a GPU kernel is, by its name: whose, which operation, and which stage of a layer.

A table of patterns, tried in order; what fits none is `other`. A mangled name is first cut into its
identifiers, joined by "::" ("deep_ep::intranode::dispatch"), so one pattern serves a name as CUPTI
gives it and as people write it. Names are those of NCCL 2.18 to 2.32, DeepEP 1.1 to 2 (sgl builds
as well), and of the MoE, GEMM and attention kernels of vLLM, SGLang, TensorRT-LLM, FlashInfer,
DeepGEMM, CUTLASS, Megatron and Transformer Engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from lanterne.agent.identity import DEEPEP, NCCL
from lanterne.agent.roles import COMBINE, DISPATCH, UNKNOWN
from lanterne.probes.layout import Func


class Stage(IntEnum):
    """Stages.stage of telemetry.proto; the last two stand for several of the others."""

    OTHER = 0
    ATTENTION = 1
    ROUTING = 2
    PERMUTATION = 3
    EXPERT_GEMM = 4
    DISPATCH = 5
    COMBINE = 6
    COLLECTIVE = 7
    COMPUTE = 8  # any of the first five
    ALL = 9


NO_OPERATION = 255
COMMUNICATION = (Stage.DISPATCH, Stage.COMBINE, Stage.COLLECTIVE)


@dataclass(frozen=True)
class Kind:
    """``library``: of the communicator (0: none of those that are known). ``func``: layout.Func
    where the kernel is an operation of its ranks, else NO_OPERATION. ``begins``: it waits for the
    other ranks and belongs to the operation whose kernel comes next."""

    stage: Stage
    library: int = 0
    func: int = NO_OPERATION
    role: int = UNKNOWN
    begins: bool = False


OTHER = Kind(Stage.OTHER)
_DISPATCH = Kind(Stage.DISPATCH, DEEPEP, Func.DISPATCH, DISPATCH)
_COMBINE = Kind(Stage.COMBINE, DEEPEP, Func.COMBINE, COMBINE)
_NCCL = Kind(Stage.COLLECTIVE, NCCL)


def _nccl(func: Func) -> Kind:
    return Kind(Stage.COLLECTIVE, NCCL, func)


def _begins(stage: Stage) -> Kind:
    return Kind(stage, DEEPEP, begins=True)


_GEMM = Kind(Stage.EXPERT_GEMM)
_PERMUTE = Kind(Stage.PERMUTATION)
_ROUTE = Kind(Stage.ROUTING)
_ATTEND = Kind(Stage.ATTENTION)
_COLLECT = Kind(Stage.COLLECTIVE)


_NCCL_KERNEL = r"^nccl(?:Symk?)?(?:Dev)?Kernel_"
_EXPERT = r"deep_ep::(?:\w+::)*"
_JIT = r"(?:^|::)"
_TABLE: tuple[tuple[str, Kind], ...] = (
    # NCCL; a kernel "Generic" may be any function.
    (_NCCL_KERNEL + "SendRecv", _nccl(Func.P2P_GROUP)),
    (_NCCL_KERNEL + "AllReduce", _nccl(Func.ALL_REDUCE)),
    (_NCCL_KERNEL + "AllGatherV", _nccl(Func.ALL_GATHER_V)),
    (_NCCL_KERNEL + "AllGather", _nccl(Func.ALL_GATHER)),
    (_NCCL_KERNEL + "ReduceScatter", _nccl(Func.REDUCE_SCATTER)),
    (_NCCL_KERNEL + "Reduce(?:_|$)", _nccl(Func.REDUCE)),
    (_NCCL_KERNEL + "Broadcast", _nccl(Func.BROADCAST)),
    (r"^nccl(?:Symk?)?(?:Dev)?Kernel", _NCCL),
    # DeepEP. In internode one cached_notify serves both halves.
    (_EXPERT + r"(?:cached_)?notify_dispatch\b", _begins(Stage.DISPATCH)),
    (_EXPERT + r"cached_notify(?:_combine)?\b", _begins(Stage.COMBINE)),
    (_EXPERT + r"get_dispatch_layout\b", _ROUTE),
    (_EXPERT + r"(?:clean_low_latency_buffer|barrier)", _COLLECT),
    (_EXPERT + r"dispatch\b", _DISPATCH),
    (_EXPERT + r"combine\b", _COMBINE),
    (_JIT + r"(?:hybrid_)?dispatch_impl\b", _DISPATCH),
    (_JIT + r"(?:hybrid_)?combine_impl\b", _COMBINE),
    (_JIT + r"dispatch_copy_epilogue_impl\b", Kind(Stage.DISPATCH)),
    (_JIT + r"combine_reduce_epilogue_impl\b", Kind(Stage.COMBINE)),
    (r"deep_ep::(?:\w+::)*barrier_impl\b|^barrier_impl\b", _COLLECT),
    # Other ways to exchange tokens: their ranks are not known as a communicator.
    (r"moeA2A(?:Prepare)?Dispatch|moe_?a2a_?dispatch|mnnvl_?moe_?dispatch", Kind(Stage.DISPATCH)),
    (r"moeA2A(?:Prepare)?Combine|moe_?a2a_?combine|mnnvl_?moe_?combine", Kind(Stage.COMBINE)),
    (r"EpDispatch\w*Kernel", Kind(Stage.DISPATCH)),
    (r"EpCombine\w*Kernel", Kind(Stage.COMBINE)),
    (r"cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|multimem_", _COLLECT),
    # Inside an expert layer.
    (r"GemmTypeE[1-9]E|GemmType\)[1-9]", _GEMM),  # DeepGEMM's grouped ones
    (r"GroupProblemShape|MoE?ProblemShape|GemmGrouped|[Gg]rouped?_?[Gg]emm", _GEMM),
    (r"fused_moe|MoeFCGemm|moe_gemm|moe_wna16|marlin_moe|moe_mmvq|group_?mm", _GEMM),
    (r"align_block_size|count_and_sort_expert|moe_sum|(?:pre|post)_reorder", _PERMUTE),
    (r"expandInputRows|finalizeMoeRouting|(?:^|_|::)(?:un)?permute_", _PERMUTE),
    (r"moe_(?:un)?permute|row_id_map|sort_chunks_by|ep_(?:scatter|gather)", _PERMUTE),
    (r"seg_indptr|src2dst|shuffle_rows|expert_offsets|problem_sizes", _PERMUTE),
    (r"topk_?[Gg]ating|gating_?[Tt]op|moe_fused_gate|grouped_topk|topk_softmax", _ROUTE),
    (r"topk_sigmoid|noaux_tc|::routing\w*::|routing(?:Main|Indices|Init)", _ROUTE),
    # Attention.
    (r"[Ff]lash_?(?:[Ff]wd|[Bb]wd|[Aa]ttn|[Aa]ttention|[Mm]la)|\bflash::|fmha", _ATTEND),
    (r"paged_attention|unified_attention|Batch(?:Decode|Prefill)With", _ATTEND),
    (r"_fwd_(?:grouped_)?kernel_stage|mla_decode|cutlass_mla|attention_kernel", _ATTEND),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), kind) for pattern, kind in _TABLE)
_LITERAL = re.compile(r"L[a-z]n?\d+E")
_LENGTH = re.compile(r"\d+")


def readable(name: str) -> str:
    """The identifiers of a mangled name, in their order; any other name as it is. Enumerators in
    template arguments keep their form ("GemmTypeE1E")."""
    if not name.startswith("_Z"):
        return name
    parts: list[str] = []
    at = 2
    while at < len(name):
        literal = _LITERAL.match(name, at)
        if literal is not None:
            at = literal.end()
            continue
        length = _LENGTH.match(name, at)
        if length is None:
            at += 1
            continue
        size = int(length[0])
        end = length.end() + size
        if size == 0 or size > len(name) or not name[length.end() : end].isidentifier():
            at = length.end()
            continue
        enumerator = re.match(r"E\d+E", name[end:])
        parts.append(name[length.end() : end] + (enumerator[0] if enumerator else ""))
        at = end
    return "::".join(parts)


def kind_of(name: str) -> Kind:
    """OTHER for what no pattern knows."""
    text = readable(name)
    return next((kind for pattern, kind in _COMPILED if pattern.search(text)), OTHER)

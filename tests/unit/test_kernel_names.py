# ruff: noqa: E501
"""Kernel names, as CUPTI and people write them, to what the kernel is."""

from __future__ import annotations

import pytest

from lanterne.agent.identity import DEEPEP, NCCL
from lanterne.agent.kernel_names import NO_OPERATION, Stage, kind_of, readable
from lanterne.agent.roles import COMBINE, DISPATCH
from lanterne.probes.layout import Func

OPERATIONS = {
    # NCCL 2.18 to 2.32, symmetric kernels included.
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": (NCCL, Func.P2P_GROUP, 0),
    "_Z22ncclDevKernel_SendRecv24ncclDevKernelArgsStorageILm4096EE": (NCCL, Func.P2P_GROUP, 0),
    "_Z40ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE": (
        NCCL, Func.ALL_REDUCE, 0),
    "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL": (NCCL, Func.ALL_REDUCE, 0),
    "ncclDevKernel_AllReduce_RING": (NCCL, Func.ALL_REDUCE, 0),
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": (
        NCCL, Func.ALL_REDUCE, 0),
    "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16": (NCCL, Func.ALL_REDUCE, 0),
    "ncclSymkDevKernel_AllGather_LL": (NCCL, Func.ALL_GATHER, 0),
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": (NCCL, Func.ALL_GATHER, 0),
    "ncclDevKernel_AllGatherV_RING_LL": (NCCL, Func.ALL_GATHER_V, 0),
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL": (NCCL, Func.REDUCE_SCATTER, 0),
    "ncclDevKernel_Reduce_Sum_f32_RING_LL": (NCCL, Func.REDUCE, 0),
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": (NCCL, Func.BROADCAST, 0),
    # DeepEP: as mangled in the wheels (1.2.1, sgl) and demangled, and the kernels made at run time.
    "_ZN7deep_ep12internode_ll8dispatchILb1ELb0ELi7168EEEvPvS1_PiPlS2_S2_S3_": (
        DEEPEP, Func.DISPATCH, DISPATCH),
    "_ZN7deep_ep6legacy12internode_ll7combineILb0ELi7168ELi9ELi4EEEvPvS2_PiS2_PKvPKl": (
        DEEPEP, Func.COMBINE, COMBINE),
    "_ZN7deep_ep9intranode8dispatchILi8ELi768ELi8192EEEvP4int4PfPiPlS5_": (
        DEEPEP, Func.DISPATCH, DISPATCH),
    "_ZN7deep_ep9intranode7combineI13__nv_bfloat16Li8ELi768ELi4096EEEvPT_PfPKS2_": (
        DEEPEP, Func.COMBINE, COMBINE),
    "_ZN7deep_ep9internode8dispatchILb0ELi2ELb0ELi8192ELi8EEEvP4int4": (
        DEEPEP, Func.DISPATCH, DISPATCH),
    "void deep_ep::internode::combine<false, 2, __nv_bfloat16, 24>(int4*, float*)": (
        DEEPEP, Func.COMBINE, COMBINE),
    "void deep_ep::legacy::intranode::dispatch<8, 768, 8192>(int4*, float*)": (
        DEEPEP, Func.DISPATCH, DISPATCH),
    "dispatch_impl": (DEEPEP, Func.DISPATCH, DISPATCH),
    "void deep_ep::elastic::hybrid_dispatch_impl<true, 8, 2>(void*)": (
        DEEPEP, Func.DISPATCH, DISPATCH),
    "combine_impl": (DEEPEP, Func.COMBINE, COMBINE),
    "hybrid_combine_impl": (DEEPEP, Func.COMBINE, COMBINE),
}  # fmt: skip

STAGES = {
    # Beside the operations of NCCL and DeepEP.
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": Stage.COLLECTIVE,
    "_ZN7deep_ep9intranode15notify_dispatchILi8EEEvPKiPiS2_S3_iiPKb": Stage.DISPATCH,
    "_ZN7deep_ep9intranode22cached_notify_dispatchILi8EEEvPKiiPPvPPii": Stage.DISPATCH,
    "_ZN7deep_ep9intranode21cached_notify_combineILi8EEEvPPvPiiiiPPii": Stage.COMBINE,
    "_ZN7deep_ep6layout19get_dispatch_layoutILi256ELi32ELi1EEEvPKlPiS3_S3_Pbiiii": Stage.ROUTING,
    "_ZN7deep_ep12internode_ll24clean_low_latency_bufferILi32EEEvPliS1_i": Stage.COLLECTIVE,
    "dispatch_copy_epilogue_impl": Stage.DISPATCH,
    "combine_reduce_epilogue_impl": Stage.COMBINE,
    "barrier_impl": Stage.COLLECTIVE,
    "_ZN4vllm26cross_device_reduce_1stageI13__nv_bfloat16Li8EEEvPNS_8RankDataE": Stage.COLLECTIVE,
    "void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<1, 8>(Params)": Stage.DISPATCH,
    "void tensorrt_llm::kernels::moe_comm::moeA2ACombineKernel<__nv_bfloat16>(Params)": Stage.COMBINE,
    # Expert layers.
    "fused_moe_kernel": Stage.EXPERT_GEMM,
    "_ZN9deep_gemm23sm90_fp8_gemm_1d2d_implILj0ELj4096ELj7168ELj8ELNS_8GemmTypeE1EEEvPfPi": (
        Stage.EXPERT_GEMM),
    "void deep_gemm::sm100_fp8_gemm_1d1d_impl<0u, 0u, (deep_gemm::GemmType)2, false>(int*)": (
        Stage.EXPERT_GEMM),
    "_ZN9deep_gemm23sm90_fp8_gemm_1d2d_implILj0ELj4096ELj7168ELj1ELNS_8GemmTypeE0EEEvPfPi": (
        Stage.OTHER),
    "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_17GroupProblemShapeIN4cute5tupleI": (
        Stage.EXPERT_GEMM),
    "_ZN7cutlass6KernelINS_4gemm6kernel11GemmGroupedINS1_11threadblock13MmaMultistage": (
        Stage.EXPERT_GEMM),
    "_ZN4vllm3moe14topkGatingSoftmaxILi8ELi256ELi4ELi16EEEvPKfPKbPfiPiS6_iii": Stage.ROUTING,
    "_ZN4vllm3moe26grouped_topk_fused_kernelIffiEEvPT_PfPT1_PS2_": Stage.ROUTING,
    "moe_fused_gate_kernel": Stage.ROUTING,
    "_ZN4vllm3moe27moe_align_block_size_kernelIiEEvPKT_PiS4_S4_iiim": Stage.PERMUTATION,
    "_ZN4vllm3moe35count_and_sort_expert_tokens_kernelIiEEvPKT_PiS4_m": Stage.PERMUTATION,
    "_permute_kernel": Stage.PERMUTATION,
    "_unpermute_kernel": Stage.PERMUTATION,
    "_row_id_map_pass_1_kernel": Stage.PERMUTATION,
    "_fwd_kernel_ep_scatter_2": Stage.PERMUTATION,
    "_fwd_kernel_ep_gather": Stage.PERMUTATION,
    "void expandInputRowsKernel<__nv_bfloat16>(__nv_bfloat16 const*)": Stage.PERMUTATION,
    # Attention.
    "_ZN5flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi128ELi128ELi64ELi4E": Stage.ATTENTION,
    "_ZN7cutlass13device_kernelIN5flash19enable_sm90_or_laterINS1_16FlashAttnFwdSm90INS1_": (
        Stage.ATTENTION),
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(PosEncodingMode)0>(Params)": Stage.ATTENTION,
    "kernel_unified_attention_2d": Stage.ATTENTION,
    "_fwd_grouped_kernel_stage1": Stage.ATTENTION,
    "fmhaSm100Kernel_QkvE4m3OBfloat16HQk192HV128": Stage.ATTENTION,
    # Dense work, and names that are none.
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_": (
        Stage.OTHER),
    "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_7MeanOpsIffffEEjfLi4ELi4EEEEEvT1_": (
        Stage.OTHER),
    "nvjet_tst_128x8_64x12_2x1_v_bz_TNT": Stage.OTHER,
    "_ZN7cutlass7Kernel2I41cutlass_80_simt_sgemm_64x64_8x5_tn_align1EEvNT_6ParamsE": Stage.OTHER,
    "triton_poi_fused_add_mul_silu_3": Stage.OTHER,
    "_ZN4vllm18act_and_mul_kernelI13__nv_bfloat16": Stage.OTHER,
    "my_dispatch": Stage.OTHER,
    "redispatch_implementation": Stage.OTHER,
    "ncclEpFoo": Stage.OTHER,
    "_Z": Stage.OTHER,
    "_Z999x": Stage.OTHER,
    "_Z3" + "9" * 200: Stage.OTHER,
    "": Stage.OTHER,
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str) -> None:
    kind = kind_of(name)
    assert (kind.library, kind.func, kind.role) == OPERATIONS[name]
    assert not kind.begins
    expected = {DISPATCH: Stage.DISPATCH, COMBINE: Stage.COMBINE}.get(kind.role, Stage.COLLECTIVE)
    assert kind.stage is expected


@pytest.mark.parametrize("name", STAGES)
def test_stages(name: str) -> None:
    kind = kind_of(name)
    assert kind.stage is STAGES[name]
    assert kind.func == NO_OPERATION


def test_what_waits_for_the_ranks_before_the_operation_itself() -> None:
    begins = [name for name in STAGES if kind_of(name).begins]
    assert len(begins) == 3
    assert all("notify" in name for name in begins)


def test_identifiers_of_a_mangled_name() -> None:
    assert readable("_ZN7deep_ep9intranode8dispatchILi8ELi768EEEvP4int4") == (
        "deep_ep::intranode::dispatch::int4"
    )
    assert readable("plain_name<1>(int)") == "plain_name<1>(int)"

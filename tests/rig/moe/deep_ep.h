/* SPDX-License-Identifier: Apache-2.0 */
/* The launchers of DeepEP as three builds of it declare them: parameters in the builds' own order,
 * so that the compiler makes the builds' own symbols. What is in the parameters is not used here. */
#ifndef LANTERNE_RIG_DEEP_EP_H
#define LANTERNE_RIG_DEEP_EP_H

#include <cstddef>
#include <cstdint>

#define V121 1 /* DeepEP 1.2.1 */
#define HEAD 2 /* the development branch: everything below deep_ep::legacy */
#define SGL  3 /* sgl-deep-ep 0.1.2.post1 */
#ifndef BUILD
#error "define BUILD as V121, HEAD or SGL"
#endif

/* The library defines BODY as a body, everybody else leaves it a declaration. */
#ifndef BODY
#define BODY ;
#endif

#define EXPORT __attribute__((visibility("default"), noinline))

struct CUstream_st;
struct CUfunc_st;
typedef CUstream_st *cudaStream_t;
enum cudaDataType_t { CUDA_R_16BF = 14 };

struct CUlaunchConfig_st {
	unsigned grid[3], block[3], shared_bytes;
	cudaStream_t stream;
	void *attributes;
	unsigned n_attributes;
};

#if BUILD == V121
#define BEGIN namespace deep_ep {
#define END }
#define LAUNCHERS deep_ep
#else
#define BEGIN namespace deep_ep { namespace legacy {
#define END } }
#define LAUNCHERS deep_ep::legacy
#endif

BEGIN

namespace layout {
EXPORT void get_dispatch_layout(const int64_t *topk_idx, int *tokens_per_rank, int *per_rdma_rank,
				int *per_expert, bool *in_rank, int num_tokens, int num_topk,
				int num_ranks, int num_experts, cudaStream_t stream) BODY
}

namespace intranode {
EXPORT void notify_dispatch(const int *per_rank, int *counter, int num_ranks, const int *per_expert,
			    int *expert_counter, int num_experts, int num_tokens,
			    const bool *in_rank, int *channel_prefix, int *rank_prefix,
			    int num_memset, int alignment, void **buffers, int **signals, int rank,
			    cudaStream_t stream, int num_channels) BODY
EXPORT void cached_notify_dispatch(const int *rank_prefix, int num_memset, void **buffers,
				   int **signals, int rank, int num_ranks, cudaStream_t stream) BODY
EXPORT void dispatch(void *recv_x, float *recv_scales, int *recv_src, int64_t *recv_topk,
		     float *recv_weights, int *recv_offset, int *send_head, const void *x,
		     const float *scales, const int64_t *topk_idx, const float *weights,
		     const bool *in_rank, const int *channel_prefix, int num_tokens,
		     int num_worst_tokens, int hidden_int4, int num_topk, int num_experts,
		     int num_scales, int token_stride, int hidden_stride, void **buffers, int rank,
		     int num_ranks, cudaStream_t stream, int num_sms, int max_send, int recv_buffer) BODY
EXPORT void combine(cudaDataType_t type, void *recv_x, float *recv_weights, const void *x,
		    const float *weights, const void *bias_0, const void *bias_1, const int *src,
		    const int *rank_prefix, const int *channel_prefix, int *send_head,
		    int num_tokens, int num_recv_tokens, int hidden, int num_topk, void **buffers,
		    int rank, int num_ranks, cudaStream_t stream, int num_sms, int max_send,
		    int recv_buffer) BODY
}

#if BUILD == V121
#define WORST_TOKENS
#else
#define WORST_TOKENS int num_worst_tokens,
#endif

namespace internode {
EXPORT void notify_dispatch(const int *per_rank, int *counter, int num_ranks,
			    const int *per_rdma_rank, int *rdma_counter, const int *per_expert,
			    int *expert_counter, int num_experts, const bool *in_rank,
			    int num_tokens, WORST_TOKENS int num_channels, int hidden_int4,
			    int num_scales, int num_topk, int alignment, int *rdma_prefix,
			    int *rdma_rank_prefix, int *gbl_prefix, int *gbl_rank_prefix,
			    void *rdma_buffer, int max_rdma, void **buffers, int max_nvl,
			    int **signals, int rank, cudaStream_t stream, int64_t rdma_bytes,
			    int64_t nvl_bytes, bool low_latency) BODY
EXPORT void dispatch(void *recv_x, float *recv_scales, int64_t *recv_topk, float *recv_weights,
		     void *recv_meta, const void *x, const float *scales, const int64_t *topk_idx,
		     const float *weights, int *rdma_head, int *nvl_head, int *rdma_prefix,
		     int *gbl_prefix, const int *rdma_channel, const int *rdma_rank,
		     const int *gbl_channel, const int *gbl_rank, const bool *in_rank,
		     int num_tokens, WORST_TOKENS int hidden_int4, int num_scales, int num_topk,
		     int num_experts, int token_stride, int hidden_stride, void *rdma_buffer,
		     int rdma_send, int rdma_recv, void **buffers, int nvl_send, int nvl_recv,
		     int rank, int num_ranks, bool cached, cudaStream_t stream, int num_channels,
		     bool low_latency) BODY
EXPORT void combine(cudaDataType_t type, void *combined_x, float *combined_weights,
		    const bool *in_rank, const void *x, const float *weights, const void *bias_0,
		    const void *bias_1, const int *rdma_head, const int *nvl_head, const void *meta,
		    const int *rdma_channel, const int *rdma_rank, const int *gbl_channel,
		    int num_tokens, int num_combined_tokens, int hidden, int num_topk,
		    void *rdma_buffer, int rdma_send, int rdma_recv, void **buffers, int nvl_send,
		    int nvl_recv, int rank, int num_ranks, cudaStream_t stream, int num_channels,
		    bool low_latency) BODY
}

#if BUILD == V121
#define MASK
#else
#define MASK int *mask,
#endif
#if BUILD == SGL
#define GLOBAL_SCALE const float *global_scale,
#define MORE_FLAGS , bool nvfp4
#define END_OF_COMBINE , bool zero_copy, bool overlap, unsigned *signal, unsigned num_sms
#else
#define GLOBAL_SCALE
#define MORE_FLAGS
#define END_OF_COMBINE , bool zero_copy
#endif

namespace internode_ll {
EXPORT void dispatch(void *recv_x, void *recv_scales, int *recv_src, int64_t *recv_range,
		     int *recv_count, MASK int *stats, int64_t *wait_stats, GLOBAL_SCALE
		     void *rdma_recv_x, int *rdma_recv_count, void *rdma_x, const void *x,
		     const int64_t *topk_idx, int *next_clean, int num_next_clean, int num_tokens,
		     int hidden, int max_tokens_per_rank, int num_topk, int num_experts, int rank,
		     int num_ranks, bool use_fp8, bool round_scale, bool use_ue8m0 MORE_FLAGS,
		     void *workspace, int num_device_sms, cudaStream_t stream, int phases) BODY
EXPORT void combine(void *combined_x, void *rdma_recv_x, int *rdma_recv_flag, void *rdma_send_x,
		    const void *x, const int64_t *topk_idx, const float *weights,
		    const int *src_info, const int64_t *range, MASK int64_t *wait_stats,
		    int *next_clean, int num_next_clean, int num_combined_tokens, int hidden,
		    int max_tokens_per_rank, int num_topk, int num_experts, int rank, int num_ranks,
		    bool use_logfmt, void *workspace, int num_device_sms, cudaStream_t stream,
		    int phases END_OF_COMBINE) BODY
}

END

#if BUILD != V121
namespace deep_ep { namespace elastic {
struct DispatchRuntime {
	struct Args {
		char head[20];
		int scaleout_ranks, scaleup_ranks, hidden_bytes, channels, max_tokens, num_experts,
			num_topk;
		char pointers[104];
		int num_tokens;
		char more[52];
		int scaleout_rank, scaleup_rank;
		char tail[24];
	};
	EXPORT static void launch_impl(CUfunc_st *const &kernel, const CUlaunchConfig_st &config,
				       Args args) BODY
};
struct CombineRuntime {
	struct Args {
		char head[12];
		int scaleout_ranks, scaleup_ranks, hidden, max_tokens, num_experts, num_topk;
		char pointers[92];
		int scaleout_rank, scaleup_rank, num_reduced_tokens;
		char tail[28];
	};
	EXPORT static void launch_impl(CUfunc_st *const &kernel, const CUlaunchConfig_st &config,
				       Args args) BODY
};
static_assert(sizeof(DispatchRuntime::Args) == 240, "as in sgl-deep-ep");
static_assert(sizeof(CombineRuntime::Args) == 168, "as in sgl-deep-ep");
static_assert(offsetof(DispatchRuntime::Args, num_tokens) == 152, "as in sgl-deep-ep");
static_assert(offsetof(DispatchRuntime::Args, scaleout_rank) == 208, "as in sgl-deep-ep");
static_assert(offsetof(CombineRuntime::Args, scaleout_rank) == 128, "as in sgl-deep-ep");
} }
#endif

#endif

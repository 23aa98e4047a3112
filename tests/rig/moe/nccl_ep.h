/* SPDX-License-Identifier: Apache-2.0 */
/* What of NCCL EP's public structures is used here, at its offsets. */
#ifndef LANTERNE_RIG_NCCL_EP_H
#define LANTERNE_RIG_NCCL_EP_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
	unsigned size, magic, ndim, datatype;
	void *data, *window;
	uint64_t window_offset;
	size_t *sizes;
} ncclEpTensor_t;

typedef struct {
	unsigned size, magic, version, algorithm, num_experts, max_tokens;
	char more[88];
} ncclEpGroupConfig_t;

typedef struct {
	unsigned size, magic;
	ncclEpTensor_t *tokens, *topk_weights, *scales;
} ncclEpInputs_t;

typedef struct {
	unsigned size, magic;
	ncclEpTensor_t *tokens, *topk_weights, *scales, *topk_idx;
} ncclEpOutputs_t;

typedef struct {
	unsigned size, magic, send_only;
} ncclEpExchangeConfig_t;

typedef struct ncclEpGroup *ncclEpGroup_t;
typedef struct ncclEpHandle *ncclEpHandle_t;

_Static_assert(offsetof(ncclEpTensor_t, sizes) == 40, "as in nccl_ep.h");
_Static_assert(sizeof(ncclEpGroupConfig_t) == 112, "as in nccl_ep.h");
_Static_assert(offsetof(ncclEpExchangeConfig_t, send_only) == 8, "as in nccl_ep.h");

#endif

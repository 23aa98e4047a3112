// SPDX-License-Identifier: Apache-2.0
/* Stand-in for libnccl_ep.so of nccl-extensions 0.1.0: the public structures, and a handle and a group
 * that begin like the library's own. */
#include "nccl_ep.h"
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default"), noinline))

struct ncclEpGroup {
	void *comm;
	int n_ranks, rank;
};

struct ncclEpHandle {
	struct ncclEpGroup *group;
	char more[56];
	int num_tokens, num_topk;
};

/* Rank and size lie in the rig's communicator; the caller says them here instead. */
EXPORT int ncclEpCreateGroup(ncclEpGroup_t *group, void *comm, const ncclEpGroupConfig_t *config)
{
	*group = calloc(1, sizeof(**group));
	(*group)->comm = comm;
	(*group)->n_ranks = ((const int *)(config + 1))[0];
	(*group)->rank = ((const int *)(config + 1))[1];
	return 0;
}

EXPORT int ncclEpCreateHandle(ncclEpHandle_t *handle, ncclEpGroup_t group, int layout,
			      const ncclEpTensor_t *topk_idx, const void *info, const void *config,
			      void *stream)
{
	(void)layout, (void)info, (void)config, (void)stream;
	*handle = calloc(1, sizeof(**handle));
	(*handle)->group = group;
	(*handle)->num_tokens = topk_idx->sizes[0];
	(*handle)->num_topk = topk_idx->sizes[1];
	return 0;
}

EXPORT int ncclEpDispatch(ncclEpHandle_t handle, const ncclEpInputs_t *inputs,
			  const ncclEpOutputs_t *outputs, const void *info,
			  const ncclEpExchangeConfig_t *config, void *stream)
{
	(void)handle, (void)inputs, (void)outputs, (void)info, (void)config, (void)stream;
	__asm__ volatile("");
	return 0;
}

EXPORT int ncclEpCombine(ncclEpHandle_t handle, const ncclEpInputs_t *inputs,
			 const ncclEpOutputs_t *outputs, const ncclEpExchangeConfig_t *config,
			 void *stream)
{
	(void)handle, (void)inputs, (void)outputs, (void)config, (void)stream;
	__asm__ volatile("");
	return 0;
}

EXPORT int ncclEpComplete(ncclEpHandle_t handle, const void *config, void *stream)
{
	(void)handle, (void)config, (void)stream;
	return 0;
}

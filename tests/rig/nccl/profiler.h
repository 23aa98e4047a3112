/* The profiler plugin seam: what a plan tells a loaded plugin. */
#ifndef RIG_NCCL_PROFILER_H
#define RIG_NCCL_PROFILER_H

#include "comm.h"

struct profiledWork;

void profilerInit(struct rigComm *rc);
void profilerFinalize(struct rigComm *rc);
void profilerAdd(struct rigComm *rc, struct profiledWork **work, const struct ncclInfo *info);
void profilerKernel(struct rigComm *rc, struct profiledWork *work, bool begin);

#endif

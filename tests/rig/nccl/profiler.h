/* The profiler plugin seam: what a plan tells a loaded plugin. */
#ifndef RIG_NCCL_PROFILER_H
#define RIG_NCCL_PROFILER_H

#include "comm.h"

struct profiledWork;
struct xferList;

void profilerInit(struct rigComm *rc);
void profilerFinalize(struct rigComm *rc);

/* One call of the API. */
void profilerAdd(struct rigComm *rc, struct profiledWork **work, const struct ncclInfo *info);

/* The group is being launched: Coll and P2p events start and stop now, before the work runs. */
void profilerEnqueued(struct rigComm *rc, struct profiledWork *work, bool captured);

/* The device comes to the work, and leaves it: KernelCh events with its time. A send or receive
 * ends when its own transfer in `done` had ended; all begin together. */
void profilerKernel(struct rigComm *rc, struct profiledWork *work, bool begin, bool replayed,
                    const struct xferList *done);
void profilerFree(struct profiledWork *work);

#endif

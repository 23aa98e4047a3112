#include "profiler.h"
void profilerInit(struct rigComm *rc) { (void)rc; }
void profilerFinalize(struct rigComm *rc) { (void)rc; }
void profilerAdd(struct rigComm *rc, struct profiledWork **work, const struct ncclInfo *info) { (void)rc;(void)work;(void)info; }
void profilerKernel(struct rigComm *rc, struct profiledWork *work, bool begin) { (void)rc;(void)work;(void)begin; }

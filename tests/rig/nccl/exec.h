/* What runs on the stream's thread: transfers between pairs and collectives built on them. */
#ifndef RIG_NCCL_EXEC_H
#define RIG_NCCL_EXEC_H

#include "segment.h"

struct xfer {
  int peer;
  bool send;
  char *buffer;
  size_t bytes, done;
  uint64_t readyNs; /* of a receive: when a fault lets it go on; 0 until its first chunk is here */
  uint64_t doneNs;  /* when its last chunk had been copied; 0 before */
  int next; /* the next transfer of this peer and direction, or -1 */
};

struct xferList {
  struct xfer *items;
  int len, cap;
};

bool xferAdd(struct xferList *list, int peer, bool send, const void *buffer, size_t bytes);

/* Runs all transfers at once; those of one peer and direction in their order. */
ncclResult_t transferAll(struct rigComm *rc, struct xferList *list, uint64_t step);

/* One collective. The point-to-point shaped ones (AlltoAll, Gather, Scatter, Send, Recv) are not
 * run here: expandP2p turns them into transfers, which run together. */
ncclResult_t collectiveRun(struct rigComm *rc, const struct ncclInfo *info, uint64_t step);
bool isP2p(ncclFunc_t coll);
bool expandP2p(struct rigComm *rc, const struct ncclInfo *info, struct xferList *out);

void reduceScale(struct rigComm *rc, void *data, size_t count, ncclDataType_t type, ncclRedOp_t op);
void reduceInto(void *acc, const void *in, size_t count, ncclDataType_t type, ncclRedOp_t op);
void reduceFinish(void *acc, size_t count, ncclDataType_t type, ncclRedOp_t op, int nranks);

/* driver.c: libcuda through dlopen, or our own threads where there is none. */
ncclResult_t driverLaunch(ncclStream_t stream, void (*fn)(void *), void *arg);
void driverName(const char *name);
bool driverCapturing(ncclStream_t stream);
int driverDevice(void);
void driverSetDevice(int device);
int driverPhysicalGpu(int device);

#endif

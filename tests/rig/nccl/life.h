/* The asynchronous job that makes a communicator. */
#ifndef RIG_NCCL_LIFE_H
#define RIG_NCCL_LIFE_H

#include "comm.h"

enum jobKind { JOB_INIT, JOB_SPLIT, JOB_SHRINK, JOB_GROW };

struct ncclAsyncJob {
  enum jobKind kind;
  struct ncclComm *comm;      /* being made; NULL for a split with no colour */
  struct ncclComm **newcomm;  /* stored when known (at once for init, at the end for children) */
  struct ncclComm *parent;
  ncclUniqueId id;
  int nranks, rank, cudaDev;
  int color, key, childCount, shrinkCount;
  uint64_t hostTicket; /* order of the parent's host-side exchanges */
  uint64_t magic;      /* of a grown communicator */
  int *exclude, excludeCount;
};

struct ncclComm *commAlloc(const ncclConfig_t *config, const struct ncclComm *parent);
void commFree(struct ncclComm *comm);
ncclResult_t configCheck(const ncclConfig_t *config);
uint64_t uniqueIdMagic(const ncclUniqueId *id);

#endif

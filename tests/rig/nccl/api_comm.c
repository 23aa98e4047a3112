/* The exported life of a communicator: init in its four forms, children, end. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "exec.h"
#include "export.h"
#include "life.h"

static ncclResult_t checkPointer(const void *pointer, const char *name) {
  if (pointer) return ncclSuccess;
  rigWarn("%s argument is NULL", name);
  return ncclInvalidArgument;
}

static ncclAsyncJob *jobNew(enum jobKind kind, struct ncclComm *comm, struct ncclComm **newcomm) {
  ncclAsyncJob *job = calloc(1, sizeof(*job));
  if (!job) return NULL;
  job->kind = kind;
  job->comm = comm;
  job->newcomm = newcomm;
  if (comm) atomic_store(&comm->rig->asyncError, ncclInProgress);
  return job;
}

/* Random first bytes, then the address of the root: the shape of a real unique id. */
static ncclResult_t makeUniqueId(ncclUniqueId *id, const uint64_t *magic) {
  struct sockaddr_in address = {.sin_family = AF_INET};
  uint16_t port;
  uint64_t number;
  if (getrandom(&number, sizeof(number), 0) != sizeof(number)) return ncclSystemError;
  memcpy(&port, &number, sizeof(port));
  if (magic) number = *magic;
  address.sin_port = port;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  memset(id, 0, sizeof(*id));
  memcpy(id->internal, &number, sizeof(number));
  memcpy(id->internal + sizeof(number), &address, sizeof(address));
  return ncclSuccess;
}

RIG_EXPORT(ncclGetUniqueId, ncclUniqueId *id) {
  ncclResult_t result = checkPointer(id, "out");
  return result ? result : makeUniqueId(id, NULL);
}

static ncclResult_t ncclCommInitRankDev(ncclComm_t *newcomm, int nranks, int nId, ncclUniqueId *id,
                                        int rank, int cudaDev, const ncclConfig_t *config)
    __asm__("_Z19ncclCommInitRankDevPP8ncclCommiiP12ncclUniqueIdiiP17ncclConfig_v22800PKc");

__attribute__((noinline)) static ncclResult_t ncclCommInitRankDev(
    ncclComm_t *newcomm, int nranks, int nId, ncclUniqueId *id, int rank, int cudaDev,
    const ncclConfig_t *config) {
  ncclResult_t result = checkPointer(newcomm, "newcomm");
  if (!result) result = checkPointer(id, "uniqueId");
  if (!result) result = configCheck(config);
  if (result) return result;
  if (nranks < 1 || rank < 0 || rank >= nranks || nId < 1 || nId > nranks) {
    rigWarn("Invalid rank requested : %d/%d", rank, nranks);
    return ncclInvalidArgument;
  }
  struct ncclComm *comm = commAlloc(config, NULL);
  ncclAsyncJob *job = comm ? jobNew(JOB_INIT, comm, newcomm) : NULL;
  if (!job) return ncclSystemError;
  job->id = *id; /* of several ids only the first names the communicator */
  job->nranks = nranks;
  job->rank = rank;
  job->cudaDev = cudaDev;
  *newcomm = comm; /* before it is usable, as NCCL does */
  return groupAddJob(job);
}

RIG_EXPORT(ncclCommInitRank, ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
  ncclResult_t result = ncclCommInitRankDev(comm, nranks, 1, &id, rank, driverDevice(), NULL);
  groupFail(result);
  return result;
}

RIG_EXPORT(ncclCommInitRankConfig, ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
           ncclConfig_t *config) {
  ncclResult_t result = ncclCommInitRankDev(comm, nranks, 1, &id, rank, driverDevice(), config);
  groupFail(result);
  return result;
}

RIG_EXPORT(ncclCommInitAll, ncclComm_t *comms, int ndev, const int *devlist) {
  ncclUniqueId id;
  ncclResult_t result = checkPointer(comms, "comms");
  if (!result && ndev < 0) result = ncclInvalidArgument;
  if (!result) result = makeUniqueId(&id, NULL);
  if (result) return result;
  groupStartInternal();
  for (int i = 0; i < ndev && !result; i++) {
    result = ncclCommInitRankDev(&comms[i], ndev, 1, &id, i, devlist ? devlist[i] : i, NULL);
    groupFail(result);
  }
  ncclResult_t end = groupEndInternal(NULL);
  return result ? result : end;
}

RIG_EXPORT(ncclCommSplit, ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
           ncclConfig_t *config) {
  ncclResult_t result = ncclCommCheck(comm);
  if (!result) result = checkPointer(newcomm, "newcomm");
  if (!result) result = configCheck(config);
  if (!result && color < NCCL_SPLIT_NOCOLOR) result = ncclInvalidArgument;
  if (result) {
    groupFail(result);
    return result;
  }
  *newcomm = NULL;
  struct ncclComm *child = color == NCCL_SPLIT_NOCOLOR ? NULL : commAlloc(config, comm);
  ncclAsyncJob *job = jobNew(JOB_SPLIT, child, newcomm);
  if (!job || (!child && color != NCCL_SPLIT_NOCOLOR)) return ncclSystemError;
  job->parent = comm;
  job->color = color;
  job->key = key;
  job->childCount = ++comm->rig->childCount;
  job->hostTicket = turnTake(&comm->rig->host);
  job->cudaDev = comm->cudaDev;
  return groupAddJob(job);
}

static void interrupt(struct rigComm *rc) {
  atomic_store(&rc->abort, 1);
  segInterrupt(rc);
}

static void endWork(struct rigComm *rc) {
  if (rc->initThreadRuns) pthread_join(rc->initThread, NULL);
  turnDrain(&rc->work);
}

RIG_EXPORT(ncclCommFinalize, ncclComm_t comm) {
  ncclResult_t result = ncclCommCheck(comm);
  if (!result) turnDrain(&comm->rig->work);
  return result;
}

RIG_EXPORT(ncclCommDestroy, ncclComm_t comm) {
  if (!comm) return ncclSuccess; /* as NCCL: destroying nothing is fine */
  ncclResult_t result = ncclCommCheck(comm);
  if (result) return result;
  endWork(comm->rig);
  commFree(comm);
  return ncclSuccess;
}

RIG_EXPORT(ncclCommAbort, ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  ncclResult_t result = ncclCommCheck(comm);
  if (result) return result;
  interrupt(comm->rig);
  endWork(comm->rig);
  commFree(comm);
  return ncclSuccess;
}

#if RIG_NCCL_VERSION >= 22800
RIG_EXPORT(ncclCommInitRankScalable, ncclComm_t *newcomm, int nranks, int myrank, int nId,
           ncclUniqueId *ids, ncclConfig_t *config) {
  ncclResult_t result =
      ncclCommInitRankDev(newcomm, nranks, nId, ids, myrank, driverDevice(), config);
  groupFail(result);
  return result;
}

static ncclResult_t shrinkCheck(ncclComm_t comm, const int *exclude, int excludeCount,
                                ncclComm_t *newcomm, const ncclConfig_t *config) {
  ncclResult_t result = ncclCommCheck(comm);
  if (!result) result = checkPointer(newcomm, "newcomm");
  if (!result) result = checkPointer(exclude, "excludeRanksList");
  if (!result) result = configCheck(config);
  if (!result && excludeCount <= 0) result = ncclInvalidArgument;
  for (int i = 0; i < excludeCount && !result; i++) {
    if (exclude[i] == comm->rank) result = ncclInvalidArgument;
  }
  return result;
}

RIG_EXPORT(ncclCommShrink, ncclComm_t comm, int *exclude, int excludeCount, ncclComm_t *newcomm,
           ncclConfig_t *config, int flags) {
  ncclResult_t result = shrinkCheck(comm, exclude, excludeCount, newcomm, config);
  if (result) {
    groupFail(result);
    return result;
  }
  *newcomm = NULL;
  struct ncclComm *child = commAlloc(config, comm);
  ncclAsyncJob *job = child ? jobNew(JOB_SHRINK, child, newcomm) : NULL;
  if (job) job->exclude = malloc((size_t)excludeCount * sizeof(int));
  if (!job || !job->exclude) return ncclSystemError;
  memcpy(job->exclude, exclude, (size_t)excludeCount * sizeof(int));
  job->excludeCount = excludeCount;
  job->parent = comm;
  job->shrinkCount = ++comm->rig->shrinkCount;
  job->cudaDev = comm->cudaDev;
  if (flags & 1) interrupt(comm->rig); /* NCCL_SHRINK_ABORT: the parent's work ends first */
  return groupAddJob(job);
}

/* The id of a grow carries a magic that the old ranks can work out for themselves. */
RIG_EXPORT(ncclCommGetUniqueId, ncclComm_t comm, ncclUniqueId *id) {
  ncclResult_t result = ncclCommCheck(comm);
  if (!result) result = checkPointer(id, "uniqueId");
  if (result) return result;
  uint64_t magic = hashCombine(comm->rig->magic, (uint64_t)(comm->rig->childCount + 1));
  return makeUniqueId(id, &magic);
}

static ncclResult_t growCheck(ncclComm_t comm, int nranks, const ncclUniqueId *id, int rank) {
  if (nranks <= 0) return ncclInvalidArgument;
  if (!comm) return rank < 0 || rank >= nranks || !id ? ncclInvalidArgument : ncclSuccess;
  ncclResult_t result = ncclCommCheck(comm);
  if (!result && (rank != -1 || nranks <= comm->nRanks)) result = ncclInvalidArgument;
  return result;
}

RIG_EXPORT(ncclCommGrow, ncclComm_t comm, int nranks, const ncclUniqueId *id, int rank,
           ncclComm_t *newcomm, ncclConfig_t *config) {
  ncclResult_t result = checkPointer(newcomm, "newcomm");
  if (!result) result = configCheck(config);
  if (!result) result = growCheck(comm, nranks, id, rank);
  if (result) {
    groupFail(result);
    return result;
  }
  struct ncclComm *grown = commAlloc(config, comm);
  ncclAsyncJob *job = grown ? jobNew(JOB_GROW, grown, newcomm) : NULL;
  if (!job) return ncclSystemError;
  job->nranks = nranks;
  job->rank = comm ? comm->rank : rank;
  job->cudaDev = comm ? comm->cudaDev : driverDevice();
  if (comm) comm->rig->childCount++;
  job->magic = comm ? hashCombine(comm->rig->magic, (uint64_t)comm->rig->childCount)
                    : uniqueIdMagic(id);
  *newcomm = grown;
  return groupAddJob(job);
}

RIG_EXPORT(ncclCommRevoke, ncclComm_t comm, int flags) {
  ncclResult_t result = ncclCommCheck(comm);
  if (!result && flags) result = ncclInvalidArgument;
  if (result) return result;
  struct rigComm *rc = comm->rig;
  atomic_store(&rc->revoked, 1);
  interrupt(rc);
  turnDrain(&rc->work);
  atomic_store(&rc->abort, 0);
  return ncclSuccess;
}
#endif

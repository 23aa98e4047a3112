/* Exports that only look something up, or keep a record: getters, errors, memory, user operations. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "exec.h"
#include "export.h"

static __thread char lastError[256];

/* The real library prints it; tools that cannot read machine code find the version by it. */
#if RIG_NCCL_VERSION == 22105
__attribute__((used)) static const char versionText[] = "NCCL version 2.21.5+cuda12.9";
#else
__attribute__((used)) static const char versionText[] = "NCCL version 2.28.9+cuda12.9";
#endif

uint64_t nowNs(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void rigWarn(const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(lastError, sizeof(lastError), format, args);
  va_end(args);
  const char *level = getenv("NCCL_DEBUG");
  if (level && strcmp(level, "VERSION")) fprintf(stderr, "NCCL WARN %s\n", lastError);
}

/* Out of line, so that each getter below holds exactly one load from far inside the structure:
 * tools find the offset of rank by that instruction. */
__attribute__((noinline)) ncclResult_t ncclCommCheck(struct ncclComm *comm) {
  if (!comm) {
    rigWarn("comm argument is NULL");
    return ncclInvalidArgument;
  }
  if (comm->startMagic != COMM_MAGIC || comm->endMagic != COMM_MAGIC) {
    rigWarn("communicator is corrupted");
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

__attribute__((noinline)) static ncclResult_t checkGetter(const struct ncclComm *comm,
                                                          const void *out) {
  ncclResult_t result = ncclCommCheck((struct ncclComm *)(uintptr_t)comm);
  if (!result && !out) result = ncclInvalidArgument;
  if (!result && atomic_load(&comm->rig->asyncError) == ncclInProgress) result = ncclInvalidArgument;
  return result;
}

/* Opaque: a build whose getters do not show in their machine code where the fields are. */
#ifdef RIG_OPAQUE
static volatile size_t fieldPlaces[] = {
  offsetof(struct ncclComm, nRanks),
  offsetof(struct ncclComm, cudaDev),
  offsetof(struct ncclComm, rank),
};
#define FIELD(comm, index, name) (*(const int *)((const char *)(comm) + fieldPlaces[index]))
#else
#define FIELD(comm, index, name) ((comm)->name)
#endif

RIG_EXPORT(ncclCommCount, const ncclComm_t comm, int *count) {
  ncclResult_t result = checkGetter(comm, count);
  if (!result) *count = FIELD(comm, 0, nRanks);
  return result;
}

RIG_EXPORT(ncclCommCuDevice, const ncclComm_t comm, int *device) {
  ncclResult_t result = checkGetter(comm, device);
  if (!result) *device = FIELD(comm, 1, cudaDev);
  return result;
}

RIG_EXPORT(ncclCommUserRank, const ncclComm_t comm, int *rank) {
  ncclResult_t result = checkGetter(comm, rank);
  if (!result) *rank = FIELD(comm, 2, rank);
  return result;
}

RIG_EXPORT(ncclGetVersion, int *version) {
  PUSH_AT_ENTRY();
  if (!version) return ncclInvalidArgument;
  *version = RIG_NCCL_VERSION;
  return ncclSuccess;
}

RIG_EXPORT(ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t *error) {
  ncclResult_t result = ncclCommCheck(comm);
  if (!result && !error) result = ncclInvalidArgument;
  if (!result) *error = (ncclResult_t)atomic_load(&comm->rig->asyncError);
  return result;
}

EXPORT(const char *, ncclGetErrorString, ncclResult_t result) {
  PUSH_AT_ENTRY();
  static const char *const texts[] = {
      "no error",         "unhandled cuda error", "unhandled system error",
      "internal error",   "invalid argument",     "invalid usage",
      "remote process exited or there was a network error", "NCCL operation in progress"};
  return (unsigned)result < 8 ? texts[result] : "unknown result code";
}

EXPORT(const char *, ncclGetLastError, ncclComm_t comm) {
  (void)comm;
  return lastError;
}

RIG_EXPORT(ncclMemAlloc, void **ptr, size_t size) {
  if (!ptr || !size) return ncclInvalidArgument;
  return posix_memalign(ptr, 4096, size) ? ncclSystemError : ncclSuccess;
}

RIG_EXPORT(ncclMemFree, void *ptr) {
  free(ptr);
  return ncclSuccess;
}

/* Registration has no effect here: the handle is a token that deregistration takes back. */
static ncclResult_t registered(struct ncclComm *comm, const void *buff, size_t size, void **handle) {
  ncclResult_t result = ncclCommCheck(comm);
  if (!result && (!handle || !buff || !size)) result = ncclInvalidArgument;
  if (result) return result;
  *handle = malloc(1);
  return *handle ? ncclSuccess : ncclSystemError;
}

RIG_EXPORT(ncclCommRegister, const ncclComm_t comm, void *buff, size_t size, void **handle) {
  return registered(comm, buff, size, handle);
}

RIG_EXPORT(ncclCommDeregister, const ncclComm_t comm, void *handle) {
  ncclResult_t result = ncclCommCheck(comm);
  if (!result) free(handle);
  return result;
}

RIG_EXPORT(ncclRedOpCreatePreMulSum, ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
           ncclScalarResidence_t residence, ncclComm_t comm) {
  ncclResult_t result = ncclCommCheck(comm);
  size_t size = typeSize(datatype);
  (void)residence; /* device memory is host memory */
  if (!result && (!op || !scalar || !size)) result = ncclInvalidArgument;
  if (result) return result;
  for (int i = 0; i < MAX_USER_OPS; i++) {
    struct userOp *user = &comm->rig->userOps[i];
    if (user->used) continue;
    user->used = true;
    user->datatype = datatype;
    memcpy(user->scalar, scalar, size);
    *op = (ncclRedOp_t)(ncclNumOps + i);
    return ncclSuccess;
  }
  return ncclInternalError;
}

RIG_EXPORT(ncclRedOpDestroy, ncclRedOp_t op, ncclComm_t comm) {
  ncclResult_t result = ncclCommCheck(comm);
  int user = (int)op - ncclNumOps;
  if (!result && (user < 0 || user >= MAX_USER_OPS || !comm->rig->userOps[user].used)) {
    result = ncclInvalidArgument;
  }
  if (!result) comm->rig->userOps[user].used = false;
  return result;
}

#if RIG_NCCL_VERSION >= 22800
RIG_EXPORT(ncclCommWindowRegister, ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
           int flags) {
  (void)flags;
  return registered(comm, buff, size, (void **)win);
}

RIG_EXPORT(ncclCommWindowDeregister, ncclComm_t comm, ncclWindow_t win) {
  ncclResult_t result = ncclCommCheck(comm);
  if (!result) free(win);
  return result;
}
#endif

uint64_t rigNcclHash(ncclComm_t comm) { return ncclCommCheck(comm) ? 0 : comm->commHash; }

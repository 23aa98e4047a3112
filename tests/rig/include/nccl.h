/* The public NCCL interface the rig offers, with NCCL's ABI (types, enum values, by-value unique
 * id). Only what a caller needs to compile against libnccl.so.2 is here. */
#ifndef RIG_NCCL_H
#define RIG_NCCL_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#ifndef RIG_NCCL_VERSION
#define RIG_NCCL_VERSION 22809
#endif

typedef struct ncclComm *ncclComm_t;
typedef struct CUstream_st *ncclStream_t; /* cudaStream_t is the driver's CUstream */
typedef struct ncclWindow_vidmem *ncclWindow_t;

typedef struct {
  char internal[128];
} ncclUniqueId;

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
} ncclResult_t;

typedef enum {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12,
} ncclDataType_t;

typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5, /* handles of user operations start here */
} ncclRedOp_t;

#define NCCL_CONFIG_MAGIC 0xcafebeefu
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_SPLIT_NOCOLOR -1

typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char *netName;
  int splitShare, trafficClass;
  const char *commName;
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched;
} ncclConfig_t;
_Static_assert(offsetof(ncclConfig_t, blocking) == 16, "ncclConfig_t ABI");
_Static_assert(offsetof(ncclConfig_t, commName) == 48, "ncclConfig_t ABI");

#define NCCL_CONFIG_INITIALIZER                                                                  \
  {                                                                                              \
    sizeof(ncclConfig_t), NCCL_CONFIG_MAGIC, RIG_NCCL_VERSION, INT_MIN, INT_MIN, INT_MIN,        \
        INT_MIN, NULL, INT_MIN, INT_MIN, NULL, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN,      \
        INT_MIN                                                                                  \
  }

typedef struct {
  size_t size;
  unsigned magic, version;
  float estimatedTime;
} ncclSimInfo_t;

typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

/* One list makes the ncclX and pncclX declarations, so a name cannot be forgotten in either. */
#define RIG_NCCL_API(X)                                                                           \
  X(ncclGetVersion, int *version)                                                                 \
  X(ncclGetUniqueId, ncclUniqueId *id)                                                            \
  X(ncclCommInitRank, ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)                    \
  X(ncclCommInitRankConfig, ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,              \
    ncclConfig_t *config)                                                                         \
  X(ncclCommInitAll, ncclComm_t *comms, int ndev, const int *devlist)                             \
  X(ncclCommSplit, ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config) \
  X(ncclCommFinalize, ncclComm_t comm)                                                            \
  X(ncclCommDestroy, ncclComm_t comm)                                                             \
  X(ncclCommAbort, ncclComm_t comm)                                                               \
  X(ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t *error)                                  \
  X(ncclCommCount, const ncclComm_t comm, int *count)                                             \
  X(ncclCommCuDevice, const ncclComm_t comm, int *device)                                         \
  X(ncclCommUserRank, const ncclComm_t comm, int *rank)                                           \
  X(ncclCommRegister, const ncclComm_t comm, void *buff, size_t size, void **handle)              \
  X(ncclCommDeregister, const ncclComm_t comm, void *handle)                                      \
  X(ncclMemAlloc, void **ptr, size_t size)                                                        \
  X(ncclMemFree, void *ptr)                                                                       \
  X(ncclRedOpCreatePreMulSum, ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,             \
    ncclScalarResidence_t residence, ncclComm_t comm)                                             \
  X(ncclRedOpDestroy, ncclRedOp_t op, ncclComm_t comm)                                            \
  X(ncclGroupStart, void)                                                                         \
  X(ncclGroupEnd, void)                                                                           \
  X(ncclAllReduce, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,   \
    ncclRedOp_t op, ncclComm_t comm, ncclStream_t stream)                                         \
  X(ncclBroadcast, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,   \
    int root, ncclComm_t comm, ncclStream_t stream)                                               \
  X(ncclBcast, void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,      \
    ncclStream_t stream)                                                                          \
  X(ncclReduce, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,      \
    ncclRedOp_t op, int root, ncclComm_t comm, ncclStream_t stream)                               \
  X(ncclAllGather, const void *sendbuff, void *recvbuff, size_t sendcount,                        \
    ncclDataType_t datatype, ncclComm_t comm, ncclStream_t stream)                                \
  X(ncclReduceScatter, const void *sendbuff, void *recvbuff, size_t recvcount,                    \
    ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, ncclStream_t stream)                \
  X(ncclSend, const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,              \
    ncclComm_t comm, ncclStream_t stream)                                                         \
  X(ncclRecv, void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,   \
    ncclStream_t stream)

/* Exports that 2.21.5 did not have yet. */
#define RIG_NCCL_API_NEW(X)                                                                       \
  X(ncclCommInitRankScalable, ncclComm_t *newcomm, int nranks, int myrank, int nId,               \
    ncclUniqueId *ids, ncclConfig_t *config)                                                      \
  X(ncclCommShrink, ncclComm_t comm, int *exclude, int excludeCount, ncclComm_t *newcomm,         \
    ncclConfig_t *config, int flags)                                                              \
  X(ncclCommGetUniqueId, ncclComm_t comm, ncclUniqueId *id)                                       \
  X(ncclCommGrow, ncclComm_t comm, int nranks, const ncclUniqueId *id, int rank,                  \
    ncclComm_t *newcomm, ncclConfig_t *config)                                                    \
  X(ncclCommRevoke, ncclComm_t comm, int flags)                                                   \
  X(ncclCommWindowRegister, ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,          \
    int flags)                                                                                    \
  X(ncclCommWindowDeregister, ncclComm_t comm, ncclWindow_t win)                                  \
  X(ncclGroupSimulateEnd, ncclSimInfo_t *info)                                                    \
  X(ncclAlltoAll, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,    \
    ncclComm_t comm, ncclStream_t stream)                                                         \
  X(ncclGather, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,      \
    int root, ncclComm_t comm, ncclStream_t stream)                                               \
  X(ncclScatter, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,     \
    int root, ncclComm_t comm, ncclStream_t stream)

#define RIG_NCCL_DECLARE(name, ...)                                                               \
  ncclResult_t name(__VA_ARGS__);                                                                 \
  ncclResult_t p##name(__VA_ARGS__);

/* A program that is also to run with the old library refers to the new names weakly. */
#ifdef RIG_NCCL_WEAK_NEW
#define RIG_NCCL_DECLARE_NEW(name, ...) __attribute__((weak)) ncclResult_t name(__VA_ARGS__);
#else
#define RIG_NCCL_DECLARE_NEW RIG_NCCL_DECLARE
#endif

#pragma GCC visibility push(default)
RIG_NCCL_API(RIG_NCCL_DECLARE)
RIG_NCCL_API_NEW(RIG_NCCL_DECLARE_NEW)
const char *ncclGetErrorString(ncclResult_t result);
const char *pncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);
const char *pncclGetLastError(ncclComm_t comm);

/* Rig only. A tag is carried by the operations a thread enqueues after setting it; the observer is
 * called on the stream's thread when the work of one operation is over. */
typedef struct {
  uint64_t tag, step, commHash, beginNs, endNs;
  int result, isP2p;
} rigNcclWork;
void rigNcclTag(uint64_t tag);
void rigNcclSetStep(uint64_t step);
void rigNcclObserve(void (*observer)(const rigNcclWork *));
uint64_t rigNcclHash(ncclComm_t comm);
#pragma GCC visibility pop

#endif

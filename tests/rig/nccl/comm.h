/* What the files of the stand-in NCCL share: the communicator and its hidden half. */
#ifndef RIG_NCCL_COMM_H
#define RIG_NCCL_COMM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "nccl.h"

/* Where the real structure keeps what tools read, by version (from its DWARF). */
#if RIG_NCCL_VERSION == 22105
enum { COMM_SIZE = 16288, COMM_HASH = 13528, COMM_RANK = 13536, COMM_NODE = 13708 };
#else
enum { COMM_SIZE = 1082968, COMM_HASH = 1066184, COMM_RANK = 1066192, COMM_NODE = 1066372 };
#endif
#define COMM_MAGIC 0x0280028002800280ull

struct rigComm;

struct ncclComm {
  uint64_t startMagic;
  struct rigComm *rig; /* ours, in what is padding to everyone else */
  char pad0[COMM_HASH - 16];
  uint64_t commHash;
  int rank, nRanks, cudaDev, nvmlDev;
  char pad1[16];
  int64_t busId;
  char pad2[COMM_NODE - (COMM_RANK + 40)];
  int node, nNodes, localRank, localRanks;
  char pad3[COMM_SIZE - (COMM_NODE + 16) - 8];
  uint64_t endMagic;
};
_Static_assert(sizeof(struct ncclComm) == COMM_SIZE, "ncclComm ABI");
_Static_assert(offsetof(struct ncclComm, commHash) == COMM_HASH, "ncclComm ABI");
_Static_assert(offsetof(struct ncclComm, rank) == COMM_RANK, "ncclComm ABI");
_Static_assert(offsetof(struct ncclComm, nvmlDev) == COMM_RANK + 12, "ncclComm ABI");
_Static_assert(offsetof(struct ncclComm, busId) == COMM_RANK + 32, "ncclComm ABI");
_Static_assert(offsetof(struct ncclComm, node) == COMM_NODE, "ncclComm ABI");
_Static_assert(offsetof(struct ncclComm, endMagic) == COMM_SIZE - 8, "ncclComm ABI");

typedef enum {
  ncclFuncBroadcast = 0,
  ncclFuncReduce = 1,
  ncclFuncAllGather = 2,
  ncclFuncReduceScatter = 3,
  ncclFuncAllReduce = 4,
  ncclFuncSendRecv = 5,
  ncclFuncSend = 6,
  ncclFuncRecv = 7,
  ncclFuncAlltoAll = 8,
  ncclFuncScatter = 9,
  ncclFuncGather = 10,
} ncclFunc_t;

/* The argument of ncclEnqueueCheck; the first 80 bytes are the same from 2.18 to 2.32. */
struct ncclInfo {
  ncclFunc_t coll;
  const char *opName;
  const void *sendbuff;
  void *recvbuff; /* the only buffer of Send and Recv */
  size_t count;
  ncclDataType_t datatype;
  ncclRedOp_t op;
  int root; /* or peer */
  ncclComm_t comm;
  ncclStream_t stream;
  int chunkSteps, sliceSteps;
};
_Static_assert(offsetof(struct ncclInfo, opName) == 8, "ncclInfo ABI");
_Static_assert(offsetof(struct ncclInfo, recvbuff) == 24, "ncclInfo ABI");
_Static_assert(offsetof(struct ncclInfo, count) == 32, "ncclInfo ABI");
_Static_assert(offsetof(struct ncclInfo, root) == 48, "ncclInfo ABI");
_Static_assert(offsetof(struct ncclInfo, comm) == 56, "ncclInfo ABI");
_Static_assert(offsetof(struct ncclInfo, stream) == 64, "ncclInfo ABI");
_Static_assert(sizeof(struct ncclInfo) == 80, "ncclInfo ABI");

enum { MAX_USER_OPS = 64 };

struct userOp {
  bool used;
  ncclDataType_t datatype;
  unsigned char scalar[8];
};

/* Operations of one communicator run one at a time, in the order the host launched them. */
struct turnstile {
  pthread_mutex_t lock;
  pthread_cond_t moved;
  uint64_t given, turn;
};

struct segment;

struct rigComm {
  struct ncclComm *comm;
  struct segment *seg;
  uint64_t key;   /* names the shared memory */
  uint64_t magic; /* NCCL's own, the base of a grown communicator's hash */
  int childCount, shrinkCount;
  uint64_t chunkCount; /* parity of the double-buffered slots */
  struct turnstile work, host;
  _Atomic int abort, revoked, asyncError;
  bool blocking;
  pthread_t initThread;
  bool initThreadRuns;
  char commName[64];
  struct userOp userOps[MAX_USER_OPS];
  struct profiled *profiler;
};

uint64_t turnTake(struct turnstile *t);
void turnWait(struct turnstile *t, uint64_t ticket);
void turnDone(struct turnstile *t);
void turnDrain(struct turnstile *t);

/* Arguments as NCCL checks them: NULL or damaged gives ncclInvalidArgument. */
ncclResult_t ncclCommCheck(struct ncclComm *comm);
size_t typeSize(ncclDataType_t type);
uint64_t nowNs(void);
void rigWarn(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *rigLastError(void);

/* hash.c */
uint64_t hashNew(const void *bytes, size_t size);
uint64_t hashOld(const void *bytes, size_t size);
uint64_t hashUniqueId(const ncclUniqueId *id);
uint64_t hashCombine(uint64_t base, uint64_t value);
uint64_t hashChild(uint64_t parent, int childCount, int color);
uint64_t hashChildNew(uint64_t parent, int childCount, int color);

/* groups.c */
typedef struct ncclAsyncJob ncclAsyncJob;
struct plan;
ncclResult_t groupStartInternal(void);
ncclResult_t groupEndInternal(ncclSimInfo_t *info)
    __asm__("_Z20ncclGroupEndInternalP18ncclSimInfo_v22200");
void groupFail(ncclResult_t error);
bool groupAddTask(const struct ncclInfo *info);
ncclResult_t groupAddJob(ncclAsyncJob *job);

/* enqueue.c: a mangled local name, as the C++ compiler gives the real one. */
ncclResult_t ncclEnqueueCheck(struct ncclInfo *info) __asm__("_Z16ncclEnqueueCheckP8ncclInfo");

/* life.c */
ncclResult_t ncclCommInitRankFunc(ncclAsyncJob *job)
    __asm__("_Z20ncclCommInitRankFuncP12ncclAsyncJob");
void asyncJobFree(ncclAsyncJob *job);

/* plan.c */
struct plan *planNew(struct rigComm *rc, ncclStream_t stream);
bool planAdd(struct plan *plan, const struct ncclInfo *info);
ncclResult_t planLaunch(struct plan *plan);
void planFree(struct plan *plan);

#endif

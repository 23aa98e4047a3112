/* Every kind of NCCL call in a fixed order, each rank on a thread of its own, counted at the call.
 * The counts printed are those of calls made here; that ncclBcast calls ncclBroadcast, and that
 * ncclCommInitAll does not call ncclCommInitRank, is for the reader of the counts to know. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "call.h"

enum { ELEMENTS = 32 };

#define KINDS(X)                                                                                  \
  X(ncclGetVersion) X(ncclGetUniqueId) X(ncclCommInitRank) X(ncclCommInitRankConfig)              \
  X(ncclCommInitRankScalable) X(ncclCommInitAll) X(ncclCommSplit) X(ncclCommShrink)               \
  X(ncclCommFinalize) X(ncclCommDestroy) X(ncclCommAbort) X(ncclCommCount) X(ncclCommUserRank)    \
  X(ncclCommCuDevice) X(ncclCommGetAsyncError) X(ncclCommRegister) X(ncclCommDeregister)          \
  X(ncclCommWindowRegister) X(ncclCommWindowDeregister) X(ncclMemAlloc) X(ncclMemFree)            \
  X(ncclRedOpCreatePreMulSum) X(ncclRedOpDestroy) X(ncclGroupStart) X(ncclGroupEnd)               \
  X(ncclGroupSimulateEnd) X(ncclAllReduce) X(ncclBroadcast) X(ncclBcast) X(ncclReduce)            \
  X(ncclAllGather) X(ncclReduceScatter) X(ncclAlltoAll) X(ncclGather) X(ncclScatter) X(ncclSend)  \
  X(ncclRecv) X(cuStreamCreate) X(cuStreamSynchronize) X(cuStreamDestroy_v2)

#define KIND_NAME(name) KIND_##name,
#define KIND_TEXT(name) #name,
enum kind { KINDS(KIND_NAME) KIND_COUNT };
static const char *const names[KIND_COUNT] = {KINDS(KIND_TEXT)};
static uint64_t counts[KIND_COUNT];

/* Skipped where the library is too old to have it. */
#define MAY(name, ...)                                                                            \
  do {                                                                                            \
    if (name) DO(name, __VA_ARGS__);                                                              \
  } while (0)

#define DO(name, ...)                                                                             \
  do {                                                                                            \
    __atomic_fetch_add(&counts[KIND_##name], 1, __ATOMIC_RELAXED);                                \
    must(name(__VA_ARGS__), #name);                                                               \
  } while (0)

struct side {
  pthread_t thread;
  int rank;
  ncclComm_t comm;
  CUstream stream;
  float *in, *out;
};

enum { IDS_A_ROUND = 2 };
static ncclUniqueId worldId, *roundIds; /* two a round: an id serves once */

static void collectives(struct side *s) {
  ncclComm_t c = s->comm;
  CUstream q = s->stream;
  float *in = s->in, *out = s->out;
  DO(ncclAllReduce, in, out, ELEMENTS, ncclFloat32, ncclSum, c, q);
  DO(ncclBroadcast, in, out, ELEMENTS, ncclFloat32, 0, c, q);
  DO(ncclBcast, out, ELEMENTS, ncclFloat32, 0, c, q);
  DO(ncclReduce, in, out, ELEMENTS, ncclFloat32, ncclMax, 0, c, q);
  DO(ncclAllGather, in, out, ELEMENTS, ncclFloat32, c, q);
  DO(ncclReduceScatter, in, out, ELEMENTS, ncclFloat32, ncclSum, c, q);
  MAY(ncclAlltoAll, in, out, ELEMENTS, ncclFloat32, c, q);
  MAY(ncclGather, in, out, ELEMENTS, ncclFloat32, 0, c, q);
  MAY(ncclScatter, in, out, ELEMENTS, ncclFloat32, 0, c, q);
}

/* One group around a ring of sends and receives, with a second group inside it. */
static void groups(struct side *s) {
  int next = (s->rank + 1) % options.ranks, last = (s->rank + options.ranks - 1) % options.ranks;
  DO(ncclGroupStart);
  DO(ncclSend, s->in, ELEMENTS, ncclFloat32, next, s->comm, s->stream);
  DO(ncclGroupStart);
  DO(ncclAllReduce, s->in, s->out, ELEMENTS, ncclFloat32, ncclSum, s->comm, s->stream);
  DO(ncclGroupEnd);
  DO(ncclRecv, s->out, ELEMENTS, ncclFloat32, last, s->comm, s->stream);
  DO(ncclGroupEnd);
  DO(ncclGroupStart);
  DO(ncclAllReduce, s->in, s->out, ELEMENTS, ncclFloat32, ncclSum, s->comm, s->stream);
  DO(ncclAllReduce, s->in, s->out, ELEMENTS, ncclFloat32, ncclSum, s->comm, s->stream);
  DO(ncclGroupEnd);
  ncclSimInfo_t info = {.size = sizeof(info)};
  if (!ncclGroupSimulateEnd) return;
  DO(ncclGroupStart);
  DO(ncclAllReduce, s->in, s->out, ELEMENTS, ncclFloat32, ncclSum, s->comm, s->stream);
  DO(ncclGroupSimulateEnd, &info);
}

static void lookups(struct side *s) {
  int number;
  void *handle, *memory;
  ncclResult_t error;
  ncclRedOp_t op;
  ncclWindow_t window = NULL;
  float half = 0.5f;
  DO(ncclGetVersion, &number);
  DO(ncclCommCount, s->comm, &number);
  DO(ncclCommUserRank, s->comm, &number);
  DO(ncclCommCuDevice, s->comm, &number);
  DO(ncclCommGetAsyncError, s->comm, &error);
  DO(ncclMemAlloc, &memory, 4096);
  DO(ncclCommRegister, s->comm, memory, 4096, &handle);
  DO(ncclCommDeregister, s->comm, handle);
  MAY(ncclCommWindowRegister, s->comm, memory, 4096, &window, 0);
  MAY(ncclCommWindowDeregister, s->comm, window);
  DO(ncclMemFree, memory);
  DO(ncclRedOpCreatePreMulSum, &op, &half, ncclFloat32, ncclScalarHostImmediate, s->comm);
  DO(ncclAllReduce, s->in, s->out, ELEMENTS, ncclFloat32, op, s->comm, s->stream);
  DO(cuStreamSynchronize, s->stream);
  DO(ncclRedOpDestroy, op, s->comm);
}

static void children(struct side *s, const ncclUniqueId *ids) {
  ncclComm_t split, shrunk, other;
  int excluded = options.ranks - 1;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.commName = "known";
  DO(ncclCommSplit, s->comm, s->rank % 2, s->rank, &split, NULL);
  DO(ncclAllReduce, s->in, s->out, ELEMENTS, ncclFloat32, ncclSum, split, s->stream);
  DO(cuStreamSynchronize, s->stream);
  DO(ncclCommDestroy, split);
  if (ncclCommShrink && options.ranks > 1 && s->rank != excluded) {
    DO(ncclCommShrink, s->comm, &excluded, 1, &shrunk, NULL, 0);
    DO(ncclCommAbort, shrunk);
  }
  DO(ncclCommInitRankConfig, &other, options.ranks, ids[0], s->rank, &config);
  DO(ncclCommFinalize, other);
  DO(ncclCommDestroy, other);
  if (!ncclCommInitRankScalable) return;
  ncclUniqueId copy = ids[1];
  DO(ncclCommInitRankScalable, &other, options.ranks, s->rank, 1, &copy, &config);
  DO(ncclCommDestroy, other);
}

static void *runSide(void *arg) {
  struct side *s = arg;
  size_t bytes = (size_t)ELEMENTS * MAX_RANKS * sizeof(float);
  CUcontext context;
  s->in = calloc(1, bytes);
  s->out = calloc(1, bytes);
  must(!s->in || !s->out, "calloc");
  must(cuDevicePrimaryCtxRetain(&context, s->rank) || cuCtxSetCurrent(context), "device");
  DO(cuStreamCreate, &s->stream, CU_STREAM_NON_BLOCKING);
  DO(ncclCommInitRank, &s->comm, options.ranks, worldId, s->rank);
  for (int i = 0; i < options.repeat; i++) {
    collectives(s);
    groups(s);
    lookups(s);
    children(s, roundIds + (size_t)i * IDS_A_ROUND);
  }
  DO(cuStreamSynchronize, s->stream);
  DO(ncclCommDestroy, s->comm);
  DO(cuStreamDestroy_v2, s->stream);
  free(s->in);
  free(s->out);
  return NULL;
}

/* One thread, all ranks: creation in a group, and one operation of every rank in one group. */
static void initAll(void) {
  ncclComm_t comms[MAX_RANKS];
  CUstream streams[MAX_RANKS]; /* one each: on a common stream the ranks would wait for ever */
  float buffers[MAX_RANKS][ELEMENTS] = {{0}};
  DO(ncclCommInitAll, comms, options.ranks, NULL);
  for (int i = 0; i < options.ranks; i++) DO(cuStreamCreate, &streams[i], CU_STREAM_NON_BLOCKING);
  DO(ncclGroupStart);
  for (int i = 0; i < options.ranks; i++) {
    DO(ncclAllReduce, buffers[i], buffers[i], ELEMENTS, ncclFloat32, ncclSum, comms[i],
       streams[i]);
  }
  DO(ncclGroupEnd);
  for (int i = 0; i < options.ranks; i++) {
    DO(cuStreamSynchronize, streams[i]);
    DO(ncclCommDestroy, comms[i]);
    DO(cuStreamDestroy_v2, streams[i]);
  }
}

void runKnown(void) {
  struct side sides[MAX_RANKS] = {{0}};
  must(cuInit(0), "cuInit");
  roundIds = calloc((size_t)options.repeat * IDS_A_ROUND, sizeof(*roundIds));
  must(!roundIds, "calloc");
  DO(ncclGetUniqueId, &worldId);
  for (int i = 0; i < options.repeat * IDS_A_ROUND; i++) DO(ncclGetUniqueId, &roundIds[i]);
  for (int i = 0; i < options.ranks; i++) {
    sides[i].rank = i;
    must(pthread_create(&sides[i].thread, NULL, runSide, &sides[i]), "pthread_create");
  }
  for (int i = 0; i < options.ranks; i++) pthread_join(sides[i].thread, NULL);
  initAll();
  printf("{\"ranks\": %d, \"repeat\": %d, \"calls\": {", options.ranks, options.repeat);
  for (int i = 0; i < KIND_COUNT; i++) {
    printf("%s\"%s\": %llu", i ? ", " : "", names[i], (unsigned long long)counts[i]);
  }
  printf("}}\n");
}

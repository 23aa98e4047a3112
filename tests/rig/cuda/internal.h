/* What the files of the stand-in driver share. */
#ifndef RIG_CUDA_INTERNAL_H
#define RIG_CUDA_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "rigcuda.h"
#include "rigtopo.h"

#define API __attribute__((visibility("default")))

enum opKind { OP_KERNEL, OP_HOST, OP_COPY, OP_RECORD, OP_WAIT, OP_GRAPH };

/* One entry of a stream's queue, or one node of a graph. Plain data, so a graph can replay it. */
struct op {
  enum opKind kind;
  uint64_t ns;      /* OP_KERNEL: how long it runs */
  const double *scale; /* OP_KERNEL: stretches ns, read when it runs; may be NULL */
  uint64_t queued;  /* when the host enqueued it */
  uint64_t gen;     /* OP_RECORD, OP_WAIT: which record of the event */
  CUhostFn fn;
  void *arg;
  void *dst;
  const void *src;
  size_t bytes;
  struct CUevent_st *event;
  struct CUgraphExec_st *graph;
  const char *name;     /* of a kernel; NULL: none */
  uint32_t correlation; /* of the launch; 0: nobody is told */
};

struct opList {
  struct op *items;
  size_t len, cap;
};

struct CUgraph_st {
  struct opList ops;
};

struct CUgraphExec_st {
  struct opList ops;
};

struct CUevent_st {
  pthread_mutex_t lock;
  pthread_cond_t done;
  uint64_t recorded, completed;
};

struct CUfunc_st {
  char name[64];
  bool scaled;
};

uint64_t nowNs(void);
bool opListAdd(struct opList *list, const struct op *op);
void opListFree(struct opList *list);

/* Resolves 0, the legacy (1) and per-thread (2) handles; ptsz decides what 0 means. */
struct CUstream_st *streamResolve(CUstream stream, bool ptsz);
CUresult streamPush(struct CUstream_st *s, struct op op);
CUresult streamDrain(struct CUstream_st *s);
CUresult streamIdle(struct CUstream_st *s);
bool streamCapturing(struct CUstream_st *s);
CUresult streamCaptureBegin(struct CUstream_st *s);
CUresult streamCaptureEnd(struct CUstream_st *s, CUgraph *out);
struct CUstream_st *streamNew(unsigned flags);
void streamFree(struct CUstream_st *s);
CUresult streamDrainAll(bool blockingOnly);

void eventComplete(struct CUevent_st *event, uint64_t gen);
void eventWait(struct CUevent_st *event, uint64_t gen);

int currentDevice(void);

/* inject.c: kernels of one stream that are to be told of. Filled and emptied by its worker. */
enum { TOLD_MOST = 256 };
struct toldRow {
  uint64_t start, end;
  const char *name;
  uint32_t correlation;
  uint64_t node;
  bool host;
};
struct told {
  struct toldRow rows[TOLD_MOST];
  int count;
  uint32_t correlation, graph; /* of what runs now */
  uint64_t node;
};
void injectOpen(void);
const char *injectTakeName(void);
uint32_t injectCorrelation(void);
void injectLaunched(uint32_t correlation, bool graph);
void injectRan(struct told *told, const struct op *op, uint64_t start, uint64_t end);
void injectFlush(struct told *told);

#endif

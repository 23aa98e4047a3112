/* Loads an NCCL profiler plugin as NCCL 2.28 does and feeds it Coll, P2p and KernelCh events.
 *
 * Plugin tables v5 and v4 are understood. The plugin must be there when the communicator is made.
 * Operations of a captured graph report at each replay, as they do with KernelCh enabled. Every
 * operation has one channel here, number 0. The library of before 2.23 has no profiler. */
#include "profiler.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#if RIG_NCCL_VERSION < 22300
void profilerInit(struct rigComm *rc) { (void)rc; }
void profilerFinalize(struct rigComm *rc) { (void)rc; }
void profilerAdd(struct rigComm *rc, struct profiledWork **work, const struct ncclInfo *info) {
  (void)rc, (void)work, (void)info;
}
void profilerEnqueued(struct rigComm *rc, struct profiledWork *work, bool captured) {
  (void)rc, (void)work, (void)captured;
}
void profilerKernel(struct rigComm *rc, struct profiledWork *work, bool begin, bool replayed) {
  (void)rc, (void)work, (void)begin, (void)replayed;
}
void profilerFree(struct profiledWork *work) { (void)work; }
#else

enum { EVENT_COLL = 2, EVENT_P2P = 4, EVENT_KERNEL_CH = 64 };
enum { STATE_KERNEL_CH_STOP = 22 };

/* Descriptor of v5; v4 differs in the width of type, which little-endian hides, and ends earlier. */
struct descriptor {
  uint64_t type;
  void *parent;
  int rank;
  union {
    struct {
      uint64_t seq;
      const char *func;
      const void *send;
      void *recv;
      uint64_t count;
      int root;
      const char *datatype;
      uint8_t nChannels, nWarps;
      const char *algo, *proto;
      void *parentGroup;
    } coll;
    struct {
      const char *func;
      void *buffer;
      const char *datatype;
      uint64_t count;
      int peer;
      uint8_t nChannels;
      void *parentGroup;
    } p2p;
    struct {
      uint8_t channel;
      uint64_t timer;
    } kernel;
  };
};
_Static_assert(offsetof(struct descriptor, coll) == 24, "profiler ABI");
_Static_assert(offsetof(struct descriptor, coll.root) == 64, "profiler ABI");
_Static_assert(offsetof(struct descriptor, coll.nChannels) == 80, "profiler ABI");
_Static_assert(offsetof(struct descriptor, coll.parentGroup) == 104, "profiler ABI");
_Static_assert(offsetof(struct descriptor, p2p.peer) == 56, "profiler ABI");
_Static_assert(offsetof(struct descriptor, p2p.parentGroup) == 64, "profiler ABI");
_Static_assert(offsetof(struct descriptor, kernel.timer) == 32, "profiler ABI");

typedef void (*logger)(int level, unsigned long flags, const char *file, int line,
                       const char *format, ...);
typedef int (*initV4)(void **, int *, const char *, uint64_t, int, int, int, logger);
typedef int (*initV5)(void **, uint64_t, int *, const char *, int, int, int, logger);

struct table {
  const char *name;
  void *init;
  int (*start)(void *, void **, struct descriptor *);
  int (*stop)(void *);
  int (*state)(void *, int, void *);
  int (*finalize)(void *);
};

struct profiled {
  void *context;
  int mask;
  uint64_t seq[16];
};

struct profiledTask {
  struct descriptor what;
  void *handle, *kernel;
};

struct profiledWork {
  struct profiledTask *tasks;
  int len, cap;
};

static const struct table *plugin;
static int version;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void quiet(int level, unsigned long flags, const char *file, int line, const char *format,
                  ...) {
  (void)level, (void)flags, (void)file, (void)line, (void)format;
}

static void *openPlugin(void) {
  const char *name = getenv("NCCL_PROFILER_PLUGIN");
  char path[512];
  if (name && !strcasecmp(name, "none")) return NULL;
  if (!name || !*name) return dlopen("libnccl-profiler.so", RTLD_NOW | RTLD_LOCAL);
  if (!strcmp(name, "STATIC_PLUGIN")) return dlopen(NULL, RTLD_NOW);
  void *lib = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (lib) return lib;
  snprintf(path, sizeof(path), "libnccl-profiler-%s.so", name);
  return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static void load(void) {
  void *lib = openPlugin();
  if (!lib) return;
  for (version = 5; version >= 4 && !plugin; version--) {
    char symbol[32];
    snprintf(symbol, sizeof(symbol), "ncclProfiler_v%d", version);
    plugin = dlsym(lib, symbol);
  }
  version++;
}

void profilerInit(struct rigComm *rc) {
  pthread_once(&once, load);
  struct profiled *p = plugin ? calloc(1, sizeof(*p)) : NULL;
  if (!p) return;
  struct ncclComm *c = rc->comm;
  const char *name = rc->commName[0] ? rc->commName : NULL;
  int failed = version == 5
                   ? ((initV5)plugin->init)(&p->context, c->commHash, &p->mask, name, c->nNodes,
                                            c->nRanks, c->rank, quiet)
                   : ((initV4)plugin->init)(&p->context, &p->mask, name, c->commHash, c->nNodes,
                                            c->nRanks, c->rank, quiet);
  if (failed) {
    free(p);
    return;
  }
  rc->profiler = p;
}

void profilerFinalize(struct rigComm *rc) {
  if (!rc->profiler) return;
  plugin->finalize(rc->profiler->context);
  free(rc->profiler);
  rc->profiler = NULL;
}

static const char *typeName(ncclDataType_t type) {
  static const char *const names[ncclNumTypes] = {
      "ncclInt8",    "ncclUint8",   "ncclInt32",   "ncclUint32",   "ncclInt64",     "ncclUint64",
      "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};
  return names[type];
}

static void addTask(struct profiledWork *work, const struct descriptor *what) {
  if (work->len == work->cap) {
    int cap = work->cap ? 2 * work->cap : 8;
    struct profiledTask *tasks = realloc(work->tasks, (size_t)cap * sizeof(*tasks));
    if (!tasks) return;
    work->tasks = tasks;
    work->cap = cap;
  }
  work->tasks[work->len++] = (struct profiledTask){.what = *what};
}

static void addCollective(struct rigComm *rc, struct profiledWork *work,
                          const struct ncclInfo *info) {
  struct descriptor d = {.type = EVENT_COLL, .rank = rc->comm->rank};
  d.coll.seq = rc->profiler->seq[info->coll]++;
  d.coll.func = info->opName;
  d.coll.send = info->sendbuff;
  d.coll.recv = info->recvbuff;
  d.coll.count = info->count;
  d.coll.root = info->root;
  d.coll.datatype = typeName(info->datatype);
  d.coll.nChannels = 1;
  d.coll.nWarps = 16;
  d.coll.algo = "RING";
  d.coll.proto = "SIMPLE";
  addTask(work, &d);
}

static void addPeer(struct rigComm *rc, struct profiledWork *work, const struct ncclInfo *info,
                    bool send, int peer) {
  struct descriptor d = {.type = EVENT_P2P, .rank = rc->comm->rank};
  d.p2p.func = send ? "Send" : "Recv";
  d.p2p.buffer = send && info->sendbuff ? (void *)(uintptr_t)info->sendbuff : info->recvbuff;
  d.p2p.datatype = typeName(info->datatype);
  d.p2p.count = info->count;
  d.p2p.peer = peer;
  d.p2p.nChannels = 1;
  addTask(work, &d);
}

/* All-to-all, gather and scatter show as the sends and receives that they are made of. */
static void addTasks(struct rigComm *rc, struct profiledWork *work, const struct ncclInfo *info) {
  bool root = rc->comm->rank == info->root;
  switch (info->coll) {
    case ncclFuncSend: addPeer(rc, work, info, true, info->root); return;
    case ncclFuncRecv: addPeer(rc, work, info, false, info->root); return;
    case ncclFuncGather: addPeer(rc, work, info, true, info->root); break;
    case ncclFuncScatter: addPeer(rc, work, info, false, info->root); break;
    case ncclFuncAlltoAll: break;
    default: addCollective(rc, work, info); return;
  }
  for (int peer = 0; peer < rc->comm->nRanks; peer++) {
    bool all = info->coll == ncclFuncAlltoAll;
    if (all || (info->coll == ncclFuncScatter && root)) addPeer(rc, work, info, true, peer);
    if (all || (info->coll == ncclFuncGather && root)) addPeer(rc, work, info, false, peer);
  }
}

void profilerAdd(struct rigComm *rc, struct profiledWork **work, const struct ncclInfo *info) {
  if (!rc->profiler || !(rc->profiler->mask & (EVENT_COLL | EVENT_P2P | EVENT_KERNEL_CH))) return;
  if (!*work) *work = calloc(1, sizeof(**work));
  if (*work) addTasks(rc, *work, info);
}

static void begin(struct rigComm *rc, struct profiledWork *work) {
  for (int i = 0; i < work->len; i++) {
    struct profiledTask *task = &work->tasks[i];
    task->handle = NULL;
    if (!(rc->profiler->mask & (int)task->what.type)) continue;
    plugin->start(rc->profiler->context, &task->handle, &task->what);
    if (task->handle) plugin->stop(task->handle);
  }
}

void profilerEnqueued(struct rigComm *rc, struct profiledWork *work, bool captured) {
  if (work && !captured) begin(rc, work);
}

/* The device's globaltimer counts nanoseconds of its own; here it is the wall clock. */
static uint64_t deviceTimer(void) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void profilerKernel(struct rigComm *rc, struct profiledWork *work, bool begins, bool replayed) {
  if (!work || !rc->profiler) return;
  if (begins && replayed) begin(rc, work);
  if (!(rc->profiler->mask & EVENT_KERNEL_CH)) return;
  uint64_t timer = deviceTimer();
  for (int i = 0; i < work->len; i++) {
    struct profiledTask *task = &work->tasks[i];
    if (begins) {
      struct descriptor d = {.type = EVENT_KERNEL_CH, .rank = rc->comm->rank};
      d.parent = task->handle;
      d.kernel.channel = 0;
      d.kernel.timer = timer;
      task->kernel = NULL;
      plugin->start(rc->profiler->context, &task->kernel, &d);
    } else if (task->kernel) {
      uint64_t args[4] = {timer};
      plugin->state(task->kernel, STATE_KERNEL_CH_STOP, args);
      plugin->stop(task->kernel);
    }
  }
}

void profilerFree(struct profiledWork *work) {
  if (!work) return;
  free(work->tasks);
  free(work);
}
#endif

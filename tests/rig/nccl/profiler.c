/* Loads an NCCL profiler plugin as NCCL does and feeds it Coll, P2p and KernelCh events, and the
 * Group and API events that are their parents, whether asked for or not.
 *
 * Plugin tables v4 to v7 are understood; the newest one taken is RIG_PROFILER_VERSION, without it
 * v5, as in 2.28. The plugin must be there when the communicator is made. The event mask is one for
 * all communicators, and is read anew at every call. Operations of a captured graph report at each
 * replay, as they do with KernelCh enabled. Every operation has one channel here; what a rank sends
 * to itself has none. The sends and receives of a group have a channel each, as where there are
 * channels enough: all begin together, and each ends when its own transfer is over. The library of before 2.23 has no profiler. */
#include "profiler.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "exec.h"
#include "rigtopo.h"

#if RIG_NCCL_VERSION < 22300
void profilerInit(struct rigComm *rc) { (void)rc; }
void profilerFinalize(struct rigComm *rc) { (void)rc; }
void profilerAdd(struct rigComm *rc, struct profiledWork **work, const struct ncclInfo *info) {
  (void)rc, (void)work, (void)info;
}
void profilerEnqueued(struct rigComm *rc, struct profiledWork *work, bool captured) {
  (void)rc, (void)work, (void)captured;
}
void profilerKernel(struct rigComm *rc, struct profiledWork *work, bool begin, bool replayed,
                    const struct xferList *done) {
  (void)rc, (void)work, (void)begin, (void)replayed, (void)done;
}
void profilerFree(struct profiledWork *work) { (void)work; }
#else

enum {
  EVENT_GROUP = 1, EVENT_COLL = 2, EVENT_P2P = 4, EVENT_KERNEL_CH = 64,
  EVENT_GROUP_API = 256, EVENT_COLL_API = 512, EVENT_P2P_API = 1024,
};
enum {
  TASKS = EVENT_COLL | EVENT_P2P | EVENT_KERNEL_CH,
  PLANS = TASKS | EVENT_GROUP,
  CALLS = PLANS | EVENT_GROUP_API | EVENT_COLL_API | EVENT_P2P_API,
};
enum { STATE_KERNEL_CH_STOP = 22 };

/* Descriptor of v5; v4 differs in the width of type, which little-endian hides, and ends earlier:
 * there the plan is the parent. v7 ends later. */
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
      const char *kernelVariant;
      bool isSymmetric;
      uint64_t userTag;
    } coll;
    struct {
      const char *func;
      void *buffer;
      const char *datatype;
      uint64_t count;
      int peer;
      uint8_t nChannels;
      void *parentGroup;
      uint64_t userTag;
    } p2p;
    struct {
      bool captured;
      int depth;
    } groupApi;
    struct {
      const char *func;
      uint64_t count;
      const char *datatype;
      int root;
      void *stream;
      bool captured;
    } collApi;
    struct {
      const char *func;
      uint64_t count;
      const char *datatype;
      void *stream;
      bool captured;
    } p2pApi;
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
_Static_assert(offsetof(struct descriptor, coll.userTag) == 128, "profiler ABI");
_Static_assert(offsetof(struct descriptor, collApi.captured) == 64, "profiler ABI");
_Static_assert(offsetof(struct descriptor, p2pApi.captured) == 56, "profiler ABI");
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
  uint64_t seq[16];
};

struct profiledTask {
  struct descriptor what;
  void *handle, *kernel;
  int mask; /* as it was at the call */
  ncclFunc_t func;
};

struct profiledWork {
  struct profiledTask *tasks;
  int len, cap;
  void *groupApi, *group;
};

static const struct table *plugin;
static int version;
static _Atomic int mask;
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
  int newest = (int)rigEnvInt("RIG_PROFILER_VERSION", 5);
  for (version = newest; version >= 4 && !plugin; version--) {
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
  int *events = (int *)&mask;
  int failed = version >= 5
                   ? ((initV5)plugin->init)(&p->context, c->commHash, events, name, c->nNodes,
                                            c->nRanks, c->rank, quiet)
                   : ((initV4)plugin->init)(&p->context, events, name, c->commHash, c->nNodes,
                                            c->nRanks, c->rank, quiet);
  if (failed) {
    free(p);
    return;
  }
  rc->profiler = p;
}

void profilerFinalize(struct rigComm *rc) {
  if (!rc->profiler) return;
  if (rc->profiler->context) plugin->finalize(rc->profiler->context);
  free(rc->profiler);
  rc->profiler = NULL;
}

static const char *typeName(ncclDataType_t type) {
  static const char *const names[ncclNumTypes] = {
      "ncclInt8",    "ncclUint8",   "ncclInt32",   "ncclUint32",   "ncclInt64",     "ncclUint64",
      "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};
  return names[type];
}

static void addTask(struct profiledWork *work, const struct descriptor *what, int events,
                    ncclFunc_t func) {
  if (work->len == work->cap) {
    int cap = work->cap ? 2 * work->cap : 8;
    struct profiledTask *tasks = realloc(work->tasks, (size_t)cap * sizeof(*tasks));
    if (!tasks) return;
    work->tasks = tasks;
    work->cap = cap;
  }
  work->tasks[work->len++] = (struct profiledTask){.what = *what, .mask = events, .func = func};
}

/* From v5 on calls have events of their own; below, they are left out on the way to the plugin. */
static void *startCall(struct rigComm *rc, void *parent, int type, const struct ncclInfo *info,
                       bool send) {
  struct descriptor d = {.type = (uint64_t)type, .parent = parent};
  bool captured = driverCapturing(info->stream);
  void *handle = NULL;
  if (version < 5) return NULL;
  if (type == EVENT_GROUP_API) {
    d.groupApi.captured = captured;
    d.groupApi.depth = 1;
  } else if (type == EVENT_COLL_API) {
    d.collApi.func = info->opName;
    d.collApi.count = info->count;
    d.collApi.datatype = typeName(info->datatype);
    d.collApi.root = info->root;
    d.collApi.stream = info->stream;
    d.collApi.captured = captured;
  } else {
    d.p2pApi.func = send ? "Send" : "Recv";
    d.p2pApi.count = info->count;
    d.p2pApi.datatype = typeName(info->datatype);
    d.p2pApi.stream = info->stream;
    d.p2pApi.captured = captured;
  }
  plugin->start(rc->profiler->context, &handle, &d);
  return handle;
}

static void addCollective(struct rigComm *rc, struct profiledWork *work,
                          const struct ncclInfo *info, int events) {
  struct descriptor d = {.type = EVENT_COLL, .rank = rc->comm->rank};
  if (events & (TASKS | EVENT_COLL_API)) {
    d.parent = startCall(rc, work->groupApi, EVENT_COLL_API, info, false);
    if (d.parent) plugin->stop(d.parent);
  }
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
  addTask(work, &d, events, info->coll);
}

static void addPeer(struct rigComm *rc, struct profiledWork *work, const struct ncclInfo *info,
                    bool send, int peer, int events) {
  struct descriptor d = {.type = EVENT_P2P, .rank = rc->comm->rank};
  if (events & (TASKS | EVENT_P2P_API)) {
    d.parent = startCall(rc, work->groupApi, EVENT_P2P_API, info, send);
    if (d.parent) plugin->stop(d.parent);
  }
  d.p2p.func = send ? "Send" : "Recv";
  d.p2p.buffer = send && info->sendbuff ? (void *)(uintptr_t)info->sendbuff : info->recvbuff;
  d.p2p.datatype = typeName(info->datatype);
  d.p2p.count = info->count;
  d.p2p.peer = peer;
  d.p2p.nChannels = 1;
  addTask(work, &d, events, info->coll);
}

/* All-to-all, gather and scatter show as the sends and receives that they are made of. */
static void addTasks(struct rigComm *rc, struct profiledWork *work, const struct ncclInfo *info,
                     int events) {
  bool root = rc->comm->rank == info->root;
  switch (info->coll) {
    case ncclFuncSend: addPeer(rc, work, info, true, info->root, events); return;
    case ncclFuncRecv: addPeer(rc, work, info, false, info->root, events); return;
    case ncclFuncGather: addPeer(rc, work, info, true, info->root, events); break;
    case ncclFuncScatter: addPeer(rc, work, info, false, info->root, events); break;
    case ncclFuncAlltoAll: break;
    default: addCollective(rc, work, info, events); return;
  }
  for (int peer = 0; peer < rc->comm->nRanks; peer++) {
    bool all = info->coll == ncclFuncAlltoAll;
    if (all || (info->coll == ncclFuncScatter && root)) addPeer(rc, work, info, true, peer, events);
    if (all || (info->coll == ncclFuncGather && root)) addPeer(rc, work, info, false, peer, events);
  }
}

void profilerAdd(struct rigComm *rc, struct profiledWork **work, const struct ncclInfo *info) {
  int events = atomic_load(&mask);
  if (!rc->profiler) return;
  bool first = !*work;
  if (first) *work = calloc(1, sizeof(**work));
  if (!*work) return;
  /* One outermost group; here one for each communicator that takes part in it. */
  if (first && events & CALLS) {
    (*work)->groupApi = startCall(rc, NULL, EVENT_GROUP_API, info, false);
  }
  addTasks(rc, *work, info, events);
}

static int eventsOf(const struct profiledWork *work) {
  for (int i = 0; i < work->len; i++) {
    if (work->tasks[i].mask) return work->tasks[i].mask;
  }
  return 0;
}

static void startTask(struct rigComm *rc, struct profiledWork *work, struct profiledTask *task,
                      bool replayed) {
  struct descriptor d = task->what;
  if (d.type == EVENT_COLL) {
    uint64_t *seq = &rc->profiler->seq[task->func];
    d.coll.seq = *seq;
    if (!replayed || (task->mask & EVENT_KERNEL_CH && (work->group || d.parent))) ++*seq;
    d.coll.parentGroup = work->group;
  } else {
    d.p2p.parentGroup = work->group;
  }
  if (version < 5) d.parent = work->group;
  task->handle = NULL;
  int wants = EVENT_KERNEL_CH | (int)d.type;
  if (task->mask & wants) plugin->start(rc->profiler->context, &task->handle, &d);
}

static void begin(struct rigComm *rc, struct profiledWork *work, bool replayed) {
  work->group = NULL;
  if (eventsOf(work) & PLANS) {
    struct descriptor d = {.type = EVENT_GROUP};
    plugin->start(rc->profiler->context, &work->group, &d);
  }
  for (int i = 0; i < work->len; i++) startTask(rc, work, &work->tasks[i], replayed);
  for (int i = 0; i < work->len; i++) {
    if (work->tasks[i].handle) plugin->stop(work->tasks[i].handle);
  }
  if (work->group) plugin->stop(work->group);
}

void profilerEnqueued(struct rigComm *rc, struct profiledWork *work, bool captured) {
  if (!work || !rc->profiler) return;
  if (!captured) begin(rc, work, false);
  if (work->groupApi) plugin->stop(work->groupApi);
}

static bool hasKernel(const struct rigComm *rc, const struct profiledTask *task) {
  if (!(task->mask & EVENT_KERNEL_CH)) return false;
  return task->what.type != EVENT_P2P || task->what.p2p.peer != rc->comm->rank;
}

/* The device's globaltimer counts nanoseconds of its own; here it is the wall clock. */
static uint64_t deviceTimer(void) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* How long ago the last transfer with the task's peer, in its direction, was over. */
static uint64_t overFor(const struct profiledTask *task, const struct xferList *done, uint64_t now) {
  uint64_t last = 0;
  if (!done || task->what.type != EVENT_P2P) return 0;
  bool send = !strcmp(task->what.p2p.func, "Send");
  for (int i = 0; i < done->len; i++) {
    const struct xfer *x = &done->items[i];
    if (x->peer == task->what.p2p.peer && x->send == send && x->doneNs > last) last = x->doneNs;
  }
  return last && last < now ? now - last : 0;
}

void profilerKernel(struct rigComm *rc, struct profiledWork *work, bool begins, bool replayed,
                    const struct xferList *done) {
  uint64_t now = nowNs(); /* before the timer: no transfer may seem to end before it began */
  uint64_t timer = deviceTimer();
  if (!work || !rc->profiler) return;
  if (begins && replayed) begin(rc, work, true);
  for (int i = 0; i < work->len; i++) {
    struct profiledTask *task = &work->tasks[i];
    if (!hasKernel(rc, task)) continue;
    if (begins) {
      struct descriptor d = {.type = EVENT_KERNEL_CH, .rank = rc->comm->rank};
      d.parent = task->handle;
      d.kernel.channel = 0;
      d.kernel.timer = timer;
      task->kernel = NULL;
      plugin->start(rc->profiler->context, &task->kernel, &d);
    } else if (task->kernel) {
      uint64_t args[4] = {timer - overFor(task, done, now)};
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

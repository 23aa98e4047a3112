/* Streams: a queue and a worker thread each, started at first use.
 *
 * A kernel is only time. The worker keeps the stream's own clock: a kernel starts when it was
 * enqueued or when its predecessor ended, whichever is later, and the thread sleeps to absolute
 * times. Late wake-ups on a crowded machine therefore do not add up, and a run of kernels costs
 * one sleep. Host functions (NCCL's work) run when the clock has been reached in real time. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "internal.h"

/* The real launch queue holds about a thousand entries too; a full one blocks the launching call. */
enum { QUEUE_DEPTH = 1024 };

struct CUstream_st {
  pthread_mutex_t lock;
  pthread_cond_t work, space, done;
  struct op ring[QUEUE_DEPTH];
  uint64_t pushed, finished;
  int sleepers;
  unsigned flags;
  bool started, stopping;
  uint64_t clock;
  struct CUgraph_st *capture;
  struct told told;
  pthread_t thread;
  struct CUstream_st *next;
};

static pthread_mutex_t registryLock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *registry;
static struct CUstream_st *legacy[RIG_MAX_GPUS];
static __thread struct CUstream_st *perThread;

uint64_t nowNs(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void sleepUntil(uint64_t ns) {
  struct timespec ts = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR) {
  }
}

bool opListAdd(struct opList *list, const struct op *op) {
  if (list->len == list->cap) {
    size_t cap = list->cap ? 2 * list->cap : 32;
    struct op *items = realloc(list->items, cap * sizeof(*items));
    if (!items) return false;
    list->items = items;
    list->cap = cap;
  }
  list->items[list->len++] = *op;
  return true;
}

void opListFree(struct opList *list) {
  free(list->items);
  memset(list, 0, sizeof(*list));
}

/* Everything but a kernel happens at a point of the stream's clock, so real time must reach it. */
static void settle(struct CUstream_st *s) {
  if (s->clock > nowNs()) sleepUntil(s->clock);
  injectFlush(&s->told);
}

static void runKernel(struct CUstream_st *s, const struct op *op, uint64_t queued) {
  if (s->clock < queued) s->clock = queued;
  uint64_t start = s->clock;
  s->clock += op->scale ? (uint64_t)((double)op->ns * *op->scale) : op->ns;
  if (s->told.count == TOLD_MOST) settle(s);
  injectRan(&s->told, op, start, s->clock);
}

static void runOp(struct CUstream_st *s, const struct op *op, uint64_t queued);

static void runGraph(struct CUstream_st *s, struct CUgraphExec_st *graph, uint64_t queued) {
  if (s->told.count) settle(s);
  s->told.graph = 1;
  s->told.node = 1;
  for (size_t i = 0; i < graph->ops.len; i++) runOp(s, &graph->ops.items[i], queued);
  if (s->told.count) settle(s);
  s->told.graph = 0;
}

static void runOp(struct CUstream_st *s, const struct op *op, uint64_t queued) {
  if (!s->told.graph) s->told.correlation = op->correlation;
  if (op->kind == OP_KERNEL) {
    runKernel(s, op, queued);
    return;
  }
  if (op->kind == OP_GRAPH) {
    runGraph(s, op->graph, queued);
    return;
  }
  settle(s);
  if (op->kind == OP_HOST) {
    uint64_t start = nowNs();
    op->fn(op->arg);
    injectRan(&s->told, op, start, nowNs());
    injectFlush(&s->told);
  }
  if (op->kind == OP_COPY) memmove(op->dst, op->src, op->bytes);
  if (op->kind == OP_RECORD) eventComplete(op->event, op->gen);
  if (op->kind == OP_WAIT) eventWait(op->event, op->gen);
  s->clock = nowNs();
}

static void *worker(void *arg) {
  struct CUstream_st *s = arg;
  prctl(PR_SET_TIMERSLACK, 1000UL);
  prctl(PR_SET_NAME, "rig-stream");
  pthread_mutex_lock(&s->lock);
  for (;;) {
    while (s->pushed == s->finished && !s->stopping) {
      s->sleepers = 1;
      pthread_cond_wait(&s->work, &s->lock);
      s->sleepers = 0;
    }
    if (s->pushed == s->finished) break;
    struct op op = s->ring[s->finished % QUEUE_DEPTH];
    bool last = s->pushed == s->finished + 1;
    pthread_mutex_unlock(&s->lock);
    runOp(s, &op, op.queued);
    /* The queue must not look empty before the last kernel's time is over. */
    if (last) settle(s);
    pthread_mutex_lock(&s->lock);
    s->finished++;
    pthread_cond_signal(&s->space);
    if (s->pushed == s->finished) pthread_cond_broadcast(&s->done);
  }
  pthread_mutex_unlock(&s->lock);
  return NULL;
}

/* Signals belong to the program's own threads. */
static bool startWorker(struct CUstream_st *s) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int failed = pthread_create(&s->thread, NULL, worker, s);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  s->started = !failed;
  return !failed;
}

struct CUstream_st *streamNew(unsigned flags) {
  struct CUstream_st *s = calloc(1, sizeof(*s));
  if (!s) return NULL;
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->work, NULL);
  pthread_cond_init(&s->space, NULL);
  pthread_cond_init(&s->done, NULL);
  s->flags = flags;
  pthread_mutex_lock(&registryLock);
  s->next = registry;
  registry = s;
  pthread_mutex_unlock(&registryLock);
  return s;
}

void streamFree(struct CUstream_st *s) {
  pthread_mutex_lock(&registryLock);
  for (struct CUstream_st **at = &registry; *at; at = &(*at)->next) {
    if (*at != s) continue;
    *at = s->next;
    break;
  }
  pthread_mutex_unlock(&registryLock);
  pthread_mutex_lock(&s->lock);
  s->stopping = true;
  pthread_cond_signal(&s->work);
  pthread_mutex_unlock(&s->lock);
  if (s->started) pthread_join(s->thread, NULL);
  free(s);
}

static struct CUstream_st *legacyStream(void) {
  int device = currentDevice();
  struct CUstream_st *s = __atomic_load_n(&legacy[device], __ATOMIC_ACQUIRE);
  if (s) return s;
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  if (!legacy[device]) __atomic_store_n(&legacy[device], streamNew(0), __ATOMIC_RELEASE);
  pthread_mutex_unlock(&lock);
  return legacy[device];
}

struct CUstream_st *streamResolve(CUstream stream, bool ptsz) {
  uintptr_t handle = (uintptr_t)stream;
  if (handle > 2) return stream;
  if (handle == 1 || (handle == 0 && !ptsz)) return legacyStream();
  if (!perThread) perThread = streamNew(0);
  return perThread;
}

CUresult streamPush(struct CUstream_st *s, struct op op) {
  if (!s) return CUDA_ERROR_OUT_OF_MEMORY;
  op.queued = nowNs();
  pthread_mutex_lock(&s->lock);
  if (s->capture) {
    bool added = op.kind != OP_GRAPH && opListAdd(&s->capture->ops, &op);
    pthread_mutex_unlock(&s->lock);
    return added ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (!s->started && !startWorker(s)) {
    pthread_mutex_unlock(&s->lock);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  while (s->pushed - s->finished >= QUEUE_DEPTH) pthread_cond_wait(&s->space, &s->lock);
  s->ring[s->pushed++ % QUEUE_DEPTH] = op;
  bool wake = s->sleepers;
  pthread_mutex_unlock(&s->lock);
  if (wake) pthread_cond_signal(&s->work);
  return CUDA_SUCCESS;
}

CUresult streamDrain(struct CUstream_st *s) {
  if (!s) return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&s->lock);
  CUresult result = s->capture ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
  while (!result && s->pushed != s->finished) pthread_cond_wait(&s->done, &s->lock);
  pthread_mutex_unlock(&s->lock);
  return result;
}

CUresult streamIdle(struct CUstream_st *s) {
  pthread_mutex_lock(&s->lock);
  bool idle = s->pushed == s->finished;
  pthread_mutex_unlock(&s->lock);
  return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult streamDrainAll(bool blockingOnly) {
  struct CUstream_st *all[256];
  int count = 0;
  pthread_mutex_lock(&registryLock);
  for (struct CUstream_st *s = registry; s && count < 256; s = s->next) {
    if (!(blockingOnly && (s->flags & CU_STREAM_NON_BLOCKING))) all[count++] = s;
  }
  pthread_mutex_unlock(&registryLock);
  CUresult result = CUDA_SUCCESS;
  for (int i = 0; i < count && !result; i++) result = streamDrain(all[i]);
  return result;
}

bool streamCapturing(struct CUstream_st *s) {
  pthread_mutex_lock(&s->lock);
  bool capturing = s->capture != NULL;
  pthread_mutex_unlock(&s->lock);
  return capturing;
}

CUresult streamCaptureBegin(struct CUstream_st *s) {
  struct CUgraph_st *graph = calloc(1, sizeof(*graph));
  if (!graph) return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&s->lock);
  bool busy = s->capture != NULL;
  if (!busy) s->capture = graph;
  pthread_mutex_unlock(&s->lock);
  if (busy) free(graph);
  return busy ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult streamCaptureEnd(struct CUstream_st *s, CUgraph *out) {
  pthread_mutex_lock(&s->lock);
  *out = s->capture;
  s->capture = NULL;
  pthread_mutex_unlock(&s->lock);
  return *out ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* A plan is what one communicator does for one group: its collectives in order, then all its
 * point-to-point transfers together. It is one host function on the stream, and, when the stream
 * is being captured, one node that every replay runs again without any NCCL call. */
#include <stdlib.h>
#include <string.h>

#include "exec.h"
#include "profiler.h"

enum { MAX_STREAMS = 8 };

struct plan {
  struct rigComm *rc;
  ncclStream_t streams[MAX_STREAMS];
  int streamCount;
  struct ncclInfo *colls;
  int collCount;
  struct xferList xfers;
  bool captured;
  uint64_t ticket, tag, step;
  struct profiledWork *profiled;
  /* Other streams of the same group stop until the work is over; the last one frees the plan. */
  pthread_mutex_t lock;
  pthread_cond_t moved;
  int arrived, users;
  bool over;
};

static __thread uint64_t currentTag;
static _Atomic uint64_t currentStep;
static void (*_Atomic observer)(const rigNcclWork *);

void rigNcclTag(uint64_t tag) { currentTag = tag; }
void rigNcclSetStep(uint64_t step) { atomic_store(&currentStep, step); }
void rigNcclObserve(void (*fn)(const rigNcclWork *)) { atomic_store(&observer, fn); }

struct plan *planNew(struct rigComm *rc, ncclStream_t stream) {
  struct plan *plan = calloc(1, sizeof(*plan));
  if (!plan) return NULL;
  plan->rc = rc;
  plan->streams[plan->streamCount++] = stream;
  plan->users = 1;
  pthread_mutex_init(&plan->lock, NULL);
  pthread_cond_init(&plan->moved, NULL);
  return plan;
}

void planFree(struct plan *plan) {
  free(plan->colls);
  free(plan->xfers.items);
  profilerFree(plan->profiled);
  free(plan);
}

static bool addStream(struct plan *plan, ncclStream_t stream) {
  for (int i = 0; i < plan->streamCount; i++) {
    if (plan->streams[i] == stream) return true;
  }
  if (plan->streamCount == MAX_STREAMS) return false;
  plan->streams[plan->streamCount++] = stream;
  return true;
}

static bool addCollective(struct plan *plan, const struct ncclInfo *info) {
  struct ncclInfo *grown = realloc(plan->colls, (size_t)(plan->collCount + 1) * sizeof(*grown));
  if (!grown) return false;
  plan->colls = grown;
  plan->colls[plan->collCount++] = *info;
  return true;
}

/* With one rank an operation in place has nothing to do; NCCL enqueues nothing then either. */
static bool isNothing(const struct rigComm *rc, const struct ncclInfo *info) {
  if (!info->count) return true;
  return rc->comm->nRanks == 1 && info->sendbuff == info->recvbuff && (int)info->op < ncclNumOps;
}

bool planAdd(struct plan *plan, const struct ncclInfo *info) {
  if (isNothing(plan->rc, info)) return true;
  if (!addStream(plan, info->stream)) return false;
  profilerAdd(plan->rc, &plan->profiled, info);
  return isP2p(info->coll) ? expandP2p(plan->rc, info, &plan->xfers) : addCollective(plan, info);
}

static void leave(struct plan *plan) {
  pthread_mutex_lock(&plan->lock);
  bool last = --plan->users == 0;
  pthread_mutex_unlock(&plan->lock);
  if (last && !plan->captured) planFree(plan);
}

static void waitOnSideStream(void *arg) {
  struct plan *plan = arg;
  pthread_mutex_lock(&plan->lock);
  plan->arrived++;
  pthread_cond_broadcast(&plan->moved);
  while (!plan->over) pthread_cond_wait(&plan->moved, &plan->lock);
  pthread_mutex_unlock(&plan->lock);
  leave(plan);
}

static void gatherSideStreams(struct plan *plan) {
  pthread_mutex_lock(&plan->lock);
  while (plan->arrived < plan->streamCount - 1) pthread_cond_wait(&plan->moved, &plan->lock);
  pthread_mutex_unlock(&plan->lock);
}

static void releaseSideStreams(struct plan *plan) {
  pthread_mutex_lock(&plan->lock);
  plan->over = true;
  pthread_cond_broadcast(&plan->moved);
  pthread_mutex_unlock(&plan->lock);
}

static ncclResult_t runWork(struct plan *plan, uint64_t step) {
  struct rigComm *rc = plan->rc;
  ncclResult_t result = atomic_load(&rc->asyncError);
  if (atomic_load(&rc->revoked) || atomic_load(&rc->abort)) result = ncclInvalidUsage;
  for (int i = 0; i < plan->collCount && !result; i++) {
    result = collectiveRun(rc, &plan->colls[i], step);
  }
  if (plan->xfers.len && !result) result = transferAll(rc, &plan->xfers, step);
  if (result && !atomic_load(&rc->abort)) atomic_store(&rc->asyncError, (int)result);
  return result;
}

/* Runs on the stream's thread. */
static void planRun(void *arg) {
  struct plan *plan = arg;
  struct rigComm *rc = plan->rc;
  uint64_t ticket = plan->captured ? turnTake(&rc->work) : plan->ticket;
  uint64_t step = plan->captured ? atomic_load(&currentStep) : plan->step;
  if (!plan->captured) gatherSideStreams(plan);
  turnWait(&rc->work, ticket);
  rigNcclWork work = {.tag = plan->tag, .step = step, .commHash = rc->comm->commHash};
  work.isP2p = plan->xfers.len > 0;
  work.beginNs = nowNs();
  profilerKernel(rc, plan->profiled, true, plan->captured, NULL);
  work.result = (int)runWork(plan, step);
  work.endNs = nowNs(); /* not with the time that a plugin takes */
  profilerKernel(rc, plan->profiled, false, plan->captured, &plan->xfers);
  void (*watch)(const rigNcclWork *) = atomic_load(&observer);
  if (watch) watch(&work);
  turnDone(&rc->work);
  releaseSideStreams(plan);
  leave(plan);
}

static ncclResult_t launchSides(struct plan *plan) {
  for (int i = 1; i < plan->streamCount; i++) {
    ncclResult_t result = driverLaunch(plan->streams[i], waitOnSideStream, plan);
    if (result) return result;
  }
  return ncclSuccess;
}

/* As the real kernels are called. */
static const char *kernelName(const struct plan *plan) {
  if (plan->xfers.len) return "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)";
  switch ((int)plan->colls[0].coll) {
    case 0: return "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)";
    case 1: return "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)";
    case 2: return "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)";
    case 3: return "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)";
    case 4: return "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)";
    default: return "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)";
  }
}

ncclResult_t planLaunch(struct plan *plan) {
  struct rigComm *rc = plan->rc;
  if (!plan->collCount && !plan->xfers.len) {
    planFree(plan);
    return ncclSuccess;
  }
  plan->captured = driverCapturing(plan->streams[0]);
  plan->tag = currentTag;
  plan->step = atomic_load(&currentStep);
  plan->users = plan->captured ? 1 : plan->streamCount;
  profilerEnqueued(rc, plan->profiled, plan->captured); /* before the work can begin */
  if (!plan->captured) plan->ticket = turnTake(&rc->work);
  ncclResult_t result = plan->captured ? ncclSuccess : launchSides(plan);
  driverName(kernelName(plan));
  if (!result) result = driverLaunch(plan->streams[0], planRun, plan);
  if (result && !plan->captured) {
    turnWait(&rc->work, plan->ticket); /* the turn must pass, or later work would wait for ever */
    turnDone(&rc->work);
  }
  return result;
}

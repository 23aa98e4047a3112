/* Groups. Nothing happens before the outermost end: then communicator creations run, each on a
 * thread of its own (one thread may hold several ranks), and then every communicator launches
 * what it collected. */
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "life.h"

enum { MAX_COMMS = 64, MAX_JOBS = 256 };

static __thread struct group {
  int depth;
  ncclResult_t error;
  struct plan *plans[MAX_COMMS];
  struct rigComm *comms[MAX_COMMS];
  int planCount;
  ncclAsyncJob *jobs[MAX_JOBS];
  int jobCount;
} group;

ncclResult_t groupStartInternal(void) {
  group.depth++;
  return ncclSuccess;
}

void groupFail(ncclResult_t error) {
  if (group.depth && error && error != ncclInProgress) group.error = error;
}

bool groupAddTask(const struct ncclInfo *info) {
  struct rigComm *rc = info->comm->rig;
  int i = 0;
  while (i < group.planCount && group.comms[i] != rc) i++;
  if (i == MAX_COMMS) return false;
  if (i == group.planCount) {
    struct plan *plan = planNew(rc, info->stream);
    if (!plan) return false;
    group.plans[i] = plan;
    group.comms[i] = rc;
    group.planCount++;
  }
  return planAdd(group.plans[i], info);
}

static void *jobMain(void *arg) { return (void *)(uintptr_t)ncclCommInitRankFunc(arg); }

static void *detachedJob(void *arg) {
  ncclCommInitRankFunc(arg);
  asyncJobFree(arg);
  return NULL;
}

/* With config.blocking = 0 the caller polls ncclCommGetAsyncError; destroy joins the thread. */
static bool startNonBlocking(ncclAsyncJob *job) {
  struct rigComm *rc = job->comm ? job->comm->rig : NULL;
  if (!rc || rc->blocking) return false;
  if (job->newcomm) *job->newcomm = job->comm;
  rc->initThreadRuns = !pthread_create(&rc->initThread, NULL, detachedJob, job);
  return rc->initThreadRuns;
}

ncclResult_t groupAddJob(ncclAsyncJob *job) {
  if (group.depth == 0) {
    if (startNonBlocking(job)) return ncclInProgress;
    ncclResult_t result = ncclCommInitRankFunc(job);
    asyncJobFree(job);
    return result;
  }
  if (group.jobCount == MAX_JOBS) {
    asyncJobFree(job);
    return ncclInternalError;
  }
  group.jobs[group.jobCount++] = job;
  return ncclSuccess;
}

static ncclResult_t runJobs(void) {
  pthread_t threads[MAX_JOBS];
  int count = 0;
  ncclResult_t result = ncclSuccess;
  for (int i = 0; i < group.jobCount; i++) {
    if (startNonBlocking(group.jobs[i])) {
      result = ncclInProgress;
      continue;
    }
    group.jobs[count] = group.jobs[i];
    if (pthread_create(&threads[count], NULL, jobMain, group.jobs[i])) return ncclSystemError;
    count++;
  }
  for (int i = 0; i < count; i++) {
    void *one = NULL;
    pthread_join(threads[i], &one);
    if (one) result = (ncclResult_t)(uintptr_t)one;
    asyncJobFree(group.jobs[i]);
  }
  return result;
}

static void dropAll(void) {
  for (int i = 0; i < group.planCount; i++) planFree(group.plans[i]);
  for (int i = 0; i < group.jobCount; i++) asyncJobFree(group.jobs[i]);
}

ncclResult_t groupEndInternal(ncclSimInfo_t *info) {
  if (group.depth == 0) {
    rigWarn("ncclGroupEnd: not in a group call");
    return ncclInvalidUsage;
  }
  if (--group.depth > 0) return ncclSuccess;
  ncclResult_t result = group.error;
  if (result || info) {
    dropAll();
    if (info) info->estimatedTime = 0;
  } else {
    result = runJobs();
    for (int i = 0; i < group.planCount; i++) {
      ncclResult_t one = planLaunch(group.plans[i]);
      if (one) result = one;
    }
  }
  group.planCount = group.jobCount = 0;
  group.error = ncclSuccess;
  return result;
}

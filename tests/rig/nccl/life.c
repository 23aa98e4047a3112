/* How a communicator comes to be: the job behind init, split, shrink and grow. */
#include "life.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exec.h"
#include "profiler.h"
#include "rigtopo.h"

uint64_t turnTake(struct turnstile *t) {
  pthread_mutex_lock(&t->lock);
  uint64_t ticket = t->given++;
  pthread_mutex_unlock(&t->lock);
  return ticket;
}

void turnWait(struct turnstile *t, uint64_t ticket) {
  pthread_mutex_lock(&t->lock);
  while (t->turn != ticket) pthread_cond_wait(&t->moved, &t->lock);
  pthread_mutex_unlock(&t->lock);
}

void turnDone(struct turnstile *t) {
  pthread_mutex_lock(&t->lock);
  t->turn++;
  pthread_cond_broadcast(&t->moved);
  pthread_mutex_unlock(&t->lock);
}

void turnDrain(struct turnstile *t) {
  pthread_mutex_lock(&t->lock);
  while (t->turn != t->given) pthread_cond_wait(&t->moved, &t->lock);
  pthread_mutex_unlock(&t->lock);
}

static void turnInit(struct turnstile *t) {
  pthread_mutex_init(&t->lock, NULL);
  pthread_cond_init(&t->moved, NULL);
}

ncclResult_t configCheck(const ncclConfig_t *config) {
  if (!config) return ncclSuccess;
  if (config->magic != NCCL_CONFIG_MAGIC) {
    rigWarn("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

static void readConfig(struct rigComm *rc, const ncclConfig_t *config) {
  /* The structure grew over the versions: its own size says which fields it has. */
  if (config->size >= 20 && config->blocking != NCCL_CONFIG_UNDEF_INT) {
    rc->blocking = config->blocking != 0;
  }
  if (config->size >= offsetof(ncclConfig_t, commName) + sizeof(char *) && config->commName) {
    snprintf(rc->commName, sizeof(rc->commName), "%s", config->commName);
  }
}

struct ncclComm *commAlloc(const ncclConfig_t *config, const struct ncclComm *parent) {
  struct ncclComm *comm = calloc(1, sizeof(*comm));
  struct rigComm *rc = calloc(1, sizeof(*rc));
  if (!comm || !rc) {
    free(comm);
    free(rc);
    return NULL;
  }
  comm->startMagic = comm->endMagic = COMM_MAGIC;
  comm->rig = rc;
  rc->comm = comm;
  rc->blocking = parent ? parent->rig->blocking : true;
  if (config) readConfig(rc, config);
  turnInit(&rc->work);
  turnInit(&rc->host);
  return comm;
}

void commFree(struct ncclComm *comm) {
  struct rigComm *rc = comm->rig;
  profilerFinalize(rc);
  segDetach(rc->seg);
  /* As NCCL does: a stale handle must not look like a communicator. */
  comm->startMagic = comm->endMagic = 0;
  comm->rig = NULL;
  comm->rank = comm->cudaDev = -1;
  free(rc);
  free(comm);
}

uint64_t uniqueIdMagic(const ncclUniqueId *id) {
  uint64_t magic;
  memcpy(&magic, id, sizeof(magic));
  return magic;
}

static void setDevice(struct ncclComm *comm, int cudaDev) {
  int gpu = driverPhysicalGpu(cudaDev);
  comm->cudaDev = cudaDev;
  comm->nvmlDev = gpu;
  comm->busId = rigGpuBusId64(gpu);
}

/* Nodes are numbered in the order in which ranks first mention them. */
static void countNodes(struct ncclComm *comm) {
  struct shmPeer *peers = comm->rig->seg->peers;
  comm->nNodes = comm->localRanks = comm->localRank = 0;
  for (int i = 0; i < comm->nRanks; i++) {
    bool first = true;
    for (int j = 0; j < i && first; j++) first = peers[j].node != peers[i].node;
    if (peers[i].node == peers[comm->rank].node) {
      if (first) comm->node = comm->nNodes;
      if (i < comm->rank) comm->localRank++;
      comm->localRanks++;
    }
    comm->nNodes += first;
  }
}

/* Every rank tells the others its colour and key; the parent's segment carries them. */
static ncclResult_t splitMembers(ncclAsyncJob *job) {
  struct rigComm *rc = job->parent->rig;
  struct shmPeer *peers = rc->seg->peers;
  int self = job->parent->rank, n = job->parent->nRanks;
  peers[self].color = job->color;
  peers[self].key = job->key;
  ncclResult_t result = segBarrier(rc, &rc->seg->head->host);
  if (result) return result;
  job->nranks = job->rank = 0;
  for (int i = 0; i < n; i++) {
    if (peers[i].color != job->color) continue;
    bool before = peers[i].key < job->key || (peers[i].key == job->key && i < self);
    job->rank += i != self && before;
    job->nranks++;
  }
  /* Nobody may write the next split's colour before everybody has read this one's. */
  return segBarrier(rc, &rc->seg->head->host);
}

static bool excluded(const ncclAsyncJob *job, int rank) {
  for (int i = 0; i < job->excludeCount; i++) {
    if (job->exclude[i] == rank) return true;
  }
  return false;
}

static void shrinkMembers(ncclAsyncJob *job) {
  job->nranks = job->rank = 0;
  for (int i = 0; i < job->parent->nRanks; i++) {
    if (excluded(job, i)) continue;
    job->rank += i < job->parent->rank;
    job->nranks++;
  }
}

/* Which memory the ranks meet in, apart from commHash: hashes may repeat, memory may not. */
static uint64_t shrinkKey(const ncclAsyncJob *job) {
  uint64_t key = hashChildNew(job->parent->rig->key, job->shrinkCount, 0x5411);
  for (int i = 0; i < job->parent->nRanks; i++) {
    if (excluded(job, i)) key = hashCombine(key, (uint64_t)i);
  }
  return key;
}

static ncclResult_t nameComm(ncclAsyncJob *job) {
  struct rigComm *rc = job->comm ? job->comm->rig : NULL;
  struct rigComm *up = job->parent ? job->parent->rig : NULL;
  switch (job->kind) {
    case JOB_INIT:
      rc->magic = uniqueIdMagic(&job->id);
      rc->key = hashNew(&job->id, sizeof(job->id));
      rc->comm->commHash = hashUniqueId(&job->id);
      return ncclSuccess;
    case JOB_GROW:
      rc->magic = job->magic;
      rc->key = rc->comm->commHash = hashCombine(job->magic, (uint64_t)job->nranks);
      return ncclSuccess;
    case JOB_SHRINK:
      shrinkMembers(job);
      /* NCCL does not count a shrink: count and colour are zero every time. */
      rc->magic = rc->comm->commHash = hashChild(job->parent->commHash, 0, 0);
      rc->key = shrinkKey(job);
      return ncclSuccess;
    case JOB_SPLIT: break;
  }
  turnWait(&up->host, job->hostTicket);
  ncclResult_t result = splitMembers(job);
  turnDone(&up->host);
  if (!rc || result) return result;
  rc->comm->commHash = hashChild(job->parent->commHash, job->childCount, job->color);
  rc->magic = rc->comm->commHash;
  rc->key = hashChildNew(up->key, job->childCount, job->color);
  return ncclSuccess;
}

static ncclResult_t meet(ncclAsyncJob *job) {
  struct ncclComm *comm = job->comm;
  comm->rank = job->rank;
  comm->nRanks = job->nranks;
  setDevice(comm, job->cudaDev);
  ncclResult_t result = segAttach(comm->rig, job->nranks, job->rank);
  if (result) return result;
  countNodes(comm);
  profilerInit(comm->rig);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankFunc(ncclAsyncJob *job) {
  driverSetDevice(job->cudaDev);
  ncclResult_t result = nameComm(job);
  if (!result && job->comm) result = meet(job);
  if (job->comm) {
    struct rigComm *rc = job->comm->rig;
    atomic_store(&rc->asyncError, (int)result);
    bool child = job->kind == JOB_SPLIT || job->kind == JOB_SHRINK;
    if (!result && child) *job->newcomm = job->comm;
  }
  return result;
}

void asyncJobFree(ncclAsyncJob *job) {
  free(job->exclude);
  free(job);
}
